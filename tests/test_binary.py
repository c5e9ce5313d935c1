"""The built libraries as files: exports, needs, size; and that both runtimes run one machine code."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from elf import STB_GNU_UNIQUE, STT_FUNC, Elf, Symbol
from one_node import make_session, one_node_model

from twinop.library import find_library, read_library

ORT_LIBRARIES = ("custom_relu", "custom_ops", "test_ops")
TORCH_LIBRARIES = ("twinop_torch", "test_ops_torch")
PLATFORM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"}
PLATFORM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
PAIRS = [("custom_relu", "twinop_torch"), ("custom_ops", "twinop_torch"), ("test_ops", "test_ops_torch")]


def elf(stem: str) -> Elf:
    return Elf(find_library(stem))


@pytest.mark.parametrize("stem", ORT_LIBRARIES)
def test_ort_libraries_stand_alone(stem: str) -> None:
    """They export one function, and need neither onnxruntime, torch nor the CUDA runtime."""
    assert elf(stem).exports == {"RegisterCustomOps"}
    assert elf(stem).needed <= PLATFORM


@pytest.mark.parametrize("stem", TORCH_LIBRARIES)
def test_torch_libraries_need_torch_only(stem: str) -> None:
    assert elf(stem).exports == {"twinop_register_torch_ops"}
    assert elf(stem).needed - PLATFORM == {"libtorch.so", "libtorch_cpu.so"}


@pytest.mark.parametrize("stem", ORT_LIBRARIES + TORCH_LIBRARIES)
def test_no_symbol_is_unique_in_the_process(stem: str) -> None:
    """A GNU-unique symbol would be shared by two libraries of one process, whatever their visibility."""
    symbols = elf(stem).dynamic_symbols + elf(stem).symbols
    assert symbols and not [symbol.name for symbol in symbols if symbol.binding == STB_GNU_UNIQUE]


def test_size() -> None:
    library = read_library(find_library("custom_relu"))
    archs = len(library.cuda_archs.split(","))
    assert library.path.stat().st_size <= 2 * 2**20 + (archs - 1) * 2**19


# ---------------------------------------------------------------------------- one machine code


@pytest.mark.parametrize(("ort_stem", "torch_stem"), PAIRS)
def test_the_device_code_is_the_same(ort_stem: str, torch_stem: str) -> None:
    code = elf(ort_stem).section(".nv_fatbin")
    assert code in elf(torch_stem).section(".nv_fatbin")
    assert bool(code) == (read_library(find_library(ort_stem)).cuda_archs != "none")


def build_tree() -> Path:
    """Where the object files are: the libraries in use may be installed copies of those in build/."""
    folders = (find_library("custom_relu").parent, Path(__file__).resolve().parent.parent / "build")
    for folder in folders:
        if any(folder.glob("**/twinop_op_relu.dir/**/relu.cpp.o")):
            return folder
    pytest.skip(f"no object files in {' or '.join(map(str, folders))}: only libraries came here")


@pytest.mark.parametrize(("ort_stem", "torch_stem"), PAIRS)
def test_the_cpu_code_is_the_same(ort_stem: str, torch_stem: str) -> None:
    """Every function of an op's object file stands in both libraries, byte for byte but for what the linker
    fills in (addresses): the op was compiled once."""
    tree = build_tree()
    ops = Path(__file__).resolve().parent.parent / "kernels/ops"
    families = {"custom_relu": ["relu"], "test_ops": ["double_and_sum", "pad_affine"]}.get(
        ort_stem, [header.stem for header in ops.glob("*.h")]
    )
    for family in families:
        (compiled,) = map(Elf, tree.glob(f"**/twinop_op_{family}.dir/**/{family}.cpp.o"))
        functions = [
            symbol
            for symbol in compiled.symbols
            if symbol.kind == STT_FUNC and symbol.size and not symbol.name.startswith("_ZNSt")
        ]  # (the standard library's inline functions may come from any object)
        assert len(functions) > 4
        for stem in (ort_stem, torch_stem):
            assert not (
                other := functions_with_other_code(Elf(tree / f"lib{stem}.so"), compiled, functions)
            ), f"lib{stem}.so: {other}"


def functions_with_other_code(library: Elf, compiled: Elf, functions: list[Symbol]) -> list[str]:
    linked: dict[str, list[bytes]] = {}  # local functions of several objects may have one name
    for symbol in library.symbols:
        linked.setdefault(symbol.name, []).append(library.code(symbol) if symbol.kind == STT_FUNC else b"")
    other = []
    for symbol in functions:
        code, filled = compiled.masked_code(symbol)
        kept = [i for i in range(len(code)) if i not in filled]
        assert len(kept) > len(code) // 2
        candidates = [c for c in linked.get(symbol.name, []) if len(c) == len(code)]
        if not any(all(candidate[i] == code[i] for i in kept) for candidate in candidates):
            other.append(symbol.name)
    return other


# ---------------------------------------------------------------------------- several in one process


def test_two_ort_libraries_in_one_process() -> None:
    """Each session runs the kernels of its own library; a third one holds other ops."""
    record = read_library(find_library("custom_relu")).records["relu"]
    model = one_node_model(record, record.combinations[0], [True], {})
    x = np.array([-1, 2, np.nan, -0.0], np.float32)
    sessions = [make_session(model, find_library(stem), "cpu") for stem in ("custom_relu", "custom_ops")]
    with pytest.raises(Exception, match="CustomRelu"):
        make_session(model, find_library("test_ops"), "cpu")
    for session in sessions * 2:
        (y,) = session.run(None, {"x": x})
        assert y.tobytes() == np.array([0, 2, np.nan, -0.0], np.float32).tobytes()
    mapped = Path("/proc/self/maps").read_text()
    assert "/libcustom_relu.so" in mapped and "/libcustom_ops.so" in mapped


ONE_PROCESS = """
import sys
import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[2])
session = ort.InferenceSession(sys.argv[1], options)
x = np.linspace(-3, 3, 100_001, dtype=np.float32)
before = session.run(None, {"x": x})[0]

import torch
from twinop import torch_op

middle = torch_op.relu(torch.from_numpy(x)).numpy()
after = session.run(None, {"x": x})[0]
assert before.tobytes() == middle.tobytes() == after.tobytes() == np.maximum(x, 0).tobytes()
maps = open("/proc/self/maps").read()
assert "/libcustom_relu.so" in maps and "/libtwinop_torch.so" in maps
"""


def test_the_torch_library_beside_a_running_session(tmp_path: Path) -> None:
    """The other order, torch first, is every test in test_parity.py."""
    record = read_library(find_library("custom_relu")).records["relu"]
    model = tmp_path / "relu.onnx"
    model.write_bytes(one_node_model(record, record.combinations[0], [True], {}).SerializeToString())
    command = [sys.executable, "-c", ONE_PROCESS, str(model), str(find_library("custom_relu"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
