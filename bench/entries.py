"""The table of the ops: the inputs of each, and torch's and ONNX Runtime's own functions beside it.

An op needs no entry: without one, its function body stands for torch's own function, which is also what
torch.compile compiles and, in float64, the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinop.export.body_in_torch import evaluate_body
from twinop.record.op_spec import OpSpec


@dataclass(frozen=True)
class Entry:
    """What is measured of one op.

    Args:
        op: the op's name in the registry.
        inputs: the names of the inputs to pass.
        eager: torch's own function of these inputs.
        ort: provider -> ONNX Runtime's own nodes in ONNX's text format, separated by semicolons; the first
            provider is what a stock export holds.
        backward: measure the gradient too.
        positive: the inputs that must be positive.
        reference: the exact result, if it is not `eager` of the inputs in float64.
        library: the file of an op that is not twinop's.
    """

    op: str
    inputs: str
    eager: Callable[..., Any]
    ort: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = False
    positive: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    library: Path | None = None

    @property
    def input_names(self) -> list[str]:
        return self.inputs.split()


def _gelu_exact(x: Tensor) -> Tensor:
    """torch's formula cancels for negative x: in float64 it is 0 below -8.3, where the result is not."""
    x = x.double()
    return 0.5 * x * torch.erfc(x * -(0.5**0.5))


def _gelu_tanh_exact(x: Tensor) -> Tensor:
    x = x.double()
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


