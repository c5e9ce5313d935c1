"""Finds custom-op libraries, and reads their records without loading them."""

import hashlib
import json
import os
import platform
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import twinop

from ..errors import ForeignLibraryError, LibraryError, RecordError
from ..installation import ROOT, how_to_build
from ..record.op_spec import DOMAIN, DOMAIN_VERSION, OpSpec, check_kind
from ..record.schema_text import record_of_library

ABI_VERSION = 3
"""The version of the interface between libraries and adapters (`kernels/abi.h`) that this code reads."""

_SECTION = ".twinop"
_EXPORT = b"RegisterCustomOps"
_MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 243: "riscv64"}  # e_machine of the ELF spec
_STRINGS, _NO_CONTENT = 3, 8  # sh_type
_NEEDED, _RPATH, _RUNPATH = 1, 15, 29  # d_tag
_HEADER_BYTES, _LONGEST_NAME, _LONGEST_PATH, _MOST_DYNAMIC = 64, 256, 4096, 1 << 14  # bytes


@dataclass(frozen=True)
class Library:
    """A library's own description."""

    path: Path
    version: str  # of twinop that built it
    cuda_archs: str  # the GPU architectures of its kernels, or "none"
    cuda_version: str
    records: dict[str, OpSpec]  # the ops by name
    exports_ort: bool  # ONNX Runtime can load it
    domain: str = DOMAIN
    domain_version: int = DOMAIN_VERSION
    source: str = ""  # a hash of the Python source of its kernels, if it has such kernels

    @cached_property
    def by_onnx_name(self) -> dict[str, OpSpec]:
        """The records of the ops that ONNX models can have (no backward ops), by node type."""
        return {record.onnx_name: record for record in self.records.values() if not record.is_backward}


def in_use(libraries: Iterable[Library], nodes: Collection[tuple[str, str]]) -> list[Library]:
    """Returns the libraries that have one of these ops, by `OpSpec.node_type`."""
    return [each for each in libraries if any((each.domain, name) in nodes for name in each.by_onnx_name)]


