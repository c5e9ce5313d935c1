"""The table of the ops: the inputs of each, and torch's and ONNX Runtime's own functions beside it.

An op needs no entry: without one, its function body stands for torch's own function, which is also what
torch.compile compiles and, in float64, the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinop.export.body_in_torch import evaluate_body
from twinop.record.op_spec import OpSpec


@dataclass(frozen=True)
class Entry:
    """What is measured of one op."""

    op: str  # its name in the registry
    inputs: str  # the names of those to pass
    eager: Callable[..., Any]  # torch's own function of these inputs
    ort: str = ""  # the nodes of a stock export in ONNX's text format, with semicolons between
    attributes: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = False  # measure the gradient too
    positive: tuple[str, ...] = ()  # the inputs that must be
    library: Path | None = None  # the file of an op that is not twinop's

    @property
    def input_names(self) -> list[str]:
        return self.inputs.split()


def _swiglu_packed(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _layer_norm(total := x + residual, weight, bias), total


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _rms_norm(total := x + residual, weight), total


_TANH = {"approximate": "tanh"}
_GELU_TANH = 'y = Gelu<approximate = "tanh">(x)'
_SWIGLU = "s = Sigmoid(gate); t = Mul(gate, s); y = Mul(t, x)"
_PACKED = "gate, value = Split<axis = -1, num_outputs = 2>(x); " + _SWIGLU.replace("(t, x)", "(t, value)")
_LAYER_NORM = "y = LayerNormalization<axis = -1, epsilon = 1e-5>(x, weight, bias)"
_RMS_NORM = "y = RMSNormalization<axis = -1, epsilon = 1e-6>(x, weight)"
_SOFTMAX = "y = Softmax<axis = -1>(x)"
_SKIP = "y, , , sum = com.microsoft.Skip{}LayerNormalization<epsilon = {}>(x, residual, weight"

ENTRIES: dict[str, Entry] = {
    "relu": Entry("relu", "x", torch.relu, "y = Relu(x)"),
    "gelu": Entry("gelu", "x", F.gelu, "y = Gelu(x)", backward=True),
    "gelu_tanh": Entry("gelu", "x", partial(F.gelu, approximate="tanh"), _GELU_TANH, _TANH, backward=True),
    "silu": Entry("silu", "x", F.silu, "s = Sigmoid(x); y = Mul(x, s)"),
    "sigmoid": Entry("sigmoid", "x", torch.sigmoid, "y = Sigmoid(x)"),
    "tanh": Entry("tanh", "x", torch.tanh, "y = Tanh(x)"),
    "softplus": Entry("softplus", "x", F.softplus, "y = Softplus(x)"),
    "exp": Entry("exp", "x", torch.exp, "y = Exp(x)"),
    "log": Entry("log", "x", torch.log, "y = Log(x)", positive=("x",)),
    "square": Entry("square", "x", torch.square, "y = Mul(x, x)"),
    "add": Entry("add", "a b", torch.add, "y = Add(a, b)"),
    "mul": Entry("mul", "a b", torch.mul, "y = Mul(a, b)"),
    "pow": Entry("pow", "a b", torch.pow, "y = Pow(a, b)", positive=("a",)),
    "swiglu": Entry("swiglu", "x gate", lambda x, gate: F.silu(gate) * x, _SWIGLU, backward=True),
    "swiglu_packed": Entry("swiglu_packed", "x", _swiglu_packed, _PACKED, backward=True),
    "softmax": Entry("softmax", "x", partial(torch.softmax, dim=-1), _SOFTMAX, backward=True),
    "layer_norm": Entry("layer_norm", "x weight bias", _layer_norm, _LAYER_NORM, backward=True),
    "rms_norm": Entry("rms_norm", "x weight", _rms_norm, _RMS_NORM, backward=True),
    "add_layer_norm": Entry(
        "add_layer_norm", "x residual weight bias", _add_layer_norm, _SKIP.format("", "1e-5") + ", bias)"
    ),
    "add_rms_norm": Entry(
        "add_rms_norm", "x residual weight", _add_rms_norm, _SKIP.format("Simplified", "1e-6") + ")"
    ),
}
"""By name in the report. gelu has two entries, one for each formula."""


def entry_of(
    record: OpSpec, library: Path | None = None, attributes: Mapping[str, Any] | None = None, names: str = ""
) -> Entry:
    """Returns an entry with the function body for torch's own function; `names`: inputs, by default all."""
    names = names or " ".join(entry.name for entry in record.inputs)
    given = dict(attributes or {})

    def eager(*inputs: Tensor) -> Any:
        by_name = dict(zip(names.split(), inputs, strict=True))
        results = evaluate_body(record, [by_name.get(entry.name) for entry in record.inputs], given)
        return results if len(results) > 1 else results[0]

    has_gradient = bool(record.gradients)
    return Entry(record.key, names, eager, attributes=given, backward=has_gradient, library=library)
