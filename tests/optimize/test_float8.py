"""`twinop optimize --dtype float8`: which matmuls get 8 bits, what the file holds, and how close it is."""

import json
from math import log2
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_graphs import Sizes, write
from optimizing import exported, parsed, types, weights

from lab.model_zoo import TINY, batch
from twinop import deploy
from twinop.deploy.ort_runs import NotRunnable
from twinop.errors import ExportError
from twinop.model import weights as stored
from twinop.optimize import OptimizeReport, decoders, float8, optimize, optimize_folder, optimizer, segments
from twinop.optimize import graph as g
from twinop.optimize.equivalence import NotEquivalent, relative_error
from twinop.optimize.load import reopen
from twinop.optimize.weight_check import check_quantized

OPS = "CustomAddLayerNormFp8", "CustomAddRmsNormFp8", "CustomGeluFp8", "CustomSwigluPackedFp8"


def stack(folder: Path, outputs: str = "float[N, 64] x3", inner: int = 1) -> Path:
    """Writes layers of LayerNormalization, MatMul, GELU, MatMul and a sum; the matmuls in a dtype."""
    lines = [
        f"""n{i} = LayerNormalization (x{i}, row) h{i} = Cast <to={inner}> (n{i})
        u{i} = Cast <to={inner}> (up{i}) a{i} = MatMul (h{i}, u{i}) b{i} = Gelu (a{i})
        v{i} = Cast <to={inner}> (down{i}) c{i} = MatMul (b{i}, v{i})
        d{i} = Cast <to=1> (c{i}) x{i + 1} = Add (x{i}, d{i})"""
        for i in range(3)
    ]
    given = {f"up{i}": weights(64, 128, seed=i) for i in range(3)}
    given |= {f"down{i}": weights(128, 64, seed=9 + i) for i in range(3)} | {"row": 1 + weights(64)}
    text = f"(float[N, 64] x0) => ({outputs}) {{ {' '.join(lines)} }}"
    folder.mkdir(exist_ok=True)
    onnx.save(parsed(text, **given), folder / "stack.onnx")
    return folder / "stack.onnx"


def optimized(folder: Path, **options: Any) -> OptimizeReport:
    """Puts the four inner matmuls of a stack in 8 bits."""
    given: dict[str, Any] = {"dtype": "float8", "rows": 0} | options
    return optimize(stack(folder), folder / "new.onnx", **given)


def error_of(report: OptimizeReport, **given: np.ndarray) -> float:
    """Returns the error of a file on inputs, without the optimizer."""
    sessions = [deploy.session(path, ["CPUExecutionProvider"]) for path in (report.source, report.path)]
    kinds = {value.name: value.dtype.numpy() for value in ir.load(report.path).graph.inputs}  # type: ignore[union-attr]
    narrow = {name: array.astype(kinds[name]) for name, array in given.items()}
    found = [session.run(case) for session, case in zip(sessions, (given, narrow), strict=True)]
    a, b = (np.asarray(next(iter(each.values()))) for each in found)
    return relative_error(a, b)


