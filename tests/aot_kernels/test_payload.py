"""Libraries made of a prebuilt one and a payload: what tools read of them, strip, damage."""

import os
import random
import shutil
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
from device_calls import At, Request, run, table, tables
from elf import Elf
from payloads import GENERAL, KERNEL, ONE, InProcess, Packed, cubins, op_of, payload_of, plan_of, record

from twinop.aot_kernels.encode import MAX_OPS, encode
from twinop.aot_kernels.pack import pack, template
from twinop.aot_kernels.plan import (
    POINTER,
    Body,
    DeviceOp,
    Expression,
    Fill,
    Launch,
    Limit,
    Plan,
    Pointer,
    Refuse,
    Requirement,
    Scalar,
    Variant,
    constant,
    size,
    text_is,
)
from twinop.errors import BuildError, ForeignLibraryError, LibraryError
from twinop.library import find_library, needed_libraries, read_library
from twinop.module_texts import HEADER, SECTION, seal
from twinop.record import Attribute, Input

LAUNCH = Launch((ONE, ONE, ONE), (), (GENERAL,))
X = Request([At((5,))])


def test_what_tools_read(packed: Packed) -> None:
    attributes = (Attribute("eps", "float", "1e-5"), Attribute("n", "int"))
    full = replace(
        record(2, attributes),
        inputs=(Input("x0"), Input("x1", optional=True)),
        gradient="x0 = grad",
        shapes="y = x0[:-1]",
        limits="n >= 0",
    )
    payload = replace(payload_of(DeviceOp(full, (Plan(0, (1, None), (LAUNCH,)),))), source="abc")
    library = read_library(packed(payload))
    expected = replace(full, devices=("cuda",))
    assert library.records == {"k": expected} and library.domain == "packed"
    assert library.cuda_archs == "80,90" and library.source == "abc" and library.exports_ort
    with_body = replace(payload, ops=(replace(payload.ops[0], bodies=(Body(b"model"),)),))
    assert read_library(packed(with_body)).records["k"].devices == ("cpu", "cuda")


def test_the_prebuilt_library_has_no_ops(in_process: InProcess) -> None:
    with pytest.raises(ForeignLibraryError, match="a shared library, but without twinop records"):
        read_library(template())
    assert in_process(table, template()) is None
    needed = {name.partition(".")[0] for name in needed_libraries(template())}
    assert needed <= {"libstdc++", "libm", "libgcc_s", "libc", "libdl", "libpthread", "ld-linux-x86-64"}


@pytest.mark.parametrize(
    "commands",
    [
        ["strip --strip-all"],
        ["strip --strip-debug"],
        ["strip --strip-unneeded"],
        ["objcopy"],
        ["patchelf --set-rpath $ORIGIN/../a/folder/whose/name/is/longer/than/any/text/in/the/file"],
        ["patchelf --add-needed libm.so.6", "patchelf --set-soname libother.so", "strip"],  # as auditwheel
    ],
)
def test_tools_that_rewrite_the_library(
    commands: list[str], packed: Packed, in_process: InProcess, tmp_path: Path
) -> None:
    library, rewritten = packed(op_of(LAUNCH)), tmp_path / "librewritten.so"
    shutil.copy(library, rewritten)
    for command in commands:
        program, *options = command.split()
        found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if found is None:
            pytest.skip(f"{program} is not installed")
        subprocess.run([found, *options, str(rewritten)], check=True)
    assert read_library(rewritten).records == read_library(library).records
    (outcome,) = in_process(run, rewritten, [X])
    assert outcome.launches[0]["image"] == "cubin 90"


def test_packing_again_replaces_the_payload(packed: Packed, in_process: InProcess, tmp_path: Path) -> None:
    second = tmp_path / "libsecond.so"
    other = replace(KERNEL, images=cubins({"90": b"another cubin"}))
    pack(packed(op_of(LAUNCH)), payload_of(op_of(LAUNCH), other), second)
    (outcome,) = in_process(run, second, [X])
    assert outcome.launches[0]["image"] == "another cubin"


def test_onnx_runtime_registers_the_ops(packed: Packed) -> None:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(packed(op_of(LAUNCH))))