def read_library(
    path: str | os.PathLike[str], copy: str | os.PathLike[str] | None = None, domain: str | None = None
) -> Library:
    """Reads the records and the build description from a library's ELF section `.twinop`.

    Args:
        path: the library.
        copy: the file to read instead, a copy of the library.
        domain: the only domain that is wanted. The records of others are not read.

    Raises:
        LibraryError: no such file, not an ELF file, damaged, for another machine, or with records of another
            version.
        ForeignLibraryError: it has no twinop records, or those of another domain.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise LibraryError(
            f"{path}: no such file. twinop build makes the library of a project, build/lib<name>.so; "
            "twinop.get_library_path() is the one of twinop's own ops"
        )
    section, exports = sections_of(path, copy or path, _SECTION, ".dynstr")
    if not section:
        raise ForeignLibraryError(
            f"{path}: a shared library, but without twinop records (section {_SECTION}). "
            "Expected one built by twinop, such as build/libcustom_relu.so"
        )
    try:
        texts = [*filter(None, section.split(b"\0"))]
        described = next((text for text in texts if "twinop" in json.loads(text)), b"{}")
        build: dict[str, Any] = json.loads(described)
        _require_abi(path, build)
        place = {name: build[name] for name in ("domain", "domain_version")}
        if domain not in (None, place["domain"]):
            raise ForeignLibraryError(f"{path}: has ops of the domain {place['domain']}, not of {domain}")
        parsed = [_record(text, **place) for text in texts if text is not described]
        records = {record.name: record for record in parsed}
        version, cuda_archs, cuda_version, _, source = (
            check_kind(name, build.get(name, ""), str)
            for name in ("twinop", "cuda_archs", "cuda_version", "domain", "source")
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, RecordError) as error:
        raise LibraryError(f"{path}: its op records do not parse: {error}. Copy or build it again") from error
    if twice := [name for name, count in Counter(each.name for each in parsed).items() if count > 1]:
        raise LibraryError(
            f"{path}: two source files register the op {twice[0]}, as where one header includes another. Let "
            "both include a third header without ops"
        )
    if taken := {each.functional_name for each in records.values() if each.written} & records.keys():
        raise LibraryError(
            f"{path}: {taken.pop()} is both an op and the functional variant of another. Rename one of them"
        )
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


@lru_cache(4096)
def _record(text: bytes, domain: str, domain_version: int) -> OpSpec:
    """Parses a record once: each session looks at all libraries of a folder."""
    return record_of_library(json.loads(text), domain, domain_version)


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


def sections_of(path: Path, file: str | os.PathLike[str], *names: str) -> list[bytes]:
    """Returns the bytes of sections of an ELF file; none for those that it lacks. Messages name `path`.

    It reads without mmap, which kills the process if another one truncates the file meanwhile. A parser from
    a package takes longer to import (pyelftools: 80 ms) than a session takes to open. LibraryError: it cannot
    be read, is not an ELF file, is for another machine, or damaged.
    """
    try:
        with open(file, "rb") as stream:
            sections = _sections(path, stream)
            return [_read(stream, *sections[name]) if name in sections else b"" for name in names]
    except OSError as error:
        raise LibraryError(f"{path}: cannot be read: {error.strerror}. Fix its permissions") from error
    except (struct.error, ValueError, IndexError) as error:
        raise _damaged(path) from error


def _sections(path: Path, file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Returns the offset and size of each section of a 64-bit ELF file (System V ABI, chapter 4) by name."""
    head = file.read(64)
    if head[:4] != b"\x7fELF":
        raise LibraryError(
            f"{path}: not a shared library (ELF file). Expected a file such as libcustom_relu.so"
        )
    (number,) = struct.unpack_from("<H", head, 18)
    built_for, machine = _MACHINES.get(number, f"machine {number}"), platform.machine()
    if head[4:6] != b"\x02\x01" or built_for != machine:  # 64 bits, little-endian
        raise LibraryError(
            f"{path}: built for {built_for}, this machine is {machine}. Build it on this machine, or install "
            "the wheel for this machine"
        )
    (table,) = struct.unpack_from("<Q", head, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", head, 58)
    if count == 0:  # stripped
        return {}
    if entry_size != _HEADER_BYTES:
        raise ValueError(f"section headers of {entry_size} bytes")
    entries = _read(file, table, count * entry_size)
    headers = [struct.unpack_from("<IIQQQQ", entries, i * entry_size) for i in range(count)]
    names = _read(file, *headers[names_index][4:])
    if headers[names_index][1] != _STRINGS or not names.strip(b"\0"):
        raise ValueError("the sections' names are lost")
    if sum(size for _, kind, *_, size in headers if kind != _NO_CONTENT) > file.seek(0, os.SEEK_END):
        raise ValueError("sections that overlap could be read for ever")
    return {
        names[name : names.index(b"\0", name, name + _LONGEST_NAME)].decode(): (offset, size)
        for name, _, _, _, offset, size in headers
    }


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    if offset + size > file.seek(0, os.SEEK_END):
        raise ValueError("the file is too short")
    file.seek(offset)
    return file.read(size)


def _damaged(path: Path) -> LibraryError:
    return LibraryError(f"{path}: the file is damaged or cut short. Copy or build it again")


_checksums: dict[tuple[int, ...], str] = {}


def checksum(path: Path) -> str:
    """Returns a file's SHA-256 as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if known := _checksums.get(_stamp(os.fstat(file.fileno()))):
            return known
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def keep_checksum(path: Path, sha256: str) -> None:
    """Spares `checksum` a pass over a file that this process has just written, also where it is moved."""
    _checksums[_stamp(path.stat())] = sha256


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def needed_libraries(path: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the shared libraries that a library links (DT_NEEDED); errors as `sections_of`."""
    return [text for tag, text in _dynamic_texts(Path(path)) if tag == _NEEDED]


def relative_to_itself(path: str | os.PathLike[str]) -> list[str]:
    """Returns names and search paths of libraries that depend on where it lies; errors as `sections_of`."""
    return [text for _, text in _dynamic_texts(Path(path)) if "$ORIGIN" in text or "${ORIGIN}" in text]


def _dynamic_texts(path: Path) -> list[tuple[int, str]]:
    names, dynamic = sections_of(path, path, ".dynstr", ".dynamic")
    try:
        return [
            (tag, names[value : names.index(b"\0", value, value + _LONGEST_PATH)].decode())
            for tag, value in struct.iter_unpack("<qQ", dynamic[:_MOST_DYNAMIC])
            if tag in (_NEEDED, _RPATH, _RUNPATH)
        ]
    except (struct.error, ValueError, OverflowError) as error:
        raise _damaged(path) from error


def library_folders() -> list[Path]:
    """Returns the folders to search: TWINOP_LIBRARY_DIR, the installed package, the build tree."""
    named = [Path(os.environ["TWINOP_LIBRARY_DIR"])] if "TWINOP_LIBRARY_DIR" in os.environ else []
    return [*named, Path(str(resources.files("twinop") / "lib")), ROOT / "build"]


def find_library(*stems: str) -> Path:
    """Returns the path of the first `lib<stem>.so` that a folder has; raises LibraryError if none has one."""
    folders = library_folders()
    for stem in stems:
        for folder in folders:
            if (path := folder / f"lib{stem}.so").is_file():
                return path
    raise LibraryError(
        f"lib{stems[0]}.so not found; searched {', '.join(map(str, folders))}. {how_to_build()}. "
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
    return str(Path(__file__).resolve().parents[1] / "include")


def get_cmake_dir() -> str:
    """Returns the folder of twinop's CMake package, for `twinop_DIR`."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "cmake"
    return str(installed if installed.is_dir() else package.parent / "cmake")
