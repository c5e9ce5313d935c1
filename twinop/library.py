"""Finds custom-op libraries, and reads their records without loading them."""

import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import twinop

from .errors import ForeignLibraryError, LibraryError, RecordError
from .installation import how_to_build
from .op_spec import DOMAIN, DOMAIN_VERSION, OpSpec, check_kind

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

ABI_VERSION = 1
"""The version of the interface between libraries and adapters (`kernels/abi.h`) that this code reads."""

_SECTION = ".twinop"
_EXPORT = b"RegisterCustomOps"
_MACHINES = {
    "EM_X86_64": "x86_64",
    "EM_AARCH64": "aarch64",
    "EM_386": "i386",
    "EM_ARM": "arm",
    "EM_RISCV": "riscv64",
}
_MOST_SECTIONS = 1000
_PATHS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}


@dataclass(frozen=True)
class Library:
    """A library's own description.

    Attributes:
        version: the version of twinop that built it.
        cuda_archs: the GPU architectures of its kernels, or "none".
        records: the ops by name.
        exports_ort: whether ONNX Runtime can load it.
        source: a hash of the Python source of its kernels, if it has such kernels.
    """

    path: Path
    version: str
    cuda_archs: str
    cuda_version: str
    records: dict[str, OpSpec]
    exports_ort: bool
    domain: str = DOMAIN
    domain_version: int = DOMAIN_VERSION
    source: str = ""

    @cached_property
    def by_onnx_name(self) -> dict[str, OpSpec]:
        """The records of the ops that ONNX models can have (no backward ops), by node type."""
        return {record.onnx_name: record for record in self.records.values() if not record.is_backward}


def in_use(libraries: Iterable[Library], nodes: Collection[tuple[str, str]]) -> list[Library]:
    """Returns the libraries that have one of these ops, by `OpSpec.node_type`."""
    return [each for each in libraries if any((each.domain, name) in nodes for name in each.by_onnx_name)]


def read_library(path: str | os.PathLike[str], copy: str | os.PathLike[str] | None = None) -> Library:
    """Reads the records and the build description from a library's ELF section `.twinop`.

    Args:
        path: the library.
        copy: the file to read instead, a copy of the library.

    Raises:
        LibraryError: no such file, not an ELF file, damaged, for another machine, or with records of another
            version.
        ForeignLibraryError: it has no twinop records.
    """
    path = Path(path)
    if not path.is_file():
        raise LibraryError(
            f"{path}: no such file. twinop build makes the library of a project, "
            "build/lib<name>.so; "
            "twinop.get_library_path() is the one of twinop's own ops"
        )
    with _opened(path, copy or path) as elf:
        section, exports = _content(elf, _SECTION), _content(elf, ".dynstr")
    if not section:
        raise ForeignLibraryError(
            f"{path}: a shared library, but without twinop records (section {_SECTION}). "
            "Expected one built by twinop, such as build/libcustom_relu.so"
        )
    try:
        texts = [json.loads(text) for text in filter(None, section.split(b"\0"))]
        build: dict[str, Any] = next((fields for fields in texts if "twinop" in fields), {})
        _require_abi(path, build)
        place = {name: build[name] for name in ("domain", "domain_version")}
        records = {
            fields["name"]: OpSpec.from_json(fields | place) for fields in texts if fields is not build
        }
        version, cuda_archs, cuda_version, _, source = (
            check_kind(name, build.get(name, ""), str)
            for name in ("twinop", "cuda_archs", "cuda_version", "domain", "source")
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, RecordError) as error:
        raise LibraryError(f"{path}: its op records do not parse: {error}. Copy or build it again") from error
    return Library(
        path=path,
        version=version,
        cuda_archs=cuda_archs,
        cuda_version=cuda_version,
        records=dict(sorted(records.items())),
        **place,
        exports_ort=_EXPORT + b"\0" in exports,
        source=source,
    )


def _require_abi(path: Path, build: Mapping[str, Any]) -> None:
    found = build.get("abi")
    if found == ABI_VERSION:
        return
    built = f"was built by twinop {build['twinop']}" if "twinop" in build else "does not say what built it"
    interface = f"with version {found} of the binary interface" if found else "before libraries served torch"
    raise LibraryError(
        f"{path}: {built}, {interface}; twinop {twinop.__version__} reads version {ABI_VERSION}. Build the "
        "library again with this twinop, or use the twinop that built it"
    )