def test_equal_images_are_stored_once() -> None:
    image = random.Random(0).randbytes(25_600)
    kernels = [replace(KERNEL, name=f"k{i}|", images=cubins({"90": image})) for i in range(10)]
    assert len(encode(payload_of(op_of(LAUNCH), *kernels))) < 2 * len(image)


@pytest.mark.parametrize(
    "image",
    [
        b"\x7fELF" + 5000 * b"abc",
        b"a" * 70_000,
        bytes(random.Random(0).choices(b"abcdefgh", k=5000)),
        bytes(random.Random(1).choices(b"ab", k=300))
        + 20 * bytes(random.Random(2).choices(string.ascii_letters.encode(), k=500)),
    ],
    ids=["short", "one", "letters", "long"],
)
def test_images_are_compressed(image: bytes, packed: Packed, in_process: InProcess) -> None:
    kernel = replace(KERNEL, images=cubins({"90": image}))
    assert len(encode(payload_of(op_of(LAUNCH), kernel))) < len(encode(payload_of(op_of(LAUNCH)))) + len(
        image
    )
    (outcome,) = in_process(run, packed(op_of(LAUNCH), kernel), [X])
    assert outcome.launches[0]["image"].encode() == image


def test_without_lz4_images_are_stored_as_they_are(
    packed: Packed, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    library = packed(op_of(LAUNCH), replace(KERNEL, images=cubins({"90": 100 * b"as it is "})))
    assert 100 * b"as it is " in library.read_bytes()
    (outcome,) = in_process(run, library, [X])
    assert outcome.launches[0]["image"] == 100 * "as it is "


def test_many_ops(packed: Packed, in_process: InProcess) -> None:
    def op(i: int) -> DeviceOp:
        launch = Launch((constant(i + 1), ONE, ONE), (), (GENERAL,))
        named = replace(record(), name=f"k{i}", onnx_name=f"CustomK{i}", schema=f"k{i}(Tensor x0) -> Tensor")
        return DeviceOp(named, (plan_of(launch),))

    payload = replace(payload_of(op(0)), ops=tuple(op(i) for i in range(MAX_OPS)))
    library = packed(payload)
    assert len(read_library(library).records) == MAX_OPS
    for i in (0, 1, MAX_OPS - 1):
        (outcome,) = in_process(run, library, [X], op=i)
        assert outcome.launches[0]["grid"] == [i + 1, 1, 1]
    with pytest.raises(BuildError, match="65 ops in one library, at most 64 are supported. Build several"):
        encode(replace(payload, ops=(*payload.ops, op(MAX_OPS))))


def test_a_list_of_tensors_is_refused() -> None:
    op = op_of(LAUNCH)
    listed = replace(op.record, inputs=(Input("x0", repeated=True),))
    with pytest.raises(BuildError, match=r"k: kernels in Python take no list of tensors \(Tensor\[\]\)"):
        encode(payload_of(replace(op, record=listed)))


def _deep(count: int) -> Expression:
    """n + (n + (n + ...))."""
    sum_ = size(0, 0)
    for _ in range(count - 1):
        sum_ = size(0, 0) + sum_
    return sum_


@pytest.mark.parametrize(
    ("launch", "temporaries", "message"),
    [
        (LAUNCH, (ONE,) * 65, "65 temporary tensors in one call, at most 64 are supported"),
        (
            replace(LAUNCH, arguments=(Scalar(ONE, "i32"),) * 129),
            (),
            "129 arguments in a launch of a kernel, at most 128 are supported",
        ),
        (
            replace(LAUNCH, grid=(_deep(65), ONE, ONE)),
            (),
            "65 values at once in a formula, at most 64 are supported",
        ),
    ],
)
def test_a_plan_that_is_too_large(launch: Launch, temporaries: tuple[Expression, ...], message: str) -> None:
    with pytest.raises(BuildError, match=f"k: {message}"):
        encode(payload_of(op_of(launch, temporaries=temporaries)))


def test_the_largest_plan(packed: Packed, in_process: InProcess) -> None:
    launch = replace(LAUNCH, arguments=(Scalar(ONE, "i32"),) * 128, grid=(_deep(64), ONE, ONE))
    (outcome,) = in_process(run, packed(op_of(launch, temporaries=(ONE,) * 64)), [X])
    assert outcome.error == "" and outcome.launches[0]["grid"] == [5 * 64, 1, 1]


def test_a_library_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"libcustom_relu.so: no section .twinop_modules, which takes the kern"
    ):
        pack(find_library("custom_relu"), payload_of(op_of(LAUNCH)), tmp_path / "lib.so")


