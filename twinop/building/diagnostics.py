"""What a compiler says, with the user's own file and line first."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from ..errors import BuildError
from .cache import cache_folder

# "mish.h:12:5: error: ..." (GCC, Clang) and "mish.h(12): error: ..." (nvcc).
_PLACE = re.compile(r"^(?P<file>[^\s:(][^:(\n]*)(?::(?P<line>\d+)(?::\d+)?:|\((?P<nv>\d+)\):) *(?P<text>.*)$")
_ERROR = re.compile(r"^(?:fatal |catastrophic )?error:? *|^error +#?[\w-]+: *")

_THROWN = re.compile(r"\| *.*\bthrow \"(.*)\";")

_KNOWN = (
    (
        re.compile(r"unsupported GNU version! gcc versions later than (\d+) are not supported"),
        "nvcc does not support this gcc; it supports gcc up to {0}. Install g++-{0}, and build with "
        "CXX=g++-{0}",
    ),
    (
        re.compile(r"unsupported clang version!.* (\d+) are not supported|unsupported clang version"),
        "nvcc does not support this clang. Build with CXX=g++, or install a newer CUDA toolkit",
    ),
    (
        re.compile(r"[Uu]nsupported gpu architecture '?([\w-]+)'?"),
        "nvcc does not know the architecture {0}. Choose others with --archs, or install a newer CUDA "
        "toolkit and set CUDACXX to its nvcc",
    ),
    (
        re.compile(r"No space left on device"),
        "the disk is full. Free some space, or set TWINOP_CACHE and TMPDIR to folders on another disk",
    ),
    (
        re.compile(r"Read-only file system"),
        "a folder is read-only. Set TWINOP_CACHE and TMPDIR to folders that you may write",
    ),
)


def build_error(step: str, output: str, sources: Collection[Path]) -> BuildError:
    """Makes the message for a step that failed.

    The message starts with a cure where the cause is known. Else its first line is the first error in the
    user's own files or, where a header of twinop's refuses something, the user's line that led to it. The
    compiler's text follows.

    Args:
        step: what was done, such as "compiling mish.h".
        sources: the user's files.
    """
    text = "\n".join(line for line in output.splitlines() if not _is_generated(line)).strip()
    for pattern, cure in _KNOWN:
        if found := pattern.search(output):
            return BuildError(f"{step}: {cure.format(*found.groups())}\n\n{text}")
    return BuildError(f"{_headline(text, sources) or f'{step} failed'}\n\n{text}")


def _headline(text: str, sources: Collection[Path]) -> str | None:
    folders = {source.parent for source in sources}
    own: str | None = None  # the user's line that was mentioned last
    elsewhere: tuple[str, str] | None = None  # an error in another file, to which the user's line may follow
    for line in text.splitlines():
        place = _PLACE.match(line.removeprefix("In file included from ").strip())
        if place is None:
            continue
        where = f"{_relative(place['file'])}:{place['line'] or place['nv']}"
        said, is_error = _ERROR.subn("", place["text"])
        if "throw" in said and (thrown := _THROWN.search(text)):
            said = f"the record does not parse: {thrown[1]}"  # its checks are constexpr
        if _is_own(Path(place["file"]), folders):
            own = where
            if is_error or elsewhere:
                return f"{own}: {elsewhere[1] if elsewhere else said}"
        elif is_error:
            if own or elsewhere:
                return f"{own}: {said}" if own else ": ".join(elsewhere or ())
            elsewhere = where, said
    return ": ".join(elsewhere) if elsewhere else None


def _is_own(file: Path, folders: Collection[Path]) -> bool:
    return file.absolute().parent in folders


def _is_generated(line: str) -> bool:
    """Whether a line names the generated file that includes the user's: it tells nobody anything."""
    return f"from {cache_folder()}/work-" in line


def _relative(file: str) -> str:
    return min(os.path.relpath(file), file, key=len)
