"""Tests that rewrites never read large weights, and that recipes of them give the bytes that values give."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import decoder_graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import exported, parsed, weights

from twinop.model import files, folding
from twinop.model import weights as lazy
from twinop.model.weights import Recipe, Stored
from twinop.optimize import graph as g
from twinop.optimize import optimizer, passes
from twinop.optimize.load import load
from twinop.optimize.prepare import prepare
from twinop.optimize.source import Options, read_source
from twinop.system.progress import silent

_LIMIT = 4200  # bytes; onnx_ir joins equal constants of up to 1024 elements
_TENSORS = (Stored, Recipe, ir.Tensor, ir.PackedTensor, ir.serde.TensorProtoTensor)


def _large(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Lets tensors of more bytes count as large."""
    monkeypatch.setattr(lazy, "LARGE", limit)
    monkeypatch.setattr("twinop.deploy.wire.LARGE", limit)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the code of windows, strips and statistics reads a large tensor."""
    _large(monkeypatch, _LIMIT)

    def guard(kind: type, name: str) -> None:
        plain: Callable[..., Any] = getattr(kind, name)

        def read(self: ir.TensorProtocol, *given: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename != lazy.__file__:
                frame = frame.f_back
            if self.nbytes > _LIMIT and frame.f_back is None:
                raise AssertionError(f"{name} of {self!r}: a large tensor")
            return plain(self, *given, **options)

        monkeypatch.setattr(kind, name, read)

    for kind in _TENSORS:
        for name in ("numpy", "tobytes", "__array__"):
            guard(kind, name)


def _rewritten(path: Path, dtype: str | None, device: str, target: Path) -> ir.Model:
    """Takes a model through all steps that change it, without a run, and writes it."""
    options = Options(
        dtype, device, None, False, False, None, (), False, False, library=None,
        allow_model_libraries=False, kept=(), held={},
    )  # fmt: skip
    source = read_source(path, target, options)
    prepare(source.base, {**source.records, **source.user_ops.records})
    names = [each.name for each in passes.chosen(device, source.report.dtype)]
    model = optimizer._converted(source, optimizer._rewritten(source, silent, names))
    files.save(model, target, 0, checks=False)
    return model


def _decoder(precision: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        table = 140 if precision == "int4" else 0  # else small weights that are shared are folded, too
        sizes = decoder_graphs.Sizes(64, 96, heads=2, kv_heads=1, head=32, vocab=136, table=table)
        return decoder_graphs.write(folder / "decoder", sizes, precision) / "model.onnx"

    return make


def _images(folder: Path) -> Path:
    """Convolutions with batch norms, one transposed and in groups, and a product with one."""
    text = """(float[N, 8, 6, 6] x) => (float[N, 24] y) {
        a = Conv <kernel_shape=[3, 3], pads=[1, 1, 1, 1]> (x, w) b = BatchNormalization (a, s, o, m, v)
        c = Relu (b) d = ConvTranspose <kernel_shape=[3, 3], group=2> (c, u, z)
        e = BatchNormalization <epsilon=0.001> (d, s, o, m, v) f = GlobalAveragePool (e)
        k = Flatten (f) l = Gemm <transB=1, beta=0.5> (k, p, o) n = BatchNormalization (l, s, o, m, v)
        q = MatMul (n, r) y = Add (q, t) }"""
    given = {"w": weights(16, 8, 3, 3), "u": weights(16, 8, 3, 3, seed=1), "z": weights(16, seed=2)}
    given |= {name: weights(16, seed=3 + index) for index, name in enumerate("som")}
    given |= {"v": 1 + weights(16) ** 2, "p": weights(16, 16 * 1, seed=8), "r": weights(16, 24, seed=9)}
    onnx.save(parsed(text, **given, t=weights(24)), folder / "images.onnx")
    return folder / "images.onnx"


@pytest.mark.parametrize(
    ("make", "dtype", "device"),
    [
        pytest.param(_decoder("float32"), "float16", "cuda", id="decoder in fp32"),
        pytest.param(_decoder("int4"), None, "cuda", id="decoder in int4"),
        pytest.param(partial(exported, "bert"), "float16", "cuda", id="encoder"),
        pytest.param(_images, "float16", "cpu", id="images"),
    ],
)
def test_no_step_reads_a_large_weight(
    make: Any, dtype: str | None, device: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = make(tmp_path)
    expected = _rewritten(source, dtype, device, tmp_path / "expected.onnx")
    values = [value.const_value for value in expected.graph.initializers.values()]
    assert not any(isinstance(each, Recipe) for each in values)
    request.getfixturevalue("guarded")
    model = _rewritten(source, dtype, device, tmp_path / "found.onnx")
    assert any(isinstance(v.const_value, Stored | Recipe) for v in model.graph.initializers.values())
    request.getfixturevalue("monkeypatch").undo()
    assert [node.op_type for node in model.graph] == [node.op_type for node in expected.graph]
    found, wanted = (onnx.load(tmp_path / name).graph.initializer for name in ("found.onnx", "expected.onnx"))
    contents = [{each.name: each.raw_data for each in tensors} for tensors in (found, wanted)]
    assert contents[0] == contents[1]


def test_scales_that_each_layer_has_stay_in_the_file(tmp_path: Path) -> None:
    """Of a decoder of 8B in blocks of 128: 1 MB a layer, in as many layers as it has."""
    text, scales = "(float16[N, 1024] x) => (float16[N, 1024] y) { y = Mul (x, s) }", weights(64, 1024)
    proto = parsed(text, s=scales.astype(np.float16))
    onnx.save(proto, tmp_path / "old.onnx", save_as_external_data=True, location="old.data")
    assert isinstance(load(tmp_path / "old.onnx").graph.initializers["s"].const_value, Stored)


def _folded(text: str, **constants: np.ndarray) -> ir.Model:
    model = ir.from_proto(parsed(text, **constants))
    folding.fold_constants(model)
    return model


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Transpose <perm=[1, 0]> (w)",
        "t = Reshape (w, shape)",
        "t = Concat <axis=0> (w, w)",
        "a = Neg (w) t = Transpose <perm=[1, 0]> (a)",
        "t = Mul (w, row)",
        "t = Slice (w, one, three)",
        "a = Unsqueeze (w, one) t = Squeeze (a, one)",
    ],
)
def test_large_constants_are_folded_to_recipes(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"w": weights(30, 40), "row": weights(40), "shape": np.array([40, 30])}
    given |= {"one": np.array([1]), "three": np.array([3])}
    text = f"(float[40, N] x) => (float[M, N] y) {{ {nodes} y = MatMul (t, x) }}"
    text = text.replace("[40, N]", "[K, N]")
    _large(monkeypatch, 300)
    [product] = _folded(text, **given).graph
    assert product.op_type == "MatMul"
    found = g.tensor(product.inputs[0])
    assert found is not None and (isinstance(found, Recipe) or "Squeeze" in nodes or "Slice" in nodes)
    plain = parsed(text.replace("y = MatMul (t, x)", "y = Identity (t)"), **given)
    [wanted] = onnx.reference.ReferenceEvaluator(plain).run(None, {"x": np.zeros((1, 1), np.float32)})
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_what_would_grow_or_is_shared_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _large(monkeypatch, 300)
    shared = "(float[N, 40] x, int64[M] i) => (float[N, 30] y, float[M, 40] z) { z = Gather (w, i) "
    model = _folded(shared + "t = Transpose <perm=[1, 0]> (w) y = MatMul (x, t) }", w=weights(30, 40))
    assert [node.op_type for node in model.graph] == ["Gather", "Transpose", "MatMul"]
    grows = "(float[N, 30] x) => (float[8, N, 40] y) { t = Expand (w, shape) y = MatMul (x, t) }"
    model = _folded(grows, w=weights(30, 40), shape=np.array([8, 30, 40]))
    assert [node.op_type for node in model.graph] == ["Expand", "MatMul"]
