"""The bounds of `twinop test`: a right op meets them, whichever formula it computes; a wrong one does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from twinop.errors import ExportError
from twinop.export import body
from twinop.export.body_in_torch import TorchOps
from twinop.record.op_spec import OpSpec
from twinop.record.schema_text import record_of
from twinop.testing import under_test
from twinop.testing.messages import first_difference
from twinop.testing.references import ONE_ROUNDING
from twinop.testing.rounding import OrtRoundingOps
from twinop.testing.samples import Sample, why_not_derived
from twinop.testing.ulps import is_defined, measure
from twinop.testing.values import integers

DOMAIN = "bounds"


@body(domain=DOMAIN)
def log_softmax(op: Any, x: Any) -> Any:
    return op.LogSoftmax(x, axis=-1)


@body(domain=DOMAIN)
def silu_mul(op: Any, a: Any, b: Any) -> Any:
    return op.Mul(op.Mul(a, op.Sigmoid(a)), b)


@body(domain=DOMAIN)
def smallest(op: Any, x: Any) -> Any:
    return op.ArgMin(x, axis=-1, keepdims=0)


def record(schema: str, **texts: str) -> OpSpec:
    return record_of(schema, DOMAIN, **texts)


LOG_SOFTMAX = record("log_softmax(Tensor x) -> Tensor")
SILU_MUL = record("silu_mul(Tensor a, Tensor b) -> Tensor")
SMALLEST = record("smallest(Tensor x) -> Tensor idx", dtypes="float32 idx=int64", shapes="idx = x[:-1]")


@pytest.fixture(autouse=True)
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (LOG_SOFTMAX, SILU_MUL, SMALLEST):
        found = under_test.OpUnderTest(each, Path("libbounds.so"), lambda: None)
        monkeypatch.setitem(under_test._ops, each.key, found)


def worst(op: OpSpec, inputs: dict[str, Tensor], result: Tensor, **options: Any) -> float:
    return measure(op, inputs, {}, [result], **options)[0].worst


def rows(dtype: torch.dtype) -> Tensor:
    x = torch.randn(60, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[::3] *= 30  # in such a row one number is far above the others: its result is nearly 0
    x[1::3] += 1e4
    return x.to(dtype)


def from_the_largest(x: Tensor) -> Tensor:
    x = x - x.amax(-1, keepdim=True)
    return x - x.exp().sum(-1, keepdim=True).log()


WRONG: list[Callable[[Tensor], Tensor]] = [
    lambda x: from_the_largest(x) * (1 + 1e-4),
    lambda x: from_the_largest(x).clamp(min=-60),
    lambda x: x - x.logsumexp(-1, keepdim=True) + 1e-2,
    lambda x: x - x.amax(-1, keepdim=True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_softmax(dtype: torch.dtype) -> None:
    """-log(sum) cancels: the op's error is that of inputs next to the given ones."""
    x = rows(dtype)
    right = (from_the_largest(x), x.log_softmax(-1), x - x.logsumexp(-1, keepdim=True))
    assert max(worst(LOG_SOFTMAX, {"x": x}, each) for each in right) <= ONE_ROUNDING
    for wrong in WRONG:
        assert worst(LOG_SOFTMAX, {"x": x}, wrong(x)) > 4 * ONE_ROUNDING


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gated_op(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(2)
    a, b = 20 * torch.randn(2, 4000, dtype=torch.float64, generator=random).to(dtype)
    given = {"a": a, "b": b}
    silu = torch.nn.functional.silu
    for right in (a * a.sigmoid() * b, a * b / (1 + (-a).exp()), silu(a) * b):
        assert worst(SILU_MUL, given, right) <= ONE_ROUNDING
    approximate = 1 / (1 + (-a.clamp(-17, 17)).exp())  # as ONNX Runtime's Sigmoid: its error is absolute
    if dtype == torch.float32:
        assert worst(SILU_MUL, given, a * approximate * b) > ONE_ROUNDING
        assert worst(SILU_MUL, given, a * approximate * b, smallest=1.0, ops=OrtRoundingOps) <= 1
    gelu = torch.nn.functional.gelu
    for wrong in (silu(a) * b * 1.001, silu(b) * a, silu(a.clamp(max=10)) * b, gelu(a) * b):
        for options in ({}, {"smallest": 1.0, "ops": OrtRoundingOps}):
            assert worst(SILU_MUL, given, wrong, **options) > 4


def test_what_infinity_makes_of_a_rounded_number() -> None:
    """ONNX Runtime's Sigmoid(-30) is 0, and 0 * inf is NaN: not what the body means, and not its fault."""
    given = {"a": torch.tensor([-30.0]), "b": torch.tensor([torch.inf])}
    nan = torch.tensor([torch.nan])
    assert worst(SILU_MUL, given, nan, smallest=1.0, ops=OrtRoundingOps) == 0
    finite = given | {"b": torch.tensor([2.0])}
    assert worst(SILU_MUL, finite, nan, smallest=1.0, ops=OrtRoundingOps) == torch.inf


def test_whole_numbers() -> None:
    x = rows(torch.float32)
    assert worst(SMALLEST, {"x": x}, x.argmin(-1)) == 0
    assert worst(SMALLEST, {"x": x}, x.argmax(-1)) == torch.inf
    assert is_defined(SMALLEST, {"x": torch.ones(0, 3)}, {})
    assert not is_defined(SMALLEST, {"x": torch.ones(3, 0)}, {})


X = np.random.default_rng(0).standard_normal((3, 4))
Y = np.random.default_rng(1).standard_normal((3, 4))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


PLAIN = (
    "HardSigmoid", "HardSwish", "Hardmax", "Selu", "Shrink", "Swish", "Transpose", "ThresholdedRelu", "Gelu",
    "Elu", "Celu", "Mish", "Softsign", "Erf", "Flatten",
)  # fmt: skip
OPERATORS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((op, (X,), more) for op in ("ArgMax", "ArgMin") for more in ({}, {"axis": 1, "keepdims": 0})),
    *((op, (np.array([[1.0, 2, 2]]),), {"axis": 1, "select_last_index": 1}) for op in ("ArgMax", "ArgMin")),
    *(
        (f"Reduce{op}", (np.abs(X), ints(-1)), {"keepdims": keep})
        for op in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
        for keep in (0, 1)
    ),
    ("CumSum", (X, np.int64(1)), {"exclusive": 1}),
    ("CumSum", (X, np.int64(0)), {"reverse": 1}),
    *((op, (X,), {}) for op in PLAIN),
    ("Selu", (X,), {"alpha": 1.5, "gamma": 1.1}),
    ("HardSigmoid", (X,), {"alpha": 0.3, "beta": 0.4}),
    ("Shrink", (X,), {"bias": 0.1, "lambd": 0.3}),
    ("Gelu", (X,), {"approximate": "tanh"}),
    ("IsInf", (np.array([1.0, np.inf, -np.inf]),), {"detect_negative": 0}),
    ("PRelu", (X, Y), {}),
    ("Mean", (X, Y), {}),
    ("Tile", (X, ints(2, 1)), {}),
    ("Gather", (X, ints(-1, 0)), {"axis": 1}),
    ("GatherND", (X, ints(0, 1, -1, -1).reshape(2, 2)), {}),
    ("GatherND", (X, ints(2, 0, -1).reshape(3, 1)), {"batch_dims": 1}),
    ("NonZero", (X > 0,), {}),
    ("Compress", (X, np.array([True, False, True])), {}),
    ("Compress", (X, np.array([True, False, True])), {"axis": 1}),
    ("GatherElements", (X, ints(0, -1, 2, 0).reshape(1, 4)), {}),
    ("Einsum", (X, Y), {"equation": "ij,ij->i"}),
    ("Gemm", (X, Y), {"transB": 1, "alpha": 0.5}),
    ("TopK", (X, ints(2)), {"axis": 0, "largest": 0}),
    ("Unique", (np.round(X),), {}),
    ("Unique", (np.round(X)[:, [0, 1, 0]],), {"axis": 1}),
    *(("Constant", (), {f"value_{kind}": value}) for kind, value in (("int", 3), ("floats", [0.5, 2.0]))),
    ("OneHot", (ints(0, -1), np.int64(3), np.array([0.5, 2.0])), {"axis": 0}),
    ("Pow", (ints(2, 3), np.array([2.0, 3.0])), {}),
    ("Range", (np.array(0.0), np.array(1.0), np.array(0.25)), {}),
    ("Range", (np.int64(5), np.int64(0), np.int64(-2)), {}),
    ("ReduceSum", (X, ints()), {}),
    *(
        ("ScatterElements", (X, ints(0, 0, 1, -1).reshape(1, 4), X[:1]), {"axis": 1, "reduction": reduction})
        for reduction in ("none", "add", "max")
    ),
    *(("ScatterND", (X, ints(1, -1).reshape(2, 1), X[:2]), {"reduction": each}) for each in ("none", "add")),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), OPERATORS, ids=lambda each: str(each)[:12])
