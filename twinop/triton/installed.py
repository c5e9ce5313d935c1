"""Checks that Triton is installed in a version that was tested."""

from ..errors import BuildError
from ..installation import version_numbers

OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton that the tests cover."""


def check_triton() -> None:
    """Checks that Triton can compile kernels.

    Raises:
        BuildError: Triton is absent, or of an untested version.
    """
    try:
        import triton
    except ImportError as error:
        raise BuildError(
            f"Triton cannot be imported: {error}. Its kernels need it: pip install 'twinop[triton]'. A "
            "library that `twinop build` made needs no Triton"
        ) from None
    version = version_numbers(triton.__version__)
    if not OLDEST <= version <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise BuildError(
            f"Triton {triton.__version__} was not tested with this version of twinop; expected {oldest} to "
            f"{newest}: pip install 'triton=={newest}.*'"
        )
