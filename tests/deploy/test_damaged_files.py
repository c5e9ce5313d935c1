"""Damaged files end in one message: models mutated at random, and files that were found so."""

import platform
import random
import resource
import struct
from pathlib import Path

import onnx
import pytest
from elf import Elf
from models import make_model, model, node, value
from onnx import helper

from twinop import torch_op
from twinop.deploy import ModelError, check_model, session
from twinop.deploy.custom_nodes import load_model
from twinop.errors import LibraryError, TwinopError
from twinop.libraries.library import read_library

CPU = ["CPUExecutionProvider"]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Changes some bytes, and at times cuts or repeats a part."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place, count = chance.randrange(max(len(found), 1)), chance.choice((1, 1, 4, 64))
        how = chance.randrange(4)
        if how == 0:
            found[place : place + count] = chance.randbytes(count)
        elif how == 1:
            found[place : place + count] = b"\xff" * count
        elif how == 2:
            del found[place : place + count]
        else:
            found[place:place] = found[place : place + count]
    return bytes(found) or b"x"


def with_weights() -> bytes:
    """A model with every kind of thing that is read: external data, a function, a subgraph, attributes."""
    proto = make_model("CustomPadAffine", pads=[0, 0], scale=2.0)
    weight = helper.make_tensor("w", 1, [2], [1.0, 2.0])
    proto.graph.initializer.append(external(weight, location="w.bin", offset="0", length="8"))
    body = [helper.make_node("Identity", ["a"], ["b"])]
    proto.functions.append(helper.make_function("mine", "F", "a", "b", body, [helper.make_opsetid("", 20)]))
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_mutated_models(count: int, tmp_path: Path, libraries: dict[str, Path]) -> None:
    """An error of ours or none, within 200 MB."""
    (tmp_path / "w.bin").write_bytes(bytes(8))
    data, path = with_weights(), tmp_path / "m.onnx"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        path.write_bytes(mutated(data, random.Random(seed)))
        try:
            load_model(path, confined=True)
            check_model(path, libraries["test_ops"])
        except TwinopError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!s:.500}") from error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_library_that_would_take_gigabytes(tmp_path: Path) -> None:
    """60,000 sections that are named by the ends of one long text, or that each are the whole file."""
    count, length = 60_000, 1_000_000
    for sizes in ((0, 1), (length, 0)):
        head = bytearray(64)
        head[:6] = b"\x7fELF\x02\x01"
        struct.pack_into("<H", head, 18, 62)
        struct.pack_into("<Q", head, 40, 64)
        struct.pack_into("<HHH", head, 58, 64, count, 0)
        names = b"a" * length + b"\0"
        place = 64 + count * 64
        first = struct.pack("<IIQQQQIIQQ", length - 9, 3, 0, 0, place, len(names), 0, 0, 0, 0)
        rest = b"".join(
            struct.pack(
                "<IIQQQQIIQQ", i % length if sizes[1] else length - 9, 1, 2, 0, 0, sizes[0], 0, 0, 0, 0
            )
            for i in range(1, count)
        )
        (path := tmp_path / "libbomb.so").write_bytes(bytes(head) + first + rest + names)
        with pytest.raises(LibraryError, match="libbomb.so: the file is damaged"):
            read_library(path)


def external(tensor: onnx.TensorProto, **where: str) -> onnx.TensorProto:
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in where.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


@pytest.mark.parametrize(
    "where", [{"location": "*/_ORT_MEM_ADDR_/*", "offset": "4096"}, {"location": "w.bin", "offset": "-4"}]
)
def test_external_data_that_is_memory_of_the_process(tmp_path: Path, where: dict[str, str]) -> None:
    """Though there is a file of that name."""
    proto = model([node("CustomRelu")], [value("x")], [value("y")])
    proto.graph.initializer.append(external(helper.make_tensor("w", 1, [1], [1.0]), **where))
    for name in ("*/_ORT_MEM_ADDR_/*", "w.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(8192))
    (path := tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    for confined in (True, False):
        with pytest.raises(ModelError, match="memory of the process|external_data entry is invalid"):
            load_model(path, confined=confined)


def test_a_file_in_onnx_runtimes_own_format(tmp_path: Path) -> None:
    (path := tmp_path / "r.ort").write_bytes(b"\x1c\0\0\0ORTM" + bytes(100))
    with pytest.raises(ModelError, match=r"in ONNX Runtime's own format \(.ort\).*Give the .onnx file"):
        load_model(path)


def test_a_model_in_memory_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g (float x) => (float y) {}')
    monkeypatch.setattr("twinop.deploy.custom_nodes._MOST_BYTES", 8)
    for source in (model, model.SerializeToString()):
        with pytest.raises(ModelError, match="over 2 GB: save it with external data and pass its path"):
            session(source)


@pytest.mark.parametrize("section", [".dynsym", ".dynamic", ".rela.dyn"])
def test_a_library_that_ends_who_loads_it(section: str, tmp_path: Path, libraries: dict[str, Path]) -> None:
    """The first load is in another process, for ONNX Runtime and for torch."""
    path = tmp_path / "libcustom_relu.so"
    data = bytearray(libraries["custom_relu"].read_bytes())
    content = Elf(libraries["custom_relu"]).section(section)
    begin = data.index(content)
    ends = []
    for seed in range(2):
        chance = random.Random(seed)
        found = bytearray(data)
        found[begin : begin + len(content)] = chance.randbytes(len(content))
        path.write_bytes(found)
        for opens in (lambda: session(make_model("CustomRelu"), CPU, path), lambda: torch_op.load(path)):
            with pytest.raises((LibraryError, ModelError)) as error:
                opens()
            assert str(path) in str(error.value)
            ends.append("a process that loads it ends with " in str(error.value))
    assert any(ends)


def test_a_library_that_ends_who_registers_it(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Its code is damaged where ONNX Runtime calls it first."""
    data, found = bytearray(libraries["custom_relu"].read_bytes()), Elf(libraries["custom_relu"])
    (symbol,) = (each for each in found.dynamic_symbols if each.name == "RegisterCustomOps")
    code = found.sections[".text"]
    place = code["sh_offset"] + symbol["st_value"] - code["sh_addr"]
    data[place : place + 4] = bytes(4) if platform.machine() == "aarch64" else b"\x0f\x0b" * 2  # illegal
    (path := tmp_path / "libcustom_relu.so").write_bytes(data)
    with pytest.raises(LibraryError, match=f"{path}: the file is damaged: a process that loads it ends"):
        session(make_model("CustomRelu"), CPU, path)
