"""Matmuls of files in float8 multiply in 8 bits, however modelopt, ONNX Runtime and torch write them."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnxruntime import quantization as quantizer
from optimizing import exported, optimized, parsed, refusal, reported, rewritten, types, weights

from lab.model_zoo import TINY, batch
from twinop import deploy
from twinop.optimize import linear_fp8, segments
from twinop.optimize.equivalence import NotEquivalent, relative_error
from twinop.optimize.invariance import INVARIANT
from twinop.optimize.rewrite import skipped
from twinop.optimize.segments import cut
from twinop.optimize.weight_check import check_weights

K, N = 64, 48
E4M3 = ml_dtypes.float8_e4m3fn
KINDS = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
X = "q = QuantizeLinear (x, xs, zero) d = DequantizeLinear (q, xs, zero)"
WIDE_X = """f = Cast <to = 1> (x) q = QuantizeLinear <axis = 1> (f, xs32, zero)
    e = DequantizeLinear <axis = 1> (q, xs32, zero) d = CastLike (e, x)"""
WIDE = "g = DequantizeLinear <axis = 0> (nk, scales32, zeros) w = CastLike (g, x)"
FILES = {  # dtype, rows, nodes, what follows the matmul
    "modelopt of torch": ("float16", "B, S", f"""{X} w = DequantizeLinear (nk, scale)
        t = Transpose <perm = [1, 0]> (w) m = MatMul (d, t) a = Add (b, m) y = Gelu (a)""", "+bias+gelu"),
    "modelopt of ONNX": ("float16", "B, S", f"""{X} e = QuantizeLinear <axis = 1> (wide, scales, zeros)
        w = DequantizeLinear <axis = 1> (e, scales, zeros) m = MatMul (d, w) y = Add (m, b)""", "+bias"),
    "ONNX Runtime": ("float", "M", f"""{X} w = DequantizeLinear <axis = 1> (kn, scales, zeros)
        y = Gemm (d, w, b)""", "+bias"),
    "ONNX Runtime, one scale": ("float", "M", f"""{X} w = DequantizeLinear (kn, scale, zero)
        y = MatMul (d, w)""", ""),
    "torch": ("bfloat16", "M", f"{WIDE_X} {WIDE} m = Gemm <transB = 1> (d, w, b) y = Relu (m)", "+bias+relu"),
    "torch, a batch": ("float16", "B, S", f"""{WIDE_X} {WIDE} t = Transpose <perm = [1, 0]> (w)
        m = MatMul (d, t) y = Add (m, b)""", "+bias"),
}  # fmt: skip


def constants(dtype: str, k: int = K, n: int = N) -> dict[str, np.ndarray]:
    kind, wide = KINDS[dtype], weights(n, k, seed=3).astype(KINDS[dtype])
    scales = (np.abs(wide).max(1) / kind(448)).astype(kind)
    q = (wide.astype(np.float32) / scales.astype(np.float32)[:, None]).clip(-448, 448).astype(E4M3)
    numbers = {"xs": np.array(0.01, kind), "scale": scales[3:4].reshape(()), "scales": scales}
    numbers |= {f"{name}32": each.astype(np.float32) for name, each in numbers.items()}
    zeros = {"zero": np.zeros((), E4M3), "zeros": np.zeros(n, E4M3), "b": weights(n).astype(kind)}
    return numbers | zeros | {"nk": q, "kn": np.ascontiguousarray(q.T), "wide": np.ascontiguousarray(wide.T)}


def model(
    dtype: str,
    rows: str,
    text: str,
    others: Mapping[str, np.ndarray] = MappingProxyType({}),
    k: int = K,
    n: int = N,
) -> onnx.ModelProto:
    made = parsed(f"({dtype}[{rows}, {k}] x) => ({dtype}[{rows}, {n}] y) {{ {text} }}")
    words = text.translate(str.maketrans("(),", "   ")).split()
    for name, array in (constants(dtype, k, n) | dict(others)).items():
        made.graph.initializer.extend([onnx.numpy_helper.from_array(array, name)] if name in words else [])
    return made


def expected(x: np.ndarray, dtype: str, text: str) -> np.ndarray:
    """Computes a file's result in fp64."""
    given = {key: each.astype(np.float64) for key, each in constants(dtype).items()}
    q = (x.astype(np.float32) / np.float32(given["xs"])).clip(-448, 448).astype(E4M3).astype(np.float64)
    y = q @ given["nk"].T * given["xs"] * given["scales" if "scales" in text else "scale"]
    y = torch.from_numpy(y + (given["b"] if "b)" in text or "(b" in text else 0))
    return np.asarray(torch.nn.functional.gelu(y) if "Gelu" in text else y.relu() if "Relu" in text else y)