def test_an_encoder(tmp_path: Path) -> None:
    """All matmuls but the first and the last: only what attention returns has a kernel that quantises.

    The errors are those of the user's inputs, also where a mask hides the first token of all of them.
    """
    source = exported("bert", tmp_path, layers=2)
    ids, mask = (each.numpy() for each in batch(TINY))
    mask = np.ones_like(mask)
    mask[:, :2] = 0
    np.savez(tmp_path / "given.npz", ids=ids, mask=mask)
    options: dict[str, Any] = {"rows": 0, "inputs_file": tmp_path / "given.npz"}
    report = optimize(source, tmp_path / "new.onnx", dtype="float8", **options)
    result, model = report.float8, ir.load(report.path)
    assert result is not None and not result.returned and len(result.layers) == 8
    assert result.kept == {"CustomLinear: the first or the last one": 4} and report.dtype == "float16"
    kinds = types(model)
    found = [kinds.get(each, 0) for each in ("CustomLinearFp8", "CustomLinear", "CustomQuantizeRows", *OPS)]
    assert found == [8, 4, 2, 3, 0, 1, 0]
    norms = [node for node in model.graph if node.op_type in OPS[:2]]
    assert [[bool(value.name) for value in node.outputs] for node in norms] == [[True] * 3] * 3
    assert model.ir_version >= 9
    assert {each.dtype for each in model.graph.outputs} == {ir.DataType.FLOAT16}
    onnx.checker.check_model(report.path, full_check=True)
    assert result.error_16 < result.error < 0.1 and all(0.001 < each < 0.1 for each in result.layers.values())
    lines = str(report).splitlines()
    assert f"outputs are close, not the same: relative error {result.error:.1e}" in lines[0]
    assert any(line.startswith("  in 8 bits: 8 matmuls; the largest error of one: ") for line in lines)
    assert json.loads(report.to_json())["float8"]["error"] == result.error
    assert result.error == pytest.approx(error_of(report, ids=ids, mask=mask), rel=0.5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> OptimizeReport:
    """The report of a stack in 8 bits."""
    return optimized(tmp_path_factory.mktemp("whole"))


def test_in_segments(whole: OptimizeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model runs one segment after the other, to the same errors."""
    expected = whole.float8
    monkeypatch.setattr(segments, "MOST_BYTES", 70_000)
    report = optimized(tmp_path)
    assert report.compared["segments"] == 3 and expected is not None and report.float8 is not None
    assert len(report.float8.layers) == 4 and report.float8.error == pytest.approx(expected.error, rel=0.5)
    assert report.float8.layers == pytest.approx(expected.layers, rel=0.5)


def test_fp32_beside_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As autocast writes it: in its segments, no input and no weight has the dtype that the CPU lacks."""
    monkeypatch.setattr(segments, "MOST_BYTES", 70_000)
    source = stack(tmp_path, inner=int(ir.DataType.BFLOAT16))
    report = optimize(source, tmp_path / "new.onnx", dtype="float8", device="cuda", rows=0)
    assert report.compared["segments"] == 3 and not report.notes
    assert report.float8 is not None and len(report.float8.layers) == 4


def test_external_data_and_outputs_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (optimizer, float8):
        monkeypatch.setattr(module, "EXTERNAL_DATA_BYTES", 1)
    given = stack(tmp_path, outputs="float[N, 64] x3, float[N, 64] n1")
    report = optimize(given, tmp_path / "new.onnx", dtype="float8", rows=0)
    [data] = tmp_path.glob("*.data")
    assert report.bytes_after == data.stat().st_size + report.path.stat().st_size
    model = ir.load(report.path)
    assert types(model)["CustomLinearFp8"] == 4
    assert [each.name for each in model.graph.outputs] == ["x3", "n1"]
    assert error_of(report, x0=weights(5, 64)) < 0.1


def test_a_folder_of_genai(tmp_path: Path) -> None:
    """All matmuls but the first and the last, whatever their rows; norms and gates stay in them."""
    source = write(tmp_path / "old", Sizes(), "bfloat16", layers=2)
    options: dict[str, Any] = {"dtype": "float8", "max_error": 1.0}
    report = optimize_folder(source, tmp_path / "new", **options)
    result, model = report.float8, ir.load(report.path)
    assert result is not None and len(result.layers) == 7 and not result.returned
    assert result.kept == {"CustomLinear: the first or the last one": 2}
    kinds = types(model)
    assert [kinds.get(f"CustomLinear{each}", 0) for each in ("W8", "W8Swiglu", "", "Fp8")] == [5, 2, 2, 0]
    assert not {"CustomQuantizeRows", "CustomRmsNorm"} & kinds.keys()
    matmuls = [node for node in model.graph if node.op_type.startswith("CustomLinearW8")]
    assert {node.attributes["few_rows"].as_int() for node in matmuls} == {64}
    assert sum(node.attributes["rms_eps"].as_float() > 0 for node in matmuls) == 3
    before = {value.name: value.dtype for value in ir.load(source / "model.onnx").graph.outputs}
    assert {value.name: value.dtype for value in model.graph.outputs} == before
    config = json.loads((tmp_path / "new/genai_config.json").read_text())
    assert config["model"]["decoder"]["session_options"]["custom_ops_library"] == "libcustom_ops.so"
    assert any("prompts of more rows" in note for note in report.notes) and report.device == "cuda"
    with pytest.raises(ExportError, match="has optimised it for cuda already"):
        optimize_folder(tmp_path / "new", tmp_path / "again", **options)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_matmuls_of_decoders_stay_whole(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "is_decoder", lambda model: True)
    gate = f'{GATED} <activation = "{activation}", rms_eps = 0.5, few_rows = 64>'
    text = f'a = {gate} (h, wide) b = {LINEAR} <layout = "kn"> (a, tall, row, h) y = Relu (b)'
    model = model_of(text, tall=weights(64, 64))
    names, kept = float8.matmuls(model, 2048)
    assert float8.rewrite(model, names) == {"a": ("wide", False), "b": ("tall", True)}
    assert kept == {"CustomLinear: the first or the last one": 2}
    gated, linear = [node for node in model.graph if "W8" in node.op_type]
    assert gated.op_type == "CustomLinearW8Swiglu" and {
        name: each.value for name, each in gated.attributes.items()
    } == {"activation": activation, "rms_eps": 0.5, "few_rows": 64}
    assert [value is not None and value.name for value in linear.inputs] == [
        "a", "tall_fp8_0", "tall_fp8_1", "row", "h",
    ]  # fmt: skip


def test_large_errors_go_back(whole: OptimizeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = whole.float8
    assert full is not None
    tried, error = list[Any](), float8._Trial.error

    def counted(self: Any, names: Any) -> float:
        tried.append(names)
        return error(self, names)

    monkeypatch.setattr(float8._Trial, "error", counted)
    report = optimized(tmp_path, max_error=full.error * 0.7)
    result = report.float8
    assert result is not None and result.returned and result.layers and result.error <= full.error * 0.7
    assert min(result.returned.values()) >= max(result.layers.values())
    assert len(tried) <= log2(4) + 1
    fewer = [*result.layers, min(result.returned, key=lambda name: result.returned[name])]
    assert any(set(names) == {*fewer} for names in tried), "with one more it is too large"
    assert types(ir.load(report.path))["CustomLinearFp8"] == len(result.layers)
    shown = f"back in 16 bits, for an error of at most {full.error * 0.7:g}: {next(iter(result.returned))}"
    assert shown in str(report)


@pytest.mark.parametrize(("number", "has_16"), [(np.nan, False), (np.inf, True)])
def test_not_finite(number: float, has_16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is infinite, unless the file in 16 bits has as much at the same place."""
    run, calls = float8.run_any, list[Any]()

    def run_any(*given: Any, **options: Any) -> Any:
        answer = run(*given, **options)
        calls.append(answer)
        if has_16 or len(calls) > 1:
            answer.outputs[0][0][1, 2] = np.nan if len(calls) == 1 else number
        return answer

    monkeypatch.setattr(float8, "run_any", run_any)
    report = optimized(tmp_path)
    assert report.float8 is not None and len(report.float8.layers) == (4 if has_16 else 0)
    assert (report.float8.error < 0.1) and np.isinf(report.float8.error_16) == has_16
    text = report.to_json()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["float8"]
    assert found["error_16"] == (None if has_16 else report.float8.error_16) and found["error"] < 0.1


def test_all_go_back(tmp_path: Path) -> None:
    report = optimized(tmp_path, max_error=1e-6)
    assert report.float8 is not None and not report.float8.layers and len(report.float8.returned) == 4
    assert report.float8.error == report.float8.error_16 < 1e-2 and "same outputs" in str(report)
    assert "CustomLinearFp8" not in types(ir.load(report.path))


LINEAR, NORM = "custom_domain.CustomLinear", "custom_domain.CustomRmsNorm"
GATED = f"{LINEAR}Swiglu"


def model_of(text: str, **arrays: np.ndarray) -> ir.Model:
    """Makes a model in fp16 with a matmul before and one behind a part of it, from h to y."""
    given = {"w": weights(64, 64), "v": weights(64, 64, seed=1), "wide": weights(128, 64), "row": weights(64)}
    given = {name: each.astype(np.float16) for name, each in (given | arrays).items()}
    text = f"""(float16[M, 64] x, float16[64, 64] fed) => (float16[M, 64] z) {{ h = {LINEAR} (x, w) {text}
        z = {LINEAR} (y, v) }}"""
    model = ir.from_proto(parsed(text, **given))
    for node in model.graph:
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    return model


def sized(text: str, **sizes: tuple[int, int]) -> ir.Model:
    """Makes a model in which these matmuls have weights of other sizes."""
    model = model_of(text)
    for node in model.graph:
        if (name := str(node.outputs[0].name)) in sizes:
            tensor = ir.tensor(np.zeros(sizes[name], np.float16))
            node.replace_input_with(1, g.initializer(model.graph, tensor, name))
    return model


def reopened(model: ir.Model, folder: Path) -> tuple[ir.Model, ir.Model, dict[str, tuple[str, bool]]]:
    """Returns the file in 16 bits, that in 8 bits, and the weights of its matmuls."""
    sources = float8.rewrite(new := model.clone(), float8.matmuls(model, 0)[0])
    ir.save(new, folder / "new.onnx")
    return model, reopen(folder / "new.onnx"), sources


def rewritten(text: str, **arrays: np.ndarray) -> tuple[dict[str, int], dict[str, int], ir.Model]:
    model = model_of(text, **arrays)
    names, kept = float8.matmuls(model, 0)
    kept.pop("CustomLinear: the first or the last one")
    float8.rewrite(model, names)
    return types(model), kept, model


def test_a_norm_in_matmuls_becomes_one_for_all() -> None:
    kinds, _, model = rewritten(f"""a = {LINEAR} <rms_eps = 0.5> (h, w) b = {LINEAR} <rms_eps = 0.5> (h, v)
        c = {LINEAR} <rms_eps = 0.25> (h, v) d = Add (a, b) y = Add (d, c)""")
    assert kinds == {"CustomLinear": 2, "CustomRmsNormFp8": 2, "CustomLinearFp8": 3, "Add": 2}
    norms = [node for node in model.graph if node.op_type == "CustomRmsNormFp8"]
    assert [(len(each.inputs), each.attributes["eps"].as_float()) for each in norms] == [(1, 0.5), (1, 0.25)]


def test_matmuls_share_what_they_read() -> None:
    """x, in 8 bits, and a weight of two matmuls; the one of another layout has a constant of its own."""
    kinds, _, model = rewritten(f"""a = {LINEAR} (h, v) b = {LINEAR} (h, v, row)
        c = {LINEAR} <layout = "kn"> (h, v) d = Add (a, b) y = Add (d, c)""")
    assert kinds == {"CustomLinear": 2, "CustomQuantizeRows": 1, "CustomLinearFp8": 3, "Add": 2}
    linears = [node for node in model.graph if node.op_type == "CustomLinearFp8"]
    assert len({node.inputs[2] for node in linears}) == 2 and len({node.inputs[0] for node in linears}) == 1
    found = [value.const_value.numpy() for value in linears[2].inputs[2:4]]  # type: ignore[union-attr]
    exact = weights(64, 64, seed=1).astype(np.float16).astype(np.float32).T
    assert np.allclose(found[0].astype(np.float32) * found[1][:, None], exact, rtol=0.07, atol=1e-2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # a GELU that another node reads stays in the matmul
            f'a = {LINEAR} <activation = "gelu"> (h, w) b = {LINEAR} (a, v) y = Add (a, b)',
            {"CustomQuantizeRows": 2, "CustomLinearFp8": 2, "Add": 1},
        ),
        (  # also if that is a matmul in 8 bits, which adds it
            f'a = {LINEAR} <activation = "gelu"> (h, w) y = {LINEAR} (a, v, row, a)',
            {"CustomQuantizeRows": 2, "CustomLinearFp8": 2},
        ),
        (
            f'a = {LINEAR} <activation = "gelu_tanh"> (h, w) y = {LINEAR} (a, v)',
            {"CustomQuantizeRows": 1, "CustomLinearFp8": 2, "CustomGeluFp8": 1},
        ),
        (
            f"a = {GATED} (h, wide) b = {LINEAR} (a, v) y = Add (a, b)",
            {"CustomQuantizeRows": 1, "CustomLinearFp8": 2, "CustomSwigluPackedFp8": 1, "Add": 1},
        ),
        (
            f"c = {NORM} (h, row) d = {LINEAR} (c, v) y = Add (c, d)",
            {"CustomRmsNormFp8": 1, "CustomLinearFp8": 1, "Add": 1},
        ),
    ],
)  # fmt: skip
def test_what_reads_and_returns_8_bits(text: str, expected: dict[str, int]) -> None:
    kinds, kept, _ = rewritten(text)
    assert kinds == {"CustomLinear": 2} | expected and not kept


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"y = {LINEAR} (h, fed)", "its weight is not constant, or not all of it is in 16 bits"),
        (f'y = {GATED} <activation = "gelu"> (h, wide)', "a gate of GELU"),
        (f"a = {LINEAR} (h, odd) y = MatMul (a, back)", "K or N is no multiple of 16"),
    ],
)
def test_what_stays_in_16_bits(text: str, reason: str) -> None:
    kinds, kept, _ = rewritten(text, odd=weights(24, 64), back=weights(24, 64))
    kept.pop("MatMul: no op has it in 8 bits", None)
    assert [each.partition(": ")[2] for each in kept] == [reason]
    assert not any(kind.endswith("Fp8") for kind in kinds)


@pytest.mark.parametrize(
    ("rows", "size", "is_faster"),
    [(0, 16, True), (128, 2048, False), (512, 1024, False), (512, 2048, True), (2048, 768, True),
     (16384, 512, False)],
)  # fmt: skip
def test_the_table_decides(rows: int, size: int, is_faster: bool) -> None:
    model = sized(f"a = {LINEAR} (h, w) y = {LINEAR} (a, v)", a=(size, size), y=(size, size))
    names, kept = float8.matmuls(model, rows)
    assert names == (["a", "y"] if is_faster else [])
    slow = f"CustomLinear: 8 bits are no faster for {rows} rows and a weight of {size} x {size}"
    assert kept == {"CustomLinear: the first or the last one": 2} | ({} if is_faster else {slow: 2})


def test_large_matmuls_go_back_last() -> None:
    """Where they save more time than smaller ones, for the square of an error."""
    model = sized(f"a = {LINEAR} (h, w) y = {LINEAR} (a, v)", a=(64, 64), y=(64, 128))
    for large, order in ((0.05, ["a", "y"]), (0.06, ["y", "a"]), (np.inf, ["y", "a"])):
        assert float8._worst_first(model, {"y": large, "a": 0.04}) == order


def test_narrow_matmuls_go_with_wide_ones() -> None:
    """k and v of grouped-query attention: x is in 8 bits for q."""
    text = f"q = {LINEAR} (h, w) k = {LINEAR} (h, v) a = Add (q, k) g = Relu (h) l = {LINEAR} (g, v)"
    model = sized(f"{text} y = Add (a, l)", q=(2048, 2048), k=(512, 2048), l=(512, 2048))
    assert float8.matmuls(model, 2048)[0] == ["q", "k"]


def test_nothing_is_written_when_it_is_only_tried(tmp_path: Path) -> None:
    report = optimized(tmp_path, dry_run=True)
    assert report.float8 is not None and len(report.float8.layers) == 4 and not report.path.exists()
    assert "in 8 bits: 4 matmuls\n" in str(report) and "nothing was compared or written" in str(report)


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = weight.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(1), np.float32(2.0**-60)) / np.float32(448)
    q = np.clip(wide * (np.float32(1) / scale)[:, None], -448, 448)
    return q.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(32, 48), (1040, 1024)], ids=["small", "large"])
def test_weights_have_a_scale_for_each_channel(shape: tuple[int, int], dtype: Any) -> None:
    weight = (weights(*shape) * 10.0 ** np.linspace(-4, 3, shape[0])[:, None]).astype(dtype)
    weight[3] = 0
    given = stored.Held(ir.tensor(weight))
    scales = stored.row_scales(given)
    found = stored.quantized(given, scales)
    q, scale = quantized(weight)
    assert isinstance(found, stored.Recipe) == (shape[0] > 64) and found.dtype is ir.DataType.FLOAT8E4M3FN
    assert np.array_equal(found.numpy().view(np.uint8), q) and np.array_equal(scales.numpy(), scale)
    if isinstance(found, stored.Recipe):
        assert np.array_equal(stored.read(found, [(7, 19), (0, shape[1])]).view(np.uint8), q[7:19])
        turned = stored.quantized(stored.transpose(given), stored.row_scales(stored.transpose(given)))
        assert np.array_equal(turned.numpy().view(np.uint8), quantized(weight.T)[0])


@pytest.fixture(params=[False, True], ids=["", "decoder"])
def written(
    request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ir.Model, ir.Model, dict[str, tuple[str, bool]]]:
    monkeypatch.setattr(decoders, "is_decoder", lambda model: request.param)
    text = f'a = {LINEAR} (h, v) b = {LINEAR} <layout = "kn"> (h, big) y = Add (a, b)'
    big = weights(64, 64, seed=3) * np.float32(10) ** np.arange(-4, 4).repeat(8)
    return reopened(model_of(text, big=big), tmp_path)


def test_every_byte_is_compared(written: Any) -> None:
    before, after, sources = written
    check_quantized(before, after, sources)
    assert sources == {"a": ("v", False), "b": ("big", True)}
    assert "v" in after.graph.initializers and "big" not in after.graph.initializers
    for name, value in after.graph.initializers.items():
        kept = value.const_value
        for place in (0, -1):
            raw = bytearray(kept.tobytes())
            raw[place] ^= 1
            array = np.frombuffer(bytes(raw), kept.dtype.numpy()).reshape(kept.shape.numpy())
            value.const_value = ir.Tensor(array, dtype=kept.dtype, name=name)
            with pytest.raises(NotEquivalent, match="is not what the file in 16 bits has"):
                check_quantized(before, after, sources)
        value.const_value = kept


@pytest.mark.parametrize("factor", [-1, 2, 0], ids=["negative", "double", "zero"])
def test_matmuls_that_share_a_constant_are_compared(factor: int, tmp_path: Path) -> None:
    """w and -w have the same scales, w and 2w the same numbers in e4m3, and zeros have both."""
    first = weights(64, 64, seed=3) * np.float32(factor != 0)
    text = f"a = {LINEAR} (h, one) b = {LINEAR} (h, two) y = Add (a, b)"
    model, after, sources = reopened(model_of(text, one=first, two=first * factor), tmp_path)
    found = [node.inputs[2:4] for node in after.graph if node.op_type == "CustomLinearFp8"]
    assert [one is two for one, two in zip(*found, strict=True)] == [factor != -1, factor != 2]
    check_quantized(model, after, sources)
    scales = found[1][1]
    assert scales is not None and scales.const_value is not None
    scales.const_value = ir.tensor(scales.const_value.numpy() * np.float32(1.5))
    with pytest.raises(NotEquivalent, match="is not what the file in 16 bits has"):
        check_quantized(model, after, sources)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device='cpu': not with dtype='float8': CPUs have no matmuls in 8 bits"),
        ({"invariant": True}, "invariant=True: not with dtype='float8': sums in 8 bits have no fixed order"),
        ({"drop_slow": True}, "drop_slow=True: not with dtype='float8': it measures 16 bits"),
        ({"rows": -1}, "rows=-1, max_error=0.25: expected a number of rows, 0 or more, and an error above 0"),
        ({"max_error": 0.0}, "rows=0, max_error=0.0: expected a number of rows"),
        ({"max_error": float("nan")}, "max_error=nan: expected"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError) as error:
        optimized(tmp_path, **options)
    assert message in str(error.value) and not (tmp_path / "new.onnx").exists()


def test_a_file_in_8_bits_is_refused(whole: OptimizeReport, tmp_path: Path) -> None:
    said = r"is in 8 bits already, it has Custom\w+Fp8\. Give the file in 16"
    for dtype in ("float8", "float16", None):
        with pytest.raises(ExportError, match=said):
            optimize(whole.path, tmp_path / "again.onnx", dtype=dtype)


def test_what_the_cpu_does_not_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "run_any", Mock(side_effect=NotRunnable("it has no CPU kernel for Net")))
    said = "error cannot be measured on the CPU: it has no CPU kernel for Net. Take"
    with pytest.raises(ExportError, match=said):
        optimized(tmp_path)
    assert not (tmp_path / "new.onnx").exists()
