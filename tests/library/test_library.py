"""Reading any file as a library gives a Library or one clear error."""

import platform
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from elf import Elf

from twinop.errors import ForeignLibraryError, LibraryError
from twinop.libraries.library import ABI_VERSION, find_library, read_library
from twinop.record.op_spec import OpSpec

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library("custom_relu")
DATA = LIBRARY.read_bytes()
(HEADERS,) = struct.unpack_from("<Q", DATA, 40)


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "libdamaged.so"
        path.write_bytes(data)
        return path

    return write


def test_a_good_library() -> None:
    library = read_library(LIBRARY)
    assert library.exports_ort and library.version[0].isdigit()
    assert set(library.by_onnx_name) == {"CustomRelu"}  # backward ops have no ONNX side
    assert library.records["relu"].devices == (("cpu",) if library.cuda_archs == "none" else ("cpu", "cuda"))


def test_a_library_without_the_ort_adapter(damaged: Callable[[bytes], Path]) -> None:
    assert not read_library(damaged(DATA.replace(b"RegisterCustomOps\0", b"RegisterCustomOpz\0"))).exports_ort


def test_the_version_of_the_interface(damaged: Callable[[bytes], Path]) -> None:
    header = (ROOT / "kernels/abi.h").read_text()
    assert f"#define TWINOP_ABI_VERSION {ABI_VERSION}\n" in header
    text = f'"abi":{ABI_VERSION},'.encode()
    assert DATA.count(text) == 1
    with pytest.raises(LibraryError, match=r"built by twinop .*, with version 7 .* reads version 3"):
        read_library(damaged(DATA.replace(text, b'"abi":7,')))
    with pytest.raises(LibraryError, match=r"was built by twinop .*, before libraries served torch; "):
        read_library(damaged(DATA.replace(text, b'"bai":1,')))
    with pytest.raises(LibraryError, match=r"does not say what built it, before libraries served torch"):
        read_library(damaged(DATA.replace(b'{"twinop":', b'{"twinpo":')))


def test_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "libcustom_relu.so", tmp_path):
        with pytest.raises(LibraryError, match=r"no such file\. twinop build makes the library"):
            read_library(path)


@pytest.mark.parametrize(
    "data", [b"", b"\x7fEL", b"hello\n", b"#!/bin/sh\n" * 100, b"PK\x03\x04" + bytes(2000)]
)
def test_not_elf(damaged: Callable[[bytes], Path], data: bytes) -> None:
    with pytest.raises(LibraryError, match=r"not a shared library.* Expected .*libcustom_relu\.so"):
        read_library(damaged(data))


def test_truncated(damaged: Callable[[bytes], Path]) -> None:
    sizes = {*range(4, 80), *range(100, len(DATA), 60_000), *range(HEADERS - 2, len(DATA), 97), len(DATA) - 1}
    assert len(sizes) > 100
    for size in sizes:
        with pytest.raises(LibraryError, match="cut short"):
            read_library(damaged(DATA[:size]))


def test_zeros_at_the_end(damaged: Callable[[bytes], Path]) -> None:
    """Zeros in place of the section headers are an error, not a library without records."""
    for size in (100, len(DATA) - HEADERS, len(DATA) - HEADERS + 0x200, len(DATA) // 2):
        with pytest.raises(LibraryError, match="damaged or cut short") as error:
            read_library(damaged(DATA[:-size] + bytes(size)))
        assert not isinstance(error.value, ForeignLibraryError)


def test_a_section_beyond_the_end(damaged: Callable[[bytes], Path]) -> None:
    data, index = bytearray(DATA), [*Elf(LIBRARY).sections].index(".twinop")
    struct.pack_into("<Q", data, HEADERS + 64 * index + 24, len(DATA) - 8)
    with pytest.raises(LibraryError, match=r"cut short\. Copy or build it again"):
        read_library(damaged(bytes(data)))


@pytest.mark.parametrize(
    ("offset", "value", "built_for"),
    [
        (18, b"\x3e\x00", "x86_64") if platform.machine() == "aarch64" else (18, b"\xb7\x00", "aarch64"),
        (18, b"\x99\x09", "machine 2457"),
        (4, b"\x01", ""),  # 32 bit
        (5, b"\x02", ""),  # big-endian
    ],
)
def test_another_machine(damaged: Callable[[bytes], Path], offset: int, value: bytes, built_for: str) -> None:
    data = DATA[:offset] + value + DATA[offset + len(value) :]
    with pytest.raises(LibraryError, match=f"built for {built_for}.*, this machine is {platform.machine()}"):
        read_library(damaged(data))


def test_a_foreign_library() -> None:
    with pytest.raises(ForeignLibraryError, match=r"without twinop records .*Expected one built by twinop"):
        read_library(np.random.mtrand.__file__)


def test_an_op_with_the_name_of_a_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpSpec, "functional_name", "exchange")
    with pytest.raises(LibraryError, match="exchange is both an op and the functional variant of another"):
        read_library(find_library("test_written"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"schema":"relu(', b'["schema","relu('),
        (b'{"schema":"relu(', b'{"schemo":"relu('),
        (b'"devices"', b'"gadgets"'),
        (b'"elementwise":true', b'"elementwise":1234'),
        (b'"schema":"relu', b'"schema":"\xff\xfe\xfd\xfc'),
        (b'"dtypes":"float32;', b'"dtypes":7,  "x":";'),
        (b'"float32; float16', b'"float32; float33'),
        (b'{"schema":"relu(Tensor', b'{"schema":"relu(Tensoo'),
    ],
)
def test_damaged_records(damaged: Callable[[bytes], Path], before: bytes, after: bytes) -> None:
    assert DATA.count(before) and len(before) <= len(after)
    at = DATA.index(before)
    with pytest.raises(LibraryError, match=r"(?s)its op records do not parse: .*Copy or build it again"):
        read_library(damaged(DATA[:at] + after + DATA[at + len(after) :]))


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    path = shutil.copy(LIBRARY, tmp_path)
    monkeypatch.setattr("builtins.open", refuse)  # root reads every file
    with pytest.raises(LibraryError, match=r"cannot be read: Permission denied"):
        read_library(path)


def test_find_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINOP_LIBRARY_DIR", str(tmp_path))
    (tmp_path / "libmine.so").write_bytes(DATA)
    assert find_library("mine") == tmp_path / "libmine.so"
    with pytest.raises(LibraryError, match=rf"libnone\.so not found; searched {tmp_path}.*TWINOP_LIBRARY"):
        find_library("none")