@contextmanager
def _opened(path: Path, file: str | os.PathLike[str]) -> Iterator["ELFFile"]:
    """Opens an ELF file. Messages name `path`.

    Raises:
        LibraryError: it cannot be read, is not an ELF file, is for another machine, or damaged.
    """
    from elftools.elf.elffile import ELFFile  # not at the top: it takes longer than reading a library

    try:
        with open(file, "rb") as stream:
            if stream.read(4) != b"\x7fELF":
                raise LibraryError(
                    f"{path}: not a shared library (ELF file). Expected a file such as libcustom_relu.so"
                )
            elf = ELFFile(stream)
            machine, found = platform.machine(), elf["e_machine"]
            built_for = _MACHINES.get(found, f"machine {found}")
            if elf.elfclass != 64 or not elf.little_endian or built_for != machine:
                raise LibraryError(
                    f"{path}: built for {built_for}, this machine is {machine}. Build it on this machine, or "
                    "install the wheel for this machine"
                )
            if (count := elf.num_sections()) > _MOST_SECTIONS:
                raise ValueError(f"{count} sections")
            if count and elf.get_section_by_name(".shstrtab") is None:
                raise ValueError("the sections' names are lost")
            yield elf
    except OSError as error:
        raise LibraryError(f"{path}: cannot be read: {error.strerror}. Fix its permissions") from error
    except LibraryError:
        raise
    except Exception as error:  # whatever is thrown by the parser of a damaged file
        raise LibraryError(f"{path}: the file is damaged or cut short. Copy or build it again") from error


def _content(elf: "ELFFile", name: str) -> bytes:
    """Returns the bytes of a section; none if there is no such section."""
    section = elf.get_section_by_name(name)
    if section is None:
        return b""
    offset, size = section["sh_offset"], section["sh_size"]
    if offset + size > elf.stream_len:
        raise ValueError("a section lies behind the end of the file")
    elf.stream.seek(offset)
    return bytes(elf.stream.read(size))


def checksum(path: Path) -> str:
    """Returns a file's SHA-256 as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def needed_libraries(path: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the shared libraries that a library links (DT_NEEDED).

    Raises:
        LibraryError: not an ELF file, damaged, or for another machine.
    """
    return [text for tag, text in _dynamic_texts(Path(path)) if tag == "DT_NEEDED"]


def relative_to_itself(path: str | os.PathLike[str]) -> list[str]:
    """Returns the names and search paths of other libraries that depend on where this library lies.

    Raises:
        LibraryError: not an ELF file, damaged, or for another machine.
    """
    return [text for _, text in _dynamic_texts(Path(path)) if "$ORIGIN" in text or "${ORIGIN}" in text]


def _dynamic_texts(path: Path) -> list[tuple[str, str]]:
    with _opened(path, path) as elf:
        dynamic: Any = elf.get_section_by_name(".dynamic")
        found = [(tag.entry.d_tag, tag) for tag in dynamic.iter_tags()] if dynamic is not None else []
        return [(kind, getattr(tag, _PATHS[kind])) for kind, tag in found if kind in _PATHS]


def library_folders() -> list[Path]:
    """Returns the folders to search: TWINOP_LIBRARY_DIR, the installed package, the build tree."""
    folders = [Path(os.environ["TWINOP_LIBRARY_DIR"])] if "TWINOP_LIBRARY_DIR" in os.environ else []
    package = resources.files("twinop")
    folders.append(Path(str(package / "lib")))
    folders.append(Path(__file__).resolve().parent.parent / "build")
    return folders


def find_library(stem: str) -> Path:
    """Returns the path of `lib<stem>.so`.

    Raises:
        LibraryError: no folder has it.
    """
    folders = library_folders()
    for folder in folders:
        path = folder / f"lib{stem}.so"
        if path.is_file():
            return path
    searched = ", ".join(str(folder) for folder in folders)
    raise LibraryError(
        f"lib{stem}.so not found; searched {searched}. {how_to_build()}. "
        "TWINOP_LIBRARY_DIR names another folder"
    )


def get_library_path() -> str:
    """Returns the path of the library with all of twinop's ops, `libcustom_ops.so`.

    Raises:
        LibraryError: no folder has it.
    """
    return str(find_library("custom_ops"))


def get_include() -> str:
    """Returns the folder for the compiler's option -I, under which ops include `"twinop/elementwise.h"`."""
    return str(Path(__file__).resolve().parent / "include")


def get_cmake_dir() -> str:
    """Returns the folder of twinop's CMake package, for `twinop_DIR`."""
    package = Path(__file__).resolve().parent
    installed = package / "cmake"
    return str(installed if installed.is_dir() else package.parent / "cmake")