def _swiglu_packed(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _of_sum(norm: Callable[..., Tensor], wide: bool = False) -> Callable[..., Any]:
    """Returns the norm of a sum; `wide`: in float64, of the sum in the tensors' dtype, as add_* ops say."""

    def add_norm(x: Tensor, residual: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        if wide:
            total, weights = total.double(), tuple(weight.double() for weight in weights)
        return norm(total, *weights), total

    return add_norm


_SWIGLU = "s = Sigmoid(gate); t = Mul(gate, s)"
_LAYER_NORM = "LayerNormalization<axis = -1, epsilon = 1e-5>"
_RMS_NORM = "<axis = -1, epsilon = 1e-6>(x, weight)"
_ADD_RMS_NORM = "SkipSimplifiedLayerNormalization<epsilon = 1e-6>(x, residual, weight)"

ENTRIES: dict[str, Entry] = {
    "relu": Entry("relu", "x", torch.relu, ort={"ORT Relu": "y = Relu(x)"}),
    "gelu": Entry(
        "gelu",
        "x",
        F.gelu,
        ort={"ORT Gelu": "y = Gelu(x)", "ORT contrib Gelu": "y = com.microsoft.Gelu(x)"},
        backward=True,
        reference=_gelu_exact,
    ),
    "gelu_tanh": Entry(
        "gelu",
        "x",
        lambda x: F.gelu(x, approximate="tanh"),
        ort={
            "ORT Gelu": 'y = Gelu<approximate = "tanh">(x)',
            "ORT FastGelu": "y = com.microsoft.FastGelu(x)",
        },
        attributes={"approximate": "tanh"},
        backward=True,
        reference=_gelu_tanh_exact,
    ),
    "silu": Entry(
        "silu",
        "x",
        F.silu,
        ort={
            "ORT Sigmoid, Mul": "s = Sigmoid(x); y = Mul(x, s)",
            "ORT QuickGelu": "y = com.microsoft.QuickGelu<alpha = 1.0>(x)",
        },
    ),
    "sigmoid": Entry("sigmoid", "x", torch.sigmoid, ort={"ORT Sigmoid": "y = Sigmoid(x)"}),
    "tanh": Entry("tanh", "x", torch.tanh, ort={"ORT Tanh": "y = Tanh(x)"}),
    "softplus": Entry("softplus", "x", F.softplus, ort={"ORT Softplus": "y = Softplus(x)"}),
    "exp": Entry("exp", "x", torch.exp, ort={"ORT Exp": "y = Exp(x)"}),
    "log": Entry("log", "x", torch.log, ort={"ORT Log": "y = Log(x)"}, positive=("x",)),
    "square": Entry("square", "x", torch.square, ort={"ORT Mul": "y = Mul(x, x)"}),
    "add": Entry("add", "a b", torch.add, ort={"ORT Add": "y = Add(a, b)"}),
    "mul": Entry("mul", "a b", torch.mul, ort={"ORT Mul": "y = Mul(a, b)"}),
    "pow": Entry("pow", "a b", torch.pow, ort={"ORT Pow": "y = Pow(a, b)"}, positive=("a",)),
    "swiglu": Entry(
        "swiglu",
        "x gate",
        lambda x, gate: F.silu(gate) * x,
        ort={
            "ORT Sigmoid, Mul, Mul": f"{_SWIGLU}; y = Mul(t, x)",
            "ORT QuickGelu, Mul": "t = com.microsoft.QuickGelu<alpha = 1.0>(gate); y = Mul(t, x)",
        },
        backward=True,
    ),
    "swiglu_packed": Entry(
        "swiglu_packed",
        "x",
        _swiglu_packed,
        ort={
            "ORT Split, Sigmoid, Mul, Mul": (
                f"gate, value = Split<axis = -1, num_outputs = 2>(x); {_SWIGLU}; y = Mul(t, value)"
            )
        },
        backward=True,
    ),
    "softmax": Entry(
        "softmax",
        "x",
        lambda x: torch.softmax(x, -1),
        ort={"ORT Softmax": "y = Softmax<axis = -1>(x)"},
        backward=True,
    ),
    "layer_norm": Entry(
        "layer_norm",
        "x weight bias",
        _layer_norm,
        ort={"ORT LayerNormalization": f"y = {_LAYER_NORM}(x, weight, bias)"},
        backward=True,
    ),
    "rms_norm": Entry(
        "rms_norm",
        "x weight",
        _rms_norm,
        ort={
            "ORT RMSNormalization": f"y = RMSNormalization{_RMS_NORM}",
            "ORT SimplifiedLayerNormalization": f"y = SimplifiedLayerNormalization{_RMS_NORM}",
        },
        backward=True,
    ),
    "add_layer_norm": Entry(
        "add_layer_norm",
        "x residual weight bias",
        _of_sum(_layer_norm),
        ort={
            "ORT SkipLayerNormalization": (
                "y, , , sum = com.microsoft.SkipLayerNormalization<epsilon = 1e-5>(x, residual, weight, bias)"
            ),
            "ORT Add, LayerNormalization": (
                "sum = Add(x, residual); y = LayerNormalization(sum, weight, bias)"
            ),
        },
        reference=_of_sum(_layer_norm, wide=True),
    ),
    "add_rms_norm": Entry(
        "add_rms_norm",
        "x residual weight",
        _of_sum(_rms_norm),
        ort={"ORT SkipSimplifiedLayerNormalization": f"y, , , sum = com.microsoft.{_ADD_RMS_NORM}"},
        reference=_of_sum(_rms_norm, wide=True),
    ),
}
"""By name in the report. gelu has two entries, one for each formula."""


def entry_of(
    record: OpSpec, library: Path | None = None, attributes: Mapping[str, Any] | None = None, names: str = ""
) -> Entry:
    """Returns the entry of an op that the table does not name: torch's own function is its function body.

    Args:
        names: the inputs to pass; by default all.
    """
    names = names or " ".join(entry.name for entry in record.inputs)
    given = dict(attributes or {})

    def eager(*inputs: Tensor) -> Any:
        by_name = dict(zip(names.split(), inputs, strict=True))
        results = evaluate_body(record, [by_name.get(entry.name) for entry in record.inputs], given)
        return results if len(results) > 1 else results[0]

    return Entry(
        record.key,
        names,
        eager,
        attributes=given,
        backward=bool(record.gradient),
        library=library,
    )