# ------------------------------------------------------------------- damage


def _with(library: Path, payload: bytes, output: Path) -> Path:
    """A copy of a library with these bytes in place of its payload."""
    data = library.read_bytes()
    old = Elf(library).section(SECTION)
    assert data.count(old) == 1 and len(payload) == len(old)
    output.write_bytes(data.replace(old, payload))
    return output


def rich() -> DeviceOp:
    """An op with something of each kind."""
    variants = (
        Variant(
            (Requirement(0, "divisible_by_16"), Requirement(1, "fits_i32")), ((0, POINTER), (1, "i32")), 0
        ),
        Variant((), ((0, POINTER), (1, "i64")), 0),
    )
    launch = Launch(
        ((size(0, 0) + 3) // 4, ONE, ONE), (Pointer("temporary", 0), Scalar(size(0, 0), "int")), variants
    )
    steps = (launch, Fill(Pointer("output", 0), size(0, 0)), Refuse("k.py:9: no"))
    plan = Plan(0, (1,), steps, (text_is(0, "tanh"),), (size(0, 0) * 4,), (Limit("input", 0, 2**31),))
    return DeviceOp(record(1, (Attribute("s", "str"),)), (plan,), (Body(b"model", 0, (1,)),))


def test_a_damaged_byte(packed: Packed, in_process: InProcess, tmp_path: Path) -> None:
    library = packed(rich())
    payload = Elf(library).section(SECTION)
    chance = random.Random(3)
    tables_end = payload.index(b"cubin 90")
    places = [*range(HEADER.size), *chance.sample(range(HEADER.size, tables_end), 60)]
    damaged = []
    for place in places:
        data = bytearray(payload)
        data[place] ^= 0x55
        damaged.append(_with(library, bytes(data), tmp_path / f"lib{place}.so"))
        with pytest.raises(LibraryError, match="its op records do not parse: "):
            read_library(damaged[-1])
    found = in_process(tables, damaged)
    _, _, _, _, tables_at, *_ = HEADER.unpack_from(payload)
    for place, entry in zip(places, found, strict=True):
        if place < HEADER.size or place >= tables_at:  # C++ does not read the JSON
            assert entry is None, place


def test_tables_that_make_no_sense(packed: Packed, in_process: InProcess, tmp_path: Path) -> None:
    """With the right checksum: the reader stays within the payload whatever it says."""
    library = packed(rich())
    payload = Elf(library).section(SECTION)
    _, _, _, _, at, count, _, _ = HEADER.unpack_from(payload)
    texts, good, images = payload[HEADER.size : at], payload[at : at + count], payload[at + count :]
    chance, made = random.Random(4), []
    for i in range(250):
        bad = bytearray(good)
        for _ in range(chance.choice((1, 1, 3))):
            bad[chance.randrange(count)] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        made.append(_with(library, seal(texts, bytes(bad), images), tmp_path / f"lib{i}.so"))
    found = in_process(tables, made)
    assert 50 < found.count(None) < 250  # most are refused; in others, it was a text or a number


def test_a_cut_or_other_payload(packed: Packed, tmp_path: Path) -> None:
    library = packed(op_of(LAUNCH))
    other = tmp_path / "libother.so"
    payload = bytearray(Elf(library).section(SECTION))
    payload[8:12] = (2).to_bytes(4, "little")
    with pytest.raises(LibraryError, match="its device modules have version 2, expected 1"):
        read_library(_with(library, bytes(payload), other))
    other.write_bytes(library.read_bytes()[:-100])
    with pytest.raises(LibraryError, match="the file is damaged or cut short"):
        read_library(other)


def test_onnx_runtime_refuses_a_damaged_library(packed: Packed, tmp_path: Path) -> None:
    library = packed(op_of(LAUNCH))
    payload = bytearray(Elf(library).section(SECTION))
    payload[20] ^= 1
    damaged = _with(library, bytes(payload), tmp_path / "libdamaged.so")
    with pytest.raises(Exception, match="the library has no table of ops. Build it again"):
        onnxruntime.SessionOptions().register_custom_ops_library(str(damaged))
