"""Compiles Triton kernels for several architectures, on a machine with or without a GPU.

Triton's own compiler and its cache are used, with the cache in twinop's cache folder. The key of a kernel has
its source and that of all functions that it calls, types, options, the architecture, and Triton's version.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

from ..aot_kernels.plan import Image, Kernel
from ..building.cache import cache_folder
from ..errors import BuildError
from ..installation import version_numbers

SHARED_MEMORY = {
    75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
"""How many KiB of shared memory a block can have, by architecture (CUDA programming guide)."""

_LAST_PORTABLE = 89  # from 90 on Triton compiles for "sm_90a": such PTX runs on that architecture only
_PTX_VERSION = 80  # of CUDA 12.0: a GPU newer than the library has a driver that is newer than this

OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton that the tests cover."""


@dataclass(frozen=True)
class Source:
    """A kernel with all that Triton's compiler specialises it for."""

    kernel: Any  # a `triton.JITFunction`
    signature: Mapping[str, Any]  # "*fp32", "i64", "constexpr", by parameter
    constants: Mapping[tuple[int, ...], Any]  # the values of the parameters that are "constexpr", by position
    attributes: Mapping[tuple[int, ...], Any]  # such as "tt.divisibility", by position
    options: Mapping[str, Any]  # num_warps, num_stages and so on
    label: str  # names the kernel and its line in messages

    @property
    def key(self) -> tuple[Any, ...]:
        """Is equal for sources that compile to the same kernel."""
        parts = (self.signature, self.constants, self.attributes, self.options)
        return (id(self.kernel), *(repr(sorted(part.items())) for part in parts))


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. `ttir`: the texts of its intermediate code, which may depend on the architecture."""

    kernel: Kernel
    ttir: frozenset[str]


def check_triton() -> None:
    """Raises BuildError if Triton is absent, or of an untested version."""
    try:
        import triton
    except ImportError as error:
        raise BuildError(
            f"Triton cannot be imported: {error}. Its kernels need it: pip install 'twinop[triton]'. A "
            "library that `twinop build` made needs no Triton"
        ) from None
    check_version("Triton", triton.__version__, OLDEST, NEWEST)


def check_version(name: str, version: str, oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Raises a BuildError if a version of a package was not tested."""
    if not oldest <= version_numbers(version) <= newest:
        first, last = (".".join(map(str, numbers)) for numbers in (oldest, newest))
        raise BuildError(
            f"{name} {version} was not tested with this version of twinop; expected {first} to {last}: "
            f"pip install '{name.lower()}=={last}.*'"
        )


def compile_kernels(
    sources: Sequence[Source], archs: Sequence[int], *, ptx: bool = True, check_ptx: bool = True
) -> list[Compiled | BuildError]:
    """Compiles kernels for architectures and, if `ptx`, to PTX for GPUs newer than these.

    The PTX is of the newest of the architectures below 90, or of 89: PTX of later ones is not portable. A
    kernel that does not compile for it, such as one with clusters, has no PTX. With `check_ptx`, ptxas, which
    takes a third of the time, tells if the PTX is valid for its target.

    Returns for each source the kernel, or why it does not compile: Triton or ptxas refuses it, or it needs
    more shared memory than one of the architectures has.
    """
    if not sources:
        return []
    portable = max((arch for arch in archs if arch <= _LAST_PORTABLE), default=_LAST_PORTABLE)
    with _settings(), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = [_run(pool, sources, arch) for arch in archs]
        # Triton prints what ptxas says of code that has no PTX for older GPUs, as that of 8-bit floats.
        with redirect_stdout(StringIO()), nullcontext() if check_ptx else _without_ptxas():
            texts = _run(pool, sources, portable, ptx_version=_PTX_VERSION) if ptx else [None] * len(sources)
    results: list[Compiled | BuildError] = []
    for source, text, *of_source in zip(sources, texts, *made, strict=True):
        by_arch = dict(zip(archs, of_source, strict=True))
        try:
            results.append(
                _compiled(source, by_arch, None if isinstance(text, Exception) else text, portable)
            )
        except BuildError as error:
            results.append(error)
    return results


