"""Copies custom-op libraries into memory that nobody can change, and registers the copies with ONNX Runtime.

A file can be replaced or written over at any time, and the loader knows libraries by path. So the copy is
what is checked, hashed and run.
"""

import fcntl
import hashlib
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx

from twinop.errors import LibraryError
from twinop.libraries.built import warn_if_old
from twinop.libraries.library import Library, read_library, relative_to_itself
from twinop.system.python_child import SAY_ERROR, require_loads

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# A session has ONNX Runtime ask each op of the library for its inputs, outputs and attributes.
_REGISTER = (
    f"import onnxruntime as ort; {SAY_ERROR}options = ort.SessionOptions(); "
    "options.register_custom_ops_library(sys.argv[1]); "
    "ort.InferenceSession(bytes.fromhex(sys.argv[2]), options, providers=['CPUExecutionProvider'])"
)
_MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 13]> m (float x) => (float y) { y = Identity(x) }'
)
skip_subprocess_probe = False
"""Whether a damaged library may end this process, which then only checks that the loader takes it."""
loaded_before: frozenset[str] = frozenset()
"""SHA-256 of libraries that other processes have loaded: these are not tried once more."""


class SealedFile:
    """A copy of a file that nobody can change, which lasts as long as this object: `number`, its descriptor.

    It is in memory, and sealed, or where the system runs no code from there, in a file without a name.
    """

    def __init__(self, name: str, data: bytes) -> None:
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.number = _in_memory(name, data) or _in_file(data)
        weakref.finalize(self, os.close, self.number).atexit = False

    @property
    def path(self) -> Path:
        """Its path with the number of the process, because debuggers open the paths of libraries too."""
        return Path(f"/proc/{os.readlink('/proc/self')}/fd/{self.number}")


def _in_memory(name: str, data: bytes) -> int | None:
    """Copies data into a memfd; None: vm.memfd_noexec or SELinux does not let its code run."""
    try:
        number = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except PermissionError:
        return None
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
        if _runs_code(number):
            return number
    except BaseException:
        os.close(number)
        raise
    os.close(number)
    return None


def _in_file(data: bytes) -> int:
    """Copies data into a file that only this process has: it has no name and cannot be written."""
    folders = list(dict.fromkeys((tempfile.gettempdir(), "/var/tmp", os.path.expanduser("~"))))
    for folder in folders:
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=".twinop-") as file:
            file.write(data)
            file.flush()
            number = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
            if _runs_code(number):
                return number
            os.close(number)
    raise LibraryError(
        "this system does not let code run from memory (vm.memfd_noexec, SELinux), nor from "
        f"{', '.join(folders)}: set TMPDIR to a folder that is not mounted noexec"
    )


def _runs_code(number: int) -> bool:
    try:
        mmap.mmap(number, 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except PermissionError:
        return False
    except ValueError:  # it is empty
        pass
    return True


@dataclass(frozen=True, kw_only=True)
class SealedLibrary(Library):
    """A library whose records were read from the copy that will run. `path` is the original file."""

    copy: SealedFile = field(compare=False, repr=False)


# The loader knows the copies by path. These stay open, so that no other copy gets the path of one of them.
registered: dict[str, SealedFile] = {}  # by SHA-256


def sealed(path: Path) -> SealedLibrary:
    """Copies a library and reads the records of the copy; LibraryError: it is damaged or not copied."""
    copy = copied(path)
    library = read_library(path, copy.path)
    warn_if_old(path)
    if found := relative_to_itself(copy.path):
        raise LibraryError(
            f"{path}: finds other libraries relative to its own file ({', '.join(found)}), but twinop loads "
            "a copy in memory. Link them statically, or set an absolute path: "
            "patchelf --set-rpath /opt/libraries"
        )
    return SealedLibrary(**vars(library), copy=copy)


def copied(path: Path) -> SealedFile:
    """Returns a copy of a library's file, the same one until the file changes."""
    try:
        return _copy(path, *_stamp(path.stat()))
    except OSError as error:
        raise LibraryError(f"{path}: cannot be read: {error.strerror}. Restore the file") from error


def register(options: Any, library: SealedLibrary) -> None:
    """Registers a library's copy on session options; raises LibraryError if ONNX Runtime cannot load it."""
    if library.copy.sha256 not in loaded_before.union(registered):
        file = f"/proc/self/fd/{library.copy.number}"
        program = [] if skip_subprocess_probe else [_REGISTER, file, _MODEL.SerializeToString().hex()]
        if problem := require_loads(library.path, file, library.copy.number, program=program):
            problem = problem.replace(file, str(library.path))
            raise LibraryError(f"{library.path}: ONNX Runtime cannot load it: {problem}")
    copy = registered.setdefault(library.copy.sha256, library.copy)
    try:
        options.register_custom_ops_library(str(copy.path))
    except Exception as error:
        text = str(error).replace(str(copy.path), str(library.path))
        raise LibraryError(f"{library.path}: ONNX Runtime cannot load it: {text}") from error


@lru_cache(maxsize=8)
def _copy(path: Path, *stamp: int) -> SealedFile:
    """Returns a copy, which is made only if the stamp is new: a large library takes 30 ms."""
    for _ in range(2):
        with path.open("rb") as file:
            before = _stamp(os.fstat(file.fileno()))
            data = file.read()
            if _stamp(os.fstat(file.fileno())) != before:
                continue
        try:
            return SealedFile(path.name, data)
        except OSError as error:
            raise LibraryError(
                f"{path}: cannot be copied into memory ({len(data)} bytes): {error.strerror}. Allow the "
                "process more memory"
            ) from error
    raise LibraryError(f"{path}: changed while it was read. Try again once the copy or build has finished")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