def test_operators_are_those_of_onnx(op: str, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> None:
    names = [f"x{i}" for i in range(len(inputs))]
    outputs = ["y", "i", "inverse", "counts"][: {"TopK": 2, "Unique": 4}.get(op, 1)]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(each).dtype), None)
        for name, each in zip(names, inputs, strict=True)
    ]
    results = [helper.make_tensor_value_info(name, 0, None) for name in outputs]
    node = helper.make_node(op, names, outputs, **attributes)
    graph = helper.make_graph([node], "g", values, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    expected = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    found = getattr(TorchOps(LOG_SOFTMAX, torch.float64, torch.float64), op)(
        *map(torch.as_tensor, inputs), **attributes, _outputs=len(outputs)
    )
    for a, b in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        assert a.shape == b.shape and str(a.dtype) == f"torch.{b.dtype}"
        torch.testing.assert_close(a, torch.from_numpy(b.copy()), rtol=1e-6, atol=1e-9)


def test_an_operator_that_torch_does_not_take_is_one_message() -> None:
    op = TorchOps(LOG_SOFTMAX, torch.float64, torch.float64)
    with pytest.raises(ExportError, match=r"body log_softmax: Dropout\(1 inputs, .* cannot be computed with"):
        op.Dropout(torch.ones(3))
    with pytest.raises(ExportError, match=r"Pad\(2 inputs, {'mode': 'edge'}\) cannot be computed with torch"):
        op.Pad(torch.ones(3), [1, 1], mode="edge")
    with pytest.raises(ExportError, match="does not know what Conv is there. Write it with other op"):
        op.Conv(torch.ones(1, 1, 3), torch.ones(1, 1, 3))


def test_what_samples_and_messages_take() -> None:
    """Integers beyond int64, attributes without a default, an output's index that its input has not."""
    assert (integers((64,), torch.uint64, 0).to(torch.float64) > 2.0**63).any()
    record = record_of("f(Tensor x, float a, int b=1) -> Tensor", "d")
    assert why_not_derived(record) == "a: attributes without a default"
    wrong, x = torch.arange(30) == 25, torch.zeros(10, 3)
    said = first_difference("y", wrong, wrong, wrong, Sample({"x": x}), ("a", "b"))
    assert "first wrong element: y[25]; 1 of 30 are wrong" in said and "x = " in said
