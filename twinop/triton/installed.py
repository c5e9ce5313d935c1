"""Checks that Triton and the like are installed in versions that were tested."""

from ..errors import BuildError
from ..installation import version_numbers

OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton that the tests cover."""


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