@pytest.mark.parametrize("provider", ["CPU", pytest.param("CUDA", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("name", "asked"), [*zip(FILES, ["float16", "bfloat16"] * 3, strict=True), ("torch", "bfloat16")]
)
def test_each_spelling(name: str, asked: str, provider: str, tmp_path: Path) -> None:
    """A file in 16 bits keeps its dtype. Any number of rows runs; each weight is there once."""
    dtype, rows, text, follows = FILES[name]
    options = {} if dtype == asked else {"dtype": asked}
    report, made = optimized(model(dtype, rows, text), tmp_path, **options)
    assert report.dtype == asked and not report.skipped and report.fused == {f"linear_fp8{follows}": 1}
    kinds, in_16 = types(made), asked == "float16" and dtype != "float"  # fp16 has the scale of the others
    assert kinds.pop("Cast", 0) == (0 if in_16 else 1)
    assert kinds == dict.fromkeys(("QuantizeLinear", "Shape", "Expand", "CustomLinearFp8"), 1)
    [stored] = [each.const_value for each in made.graph.initializers.values() if len(each.shape or ()) == 2]
    assert stored is not None
    assert np.array_equal(stored.numpy().view(np.uint8), constants(dtype)["nk"].view(np.uint8))
    forms = [note for note in report.notes if "fp32 form" in note]
    assert all(", with results in bfloat16" in note for note in forms) and len(forms) <= (asked == "bfloat16")
    assert report.own_error is not None and report.error < 1.1 * report.own_error < 0.05
    onnx.checker.check_model(report.path, full_check=True)
    providers = dict.fromkeys((f"{provider}ExecutionProvider", "CPUExecutionProvider"))
    session = deploy.session(report.path, [*providers])
    for shape in ((1, 1), (3, 7), (2, 40)):
        x = weights(*shape, K, seed=5).astype(KINDS[asked])
        x = x.reshape(-1, K) if rows == "M" else x
        [found] = session.run({"x": x}).values()
        error = relative_error(expected(x, dtype, text), np.asarray(found))
        # CUDA's QuantizeLinear may divide in fp16: then some numbers round to the next one of e4m3.
        assert error < (2e-2 if provider == "CUDA" else 1e-3 if asked == "float16" else 8e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_constants_of_nodes(device: str, tmp_path: Path) -> None:
    """Scales in fp32 do not make a file one in fp32. ONNX Runtime's own optimizations break its fp32 form."""
    made = model(*FILES["torch, a batch"][:3])
    for tensor in made.graph.initializer:
        made.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    made.graph.ClearField("initializer")
    report, _ = optimized(made, tmp_path, device=device)
    assert report.dtype == "float16"
    assert report.fused == ({"linear_fp8+bias": 1} if device == "cuda" else {})


STORED = f"{X} w = DequantizeLinear (kn, scale)"
BY_CHANNEL = """q = QuantizeLinear <axis = 2> (x, row, zero_row)
    d = DequantizeLinear <axis = 2> (q, row, zero_row) w = DequantizeLinear (kn, scale)"""
COMPUTED = """a = Abs (x) most = ReduceMax <keepdims = 0> (a) q = QuantizeLinear (x, most, zero)
    d = DequantizeLinear (q, most) w = DequantizeLinear (kn, scale)"""
TURNED = f"""{X} e = QuantizeLinear <axis = 0> (turned, scales, zeros) t = Transpose (e)
    w = DequantizeLinear <axis = 1> (t, scales, zeros)"""
MOVED = "its weight is reshaped, or transposed in 8 bits"
LEFT = {  # what is before the matmul, and why it stays
    "e5m2": (STORED, "in other 8 bits than e4m3fn"),
    "zero points": (f"{X} w = DequantizeLinear (kn, scale, one)", "zero points other than 0"),
    "blocks": (f"{X} w = DequantizeLinear <axis = 0, block_size = 16> (kn, blocks)", "scales of blocks"),
    "along K": (f"{X} w = DequantizeLinear <axis = 0> (kn, row)", "scales along K"),
    "x in 16 bits": ("d = Neg (x) w = DequantizeLinear (kn, scale)", "x is not in 8 bits"),
    "channels of x": (BY_CHANNEL, "a scale for each channel of x"),
    "computed scales": (COMPUTED, "scales or zero points that are not constant"),
    "reshaped": (f"{X} r = DequantizeLinear (kn, scale) w = Reshape (r, shape)", MOVED),
    "turned in 8 bits": (TURNED, MOVED),
    "others": (f"{STORED} r = Neg (w)", "others read its weight, too"),
    "a narrow N": (STORED, "K = 64 and N = 24, of which one is no multiple of 16"),
    "invariant": (STORED, "sums in 8 bits have no fixed order"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_stays_is_named(what: str) -> None:
    text, reason = LEFT[what]
    others = {
        "one": np.ones((), E4M3), "row": np.full(K, 0.01, np.float16), "zero_row": np.zeros(K, E4M3),
        "blocks": np.full((K // 16, N), 0.01, np.float16), "shape": np.array([K, N]),
        "turned": weights(N, K).astype(np.float16),
    }  # fmt: skip
    if what == "e5m2":
        others["kn"] = constants("float16")["kn"].astype(ml_dtypes.float8_e5m2)
    n = 24 if what == "a narrow N" else N
    text += " y = MatMul(d, w)" if what != "others" else " z = MatMul (d, w) e = MatMul (x, r) y = Add (z, e)"
    proto = model("float16", "B, S", text, others, n=n)
    made = rewritten(proto, linear_fp8.LinearFp8, meta={INVARIANT: what == "invariant"}, infers=True)
    [(said, count)] = skipped(made).items()
    assert types(made) == Counter(node.op_type for node in proto.graph.node)
    assert said.startswith("MatMul: ") and said.endswith(reason) and count == 1


def test_a_file_in_fp32_is_asked_for_16_bits(tmp_path: Path) -> None:
    """The op returns 16 bits."""
    report, made = optimized(model(*FILES["ONNX Runtime"][:3]), tmp_path)
    assert report.skipped == {
        "DequantizeLinear: float32; twinop's kernel is for 16 bits (dtype='float16')": 1
    }
    assert "Gemm" in types(made)


def test_8_bits_of_8_bits_are_refused(tmp_path: Path) -> None:
    proto = model("float16", "B, S", FILES["modelopt of ONNX"][2])
    said = refusal(proto, tmp_path, dtype="float8")
    assert re.search(r"already, it has FLOAT8E4M3FN\. .*, or leave out dtype='float8'", said)


def quantised(source: Path, cases: list[dict[str, np.ndarray]], **options: Any) -> Path:
    """Quantises a file as ONNX Runtime does."""

    class Cases(quantizer.CalibrationDataReader):
        given = iter(cases)

        def get_next(self) -> Any:
            return next(self.given, None)

    target, kind = source.with_name("quantised.onnx"), quantizer.QuantType.QFLOAT8E4M3FN
    quantizer.quantize_static(
        source, target, Cases(), per_channel=True, weight_type=kind, activation_type=kind,
        calibrate_method=quantizer.CalibrationMethod.Distribution, **options,
    )  # fmt: skip
    return target


def test_an_encoder_in_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ONNX Runtime's quantizer writes it."""
    ids, mask = (each.numpy() for each in batch(TINY, padding=5))
    source = exported("bert", tmp_path)
    path = quantised(source, [{"ids": ids, "mask": mask}], op_types_to_quantize=["MatMul"])
    monkeypatch.setattr(segments, "MOST_BYTES", 40_000)
    report, made = optimized(path, tmp_path, dtype="float16")
    assert report.fused["linear_fp8"] == types(made)["CustomLinearFp8"] == 6
    assert report.compared and not any("fp32 form" in note for note in report.notes)


def test_numbers_near_a_step(tmp_path: Path) -> None:
    """What 16 bits change moves few numbers of a few rows to the next one of e4m3, whose error is theirs."""
    rng, nodes, width = np.random.default_rng(1), "a0 = Identity (x) ", 64
    given = dict[str, np.ndarray]()
    for i in range(4):
        given[f"w{i}"] = rng.standard_normal((width, width)).astype(np.float32) * np.float32(0.15)
        given[f"b{i}"] = rng.standard_normal(width).astype(np.float32) * np.float32(0.1)
        nodes += f"m{i} = Gemm <transB = 1> (a{i}, w{i}, b{i}) a{i + 1} = Gelu (m{i}) "
    text = f"(float[M, {width}] x) => (float[M, {width}] m3) {{ {nodes} }}"
    onnx.save(parsed(text, **given), tmp_path / "mlp")
    draws = [np.random.default_rng(i).standard_normal((4, width)).astype(np.float32) for i in range(3)]
    path = quantised(tmp_path / "mlp", [{"x": each} for each in draws])
    report, _ = optimized(path, tmp_path, dtype="float16")
    assert report.fused["linear_fp8+bias"] == 4


def test_the_bytes_are_compared_with_the_source(tmp_path: Path) -> None:
    """Also one that is off is found, of a weight that is transposed."""
    text = f"{X} w = DequantizeLinear <axis = 1> (kn, scales, zeros) y = MatMul (d, w)"
    _, made = optimized(model("float16", "B, S", text, k=288, n=304), tmp_path)
    source = ir.load(tmp_path / "old.onnx")
    assert not check_weights(source, made, cut(source, made))
    [value] = [each for each in made.graph.initializers.values() if len(each.shape or ()) == 2]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array.view(np.uint8)[7, 9] ^= 1
    value.const_value = ir.tensor(array)
    with pytest.raises(NotEquivalent, match="differs from kn in line"):
        check_weights(source, made, cut(source, made))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wrong_is_reverted(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = linear_fp8.write

    def wrong(node: ir.Node, kind: Any, given: list[Any]) -> Any:
        given[3].const_value = ir.tensor(given[3].const_value.numpy() * np.float32(2))
        return write(node, kind, given)

    monkeypatch.setattr(linear_fp8, "write", wrong)
    report = reported(model(dtype, "M", FILES["torch"][2]), tmp_path)
    assert [*report.reverted] == ["linear_fp8"] and "linear_fp8+bias+relu" not in report.fused
    assert "the written model" in report.reverted["linear_fp8"]
