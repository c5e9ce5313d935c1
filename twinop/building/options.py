"""How to build a library, and what of it CMake is told."""

from dataclasses import dataclass

from ..errors import BuildError

_SANITIZERS = {
    "address": "-fsanitize=address",
    # With the null checks, GCC takes no function's address for a constant.
    "undefined": "-fsanitize=undefined -fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute",
}


@dataclass(frozen=True)
class Options:
    """How to build."""

    archs: str = "native"  # CUDA architectures: `native`, `all`, or a list such as `80,90`
    cpu: bool = False  # leaves the CUDA kernels out
    debug: bool = False  # no optimization, symbols, assertions
    sanitize: str = ""  # `address`, `undefined` or both with a comma, on the host

    def of_cmake(self) -> list[str]:
        """Returns lines of a CMakeLists.txt that say the same; BuildError: an unknown sanitizer."""
        names = [name.strip() for name in self.sanitize.split(",") if name.strip()]
        if any(name not in _SANITIZERS for name in names):
            raise BuildError(
                f"--sanitize {self.sanitize}: expected {' or '.join(_SANITIZERS)}, or both with a comma"
            )
        kind = "Debug" if self.debug else "RelWithDebInfo" if names else "Release"
        flags = " ".join(_SANITIZERS[name] for name in names)
        return [
            f"set(CMAKE_BUILD_TYPE {kind})",
            f'add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:{flags.replace(" ", ";")}>")',
            f"add_link_options({flags})",
        ]
