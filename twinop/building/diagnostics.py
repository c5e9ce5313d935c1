"""What a compiler says, with the user's own file and line first."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from ..errors import BuildError

# "mish.h:12:5: error: ..." (GCC, Clang) and "mish.h(12): error: ..." (nvcc).
_PLACE = re.compile(r"^(?P<file>[^\s:(][^:(\n]*)(?::(?P<line>\d+)(?::\d+)?:|\((?P<nv>\d+)\):) *(?P<text>.*)$")
_ERROR = re.compile(r"^(?:fatal |catastrophic )?error:? *|^error +#?[\w-]+: *")

_THROWN = re.compile(r"^[ |\d]*.*\bthrow \"(.*)\";", re.MULTILINE)
_ASSERTED = re.compile(r'^static assertion failed with "(.*)"$')  # nvcc
_INSTANTIATED = re.compile(r"at line (?P<line>\d+) of (?P<file>.+)$")  # nvcc: where a template is used

_KNOWN = (
    (
        re.compile(r"unsupported GNU version! gcc versions later than (\d+) are not supported"),
        "nvcc does not support this gcc; it supports gcc up to {0}. Install g++-{0}, and build with "
        "CXX=g++-{0}",
    ),
    (
        re.compile(r"[Uu]nsupported gpu architecture '?([\w-]+)'?"),
        "nvcc does not know the architecture {0}. Choose others with --archs, or install a newer CUDA "
        "toolkit and set CUDACXX to its nvcc",
    ),
)


_UNDEFINED = re.compile(r"undefined (?:reference to [`']([^'\n]+)'|symbol: (.+))")
_NOT_PIC = re.compile(r"(\S+\.[oa]):.*\brelocation .*recompile with -fPIC")
# By cmake/TwinopOp.cmake.
_GENERATED = re.compile(r"\bfrom (?:\S.*/)?ops/\w+\.\d+(?:\.[01])?\.(?:cpp|cu)[:,]")
_OF_CMAKE = re.compile(r"^CMake Error(?: at .*| in .*)?:(?: +(\S.*)|\n((?:  .*\n|\n)+))", re.MULTILINE)


def build_error(step: str, output: str, sources: Collection[Path]) -> BuildError:
    """Makes the message for a step that failed, such as "compiling mish.h".

    The message is a cure where the cause is known. Else it is the first error in the user's own files
    (`sources`) or, where a header of twinop's refuses something, the user's line that led to it. Where
    neither is found, it is the compiler's text.
    """
    # Lines that name the generated file, which includes the user's, tell nobody anything.
    text = "\n".join(line for line in output.splitlines() if not _GENERATED.search(line)).strip()
    for pattern, cure in _KNOWN:
        if found := pattern.search(output):
            return BuildError(f"{step}: {cure.format(*found.groups())}", text)
    headline = ""
    if missing := sorted({one or other for one, other in _UNDEFINED.findall(output)}):
        headline = (
            f"{step}: nothing defines {', '.join(missing)}. An object file that wants more than twinop has "
            "needs a static library beside it: twinop build kernel.o libruntime.a"
        )
    elif found := _NOT_PIC.search(output):
        headline = f"{_relative(found[1])}: compiled without -fPIC. Libraries need code with it"
    if first := _first_error(text, sources):
        file, line, said = first
        if "constant" in said and (thrown := _THROWN.search(text)):  # the checks of records are constexpr
            said = f"the record does not parse: {thrown[1]}"
        headline = f"{_relative(file)}:{line}: {said}"
    return BuildError(headline, text) if headline else BuildError(f"{text}\n\n{step} failed")


def cmake_error(output: str) -> BuildError:
    """Makes the message of a configuration that failed: the first error of CMake, without its frame."""
    for pattern, cure in _KNOWN:
        if found := pattern.search(output):
            return BuildError(cure.format(*found.groups()), output.strip())
    found = _OF_CMAKE.search(output)
    said = " ".join((found[1] or found[2] if found else output).split())
    said, _, more = said.partition(" It fails with the following output: ")  # CMake's tries of a compiler
    said = said.replace("TWINOP_CUDA_ARCHS=", "--archs ")
    return BuildError(said, output.strip() if more else "")


def _first_error(text: str, sources: Collection[Path]) -> tuple[str, int, str] | None:
    """Returns the file, the line and the text of the error that the message starts with."""
    folders = {source.parent for source in sources}
    own: tuple[str, int] | None = None  # the user's line that was mentioned last
    elsewhere: tuple[str, int, str] | None = None  # an error in another file; the user's line may follow it
    for line in text.splitlines():
        place = _PLACE.match(line.removeprefix("In file included from ").strip())
        used = _INSTANTIATED.search(line) if elsewhere and place is None else None
        if used and elsewhere is not None and _is_own(Path(used["file"]), folders):
            return used["file"], int(used["line"]), elsewhere[2]
        if place is None:
            continue
        where = place["file"], int(place["line"] or place["nv"])
        said, is_error = _ERROR.subn("", place["text"])
        said = _ASSERTED.sub(r"static assertion failed: \1", said)
        if _is_own(Path(place["file"]), folders):
            own = where
            if is_error or elsewhere:
                return *own, elsewhere[2] if elsewhere else said
        elif is_error:
            if own or elsewhere:
                return (*own, said) if own else elsewhere
            elsewhere = *where, said
    return elsewhere


def _is_own(file: Path, folders: Collection[Path]) -> bool:
    return file.absolute().parent in folders


def _relative(file: str) -> str:
    return min(os.path.relpath(file), file, key=len)