def _compiled(source: Source, by_arch: Mapping[int, Any], text: Any, portable: int) -> Compiled:
    """Puts the results for all architectures together."""
    for arch, result in by_arch.items():
        if isinstance(result, Exception):
            raise _failure(source, arch, result) from result
        _check_memory(source, arch, result.metadata)
    images = [
        _image(f"{arch}a" if arch > _LAST_PORTABLE else str(arch), result.asm["cubin"], result.metadata)
        for arch, result in by_arch.items()
    ]
    made = list(by_arch.values())
    if text:
        images.append(_image(str(portable), _without_comments(text.asm["ptx"]), text.metadata, is_ptx=True))
        made.append(text)
    one = made[0].metadata
    kernel = Kernel(
        name=one.name,
        label=source.label,
        images=tuple(images),
        cluster=one.num_ctas,
        cooperative=one.launch_cooperative_grid,
        pdl=one.launch_pdl,
        scratch_pointers=2,
    )
    return Compiled(kernel, frozenset(result.asm["ttir"] for result in made))


def _image(arch: str, code: bytes, metadata: Any, is_ptx: bool = False) -> Image:
    assert metadata.global_scratch_align <= 256, metadata
    threads, scratch = 32 * metadata.num_warps, metadata.global_scratch_size
    return Image(arch, code, is_ptx, threads, metadata.shared, scratch)


@contextmanager
def _settings() -> Iterator[None]:
    """Sets Triton's cache folder, and keeps the paths of this machine out of what it compiles."""
    import triton

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(cache_folder() / "triton")
        triton.knobs.compilation.disable_line_info = True
        yield


@contextmanager
def _without_ptxas() -> Iterator[None]:
    """Leaves out the step from PTX to machine code."""
    import triton

    def hook(*arguments: Any) -> Any:
        if not arguments:  # Triton asks for what the hook adds to the key of its cache
            return "twinop: PTX", "twinop: PTX"
        arguments[1]["cubin"] = lambda text, metadata: b""
        return None

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = hook
        yield


def _run(pool: ThreadPoolExecutor, sources: Sequence[Source], arch: int, **options: Any) -> list[Any]:
    """Compiles for one architecture, in threads: Triton's compiler and ptxas run outside of Python's lock.

    Triton's language asks the active driver for the architecture. A stand-in is active meanwhile.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", arch, 32)

    def run(source: Source, tries: int = 5) -> Any:
        specialised = dict(source.signature), dict(source.constants), dict(source.attributes)
        try:
            return compile(
                ASTSource(source.kernel, *specialised), target=target, options={**source.options, **options}
            )
        except Exception as error:  # whatever the kernel's code makes Triton's compiler raise
            # CPython 3.11 counts the depth of ast.parse for all threads together (gh-106905).
            again = tries > 1 and isinstance(error, SystemError) and "AST constructor" in str(error)
            return run(source, tries - 1) if again else error

    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        return list(pool.map(run, sources))
    finally:
        driver.set_active(None)  # the real one, made when it is used


def _without_comments(ptx: str) -> bytes:
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line).encode()


def _check_memory(source: Source, arch: int, made: Any) -> None:
    limit = SHARED_MEMORY.get(arch, max(SHARED_MEMORY.values()))
    if made.shared > limit * 1024:
        raise BuildError(
            f"{source.label}: it needs {made.shared / 1024:.0f} KiB of shared memory on compute capability "
            f"{arch}, which has {limit}. Take smaller blocks or fewer stages, or build without {arch}"
        )


def _failure(source: Source, arch: int, error: BaseException) -> BuildError:
    """Returns the message for a kernel that does not compile, with the line at fault where that is known."""
    from triton.compiler import CompilationError

    while isinstance(error.__cause__, CompilationError):  # in a function that the kernel calls
        error = error.__cause__
    label = source.label
    if isinstance(error, CompilationError) and error.src == source.kernel.src and error.node is not None:
        place, _, first_line = source.label.rpartition(":")
        label = f"{place}:{int(first_line) + error.node.lineno - 1}"
    return BuildError(f"{label}: it does not compile for compute capability {arch}:\n{error}")
