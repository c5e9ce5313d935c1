"""Custom-op libraries as files: finding them, and reading their records without loading them."""

import json
import os
import platform
import struct
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from twinop.errors import LibraryError
from twinop.record import Record

_SECTION = ".twinop"
_EXPORT = b"RegisterCustomOps"
_MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 243: "riscv64"}  # e_machine of the ELF spec


@dataclass(frozen=True)
class Library:
    """A library's own description. `cuda_archs`: what its kernels were compiled for, or "none"."""

    path: Path
    version: str
    cuda_archs: str
    cuda_version: str
    records: dict[str, Record]
    exports_ort: bool

    @cached_property
    def by_onnx_name(self) -> dict[str, Record]:
        """The records that ONNX models can name (no backward ops), by node type."""
        return {record.onnx_name: record for record in self.records.values() if not record.is_backward}


def read_library(path: str | os.PathLike[str]) -> Library:
    """Reads the records and the build description from a library's ELF section `.twinop`.

    Raises:
        LibraryError: no such file, not an ELF file, damaged, for another machine, or without twinop records.
    """
    path = Path(path)
    if not path.is_file():
        raise LibraryError(f"{path}: no such file. ./build.sh builds the libraries into build/")
    try:
        with path.open("rb") as file:
            section = _read_section(path, file, _SECTION)
            exports = _read_section(path, file, ".dynstr")
    except OSError as error:
        raise LibraryError(f"{path}: cannot be read: {error.strerror}. Mend its permissions") from error
    build: dict[str, str] = {}
    records: dict[str, Record] = {}
    try:
        for text in filter(None, section.split(b"\0")):
            fields = json.loads(text)
            if "twinop" in fields:
                build = fields
            else:
                records[fields["name"]] = Record.from_json(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LibraryError(f"{path}: its op records do not parse: {error}. Copy or build it again") from error
    return Library(
        path=path,
        version=build.get("twinop", "unknown"),
        cuda_archs=build.get("cuda_archs", "none"),
        cuda_version=build.get("cuda_version", ""),
        records=dict(sorted(records.items())),
        exports_ort=_EXPORT + b"\0" in exports,
    )


def _read_section(path: Path, file: BinaryIO, wanted: str) -> bytes:
    """One section of a 64-bit little-endian ELF file (System V ABI, chapter 4); the rest may have 500 MB.

    Not by mmap: it kills a process that reads what another cuts short meanwhile.
    """
    file.seek(0)
    head = file.read(64)
    if head[:4] != b"\x7fELF":
        raise LibraryError(
            f"{path}: not a shared library (ELF file). Expected a file such as libcustom_relu.so"
        )
    machine = platform.machine()
    try:
        (number,) = struct.unpack_from("<H", head, 18)
        built_for = _MACHINES.get(number, f"machine {number}")
        if head[4:6] != b"\x02\x01" or built_for != machine:
            raise LibraryError(
                f"{path}: built for {built_for}, this machine is {machine}. Build it here with ./build.sh"
            )
        (table,) = struct.unpack_from("<Q", head, 40)
        entry_size, count, names_index = struct.unpack_from("<HHH", head, 58)
        entries = _read(file, table, count * entry_size)
        headers = [struct.unpack_from("<IIQQQQ", entries, i * entry_size) for i in range(count)]
        names = _read(file, *headers[names_index][4:])
        for name, _, _, _, offset, size in headers:
            if names[name : name + len(wanted) + 1] == wanted.encode() + b"\0":
                return _read(file, offset, size)
    except (struct.error, ValueError, IndexError) as error:
        raise LibraryError(f"{path}: the file is damaged or cut short. Copy or build it again") from error
    raise LibraryError(
        f"{path}: a shared library, but without twinop records (section {wanted}). "
        "Expected one built by twinop, such as build/libcustom_relu.so"
    )


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    """
    Raises:
        ValueError: the file ends before.
    """
    if offset + size > file.seek(0, os.SEEK_END):
        raise ValueError("the file is cut short")
    file.seek(offset)
    return file.read(size)


def needed_libraries(path: str | os.PathLike[str]) -> list[str]:
    """The names of the shared libraries that a library links (DT_NEEDED).

    Raises:
        LibraryError: not an ELF file, damaged, or for another machine.
    """
    path = Path(path)
    with path.open("rb") as file:
        names = _read_section(path, file, ".dynstr")
        dynamic = _read_section(path, file, ".dynamic")
    entries = struct.iter_unpack("<qQ", dynamic)
    return [names[value : names.index(b"\0", value)].decode() for tag, value in entries if tag == 1]


def library_folders() -> list[Path]:
    """Where libraries are looked for, in order: TWINOP_LIBRARY_DIR, the installed package, the build tree."""
    folders = [Path(os.environ["TWINOP_LIBRARY_DIR"])] if "TWINOP_LIBRARY_DIR" in os.environ else []
    package = resources.files("twinop")
    folders.append(Path(str(package / "lib")))
    folders.append(Path(__file__).resolve().parent.parent / "build")
    return folders


def find_library(stem: str) -> Path:
    """The path of `lib<stem>.so`.

    Raises:
        LibraryError: it is in none of the folders.
    """
    folders = library_folders()
    for folder in folders:
        path = folder / f"lib{stem}.so"
        if path.is_file():
            return path
    searched = ", ".join(str(folder) for folder in folders)
    raise LibraryError(
        f"lib{stem}.so not found; searched {searched}. "
        "./build.sh builds it; TWINOP_LIBRARY_DIR names another folder"
    )
