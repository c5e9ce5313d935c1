# mypy: allow-untyped-defs
"""Evaluates function bodies with torch.

In float64 a body is the exact meaning of its op. The tests compare kernels and gradients with it, and the
benchmarks run it as torch's own version of an op. Results are differentiable.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional as F

from twinop.errors import ExportError
from twinop.model.attach import OPSETS
from twinop.model.bodies import find_body
from twinop.model.record_body import AttributeReference, BodySetting
from twinop.record.dtypes import ELEMENT_TYPES, FLOATS_8, dtype_name, torch_name
from twinop.record.op_schema import default_of, onnx_value
from twinop.record.op_spec import OpSpec


class AttributeValue(AttributeReference):
    """An attribute of one call."""

    def __init__(self, op: str, name: str, value: Any) -> None:
        super().__init__(op, name)
        self.value = value

    @property
    def values(self) -> set[Any]:
        return {self.value}


def evaluate_body(
    record: OpSpec,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any] | None = None,
    stored: torch.dtype | None = None,
    ops: "Callable[..., TorchOps] | None" = None,
) -> tuple[Any, ...]:
    """Computes the outputs of an op from its function body.

    Args:
        inputs: every input of the record in order; None where absent. Narrow inputs are computed in float32.
        attributes: the attributes that differ from their defaults.
        stored: the dtype to which `op.rounded` rounds; by default that of the first input, and the outputs
            are rounded to those that the record gives them.
        ops: makes the `op` of the body instead of TorchOps.

    ExportError: the op has no body, or the body uses an operator that TorchOps does not know.
    """
    body = find_body(record.key)
    if body is None:
        raise ExportError(
            f"op {record.key} has no function body; add `@body def {record.name}` to model/bodies.py"
        )
    body.check(record)
    first = inputs[0]
    assert first is not None
    floats = [each for each in inputs if each is not None and each.is_floating_point()]
    floating = [each.dtype if each.itemsize > 1 else torch.float32 for each in floats]
    compute = reduce(torch.promote_types, floating, torch.float32 if floating else first.dtype)
    given = {entry.name: default_of(entry) for entry in record.attributes} | dict(attributes or {})
    values = {entry.name: onnx_value(entry, given[entry.name]) for entry in record.attributes}
    named = {name: AttributeValue(record.name, name, value) for name, value in values.items()}
    op = (ops or TorchOps)(record, compute, stored or first.dtype)
    dtypes = tuple(torch_name((first if tensor is None else tensor).dtype) for tensor in inputs)
    ranks = tuple(None if tensor is None else tensor.dim() for tensor in inputs)
    op.setting = BodySetting(dtypes, torch_name(compute), OPSETS[0], {ranks})
    wide = [
        None if tensor is None else op.input(tensor.to(compute) if tensor.is_floating_point() else tensor)
        for tensor in inputs
    ]
    results = body.build(op, *wide, **named)
    results = results if isinstance(results, tuple) else (results,)
    if stored is not None:
        return results
    given = {e.name: torch_name(t.dtype) for e, t in zip(record.inputs, inputs, strict=True) if t is not None}
    other = first.dtype if first.is_floating_point() else compute
    wanted = record.combination_of(given) or dict.fromkeys(record.outputs, torch_name(other))
    return tuple(
        _cast(result, to=ELEMENT_TYPES[wanted[name]]) if result.is_floating_point() else result
        for name, result in zip(record.outputs, results, strict=True)
    )


class TorchOps:
    """`op` of a body: `op.Mul(x, y)` computes the product."""

    setting: BodySetting

    def __init__(self, record: OpSpec, compute: torch.dtype, stored: torch.dtype) -> None:
        self._record = record
        self._compute = compute
        self._stored = stored

    def input(self, tensor: Tensor) -> Any:
        """Returns what the body sees of an input."""
        return tensor

    def Constant(self, *, value: ir.TensorProtocol | None = None, _outputs: int = 1, **named: Any) -> Any:
        if value is None:  # value_int, value_floats ...
            (given,) = named.values()
            return given if isinstance(given, str) else torch.tensor(given)
        return torch.from_numpy(np.array(value.numpy()))

    def LayerNormalization(
        self, x: Any, scale: Any, bias: Any = None, *, axis: int = -1, epsilon: Any = 1e-5, **more: Any
    ) -> Any:
        rank = getattr(x, "value", x).ndim
        axes = torch.arange(axis % rank, rank)
        mean = self.ReduceMean(x, axes)
        centred = self.Sub(x, mean)
        variance = self.ReduceMean(self.Mul(centred, centred), axes)
        deviation = self.Reciprocal(self.Sqrt(self.Add(variance, epsilon)))
        y = self.Mul(self.Mul(centred, deviation), scale)
        y = y if bias is None else self.Add(y, bias)
        return (y, mean, deviation) if more.get("_outputs", 1) > 1 else y

    def rounded(self, value: Tensor, like: Tensor) -> Tensor:
        """Rounds to the dtype of the model's inputs, with the derivative of the unrounded value."""
        difference = value.to(self._stored).to(value.dtype) - value  # NaN of infinities
        return value + difference.nan_to_num(0, torch.inf, -torch.inf).detach()

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        function = OPERATORS.get(op_type)
        if function is None:  # operators of tensors alone have the names of torch's functions
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", op_type).lower()
            names = (f"logical_{name}", name, op_type.lower())  # And is logical_and, and MatMul is matmul
            places = ((module, each) for module in (torch, F) for each in names)
            function = next((getattr(*place) for place in places if hasattr(*place)), None)
        if function is None:
            raise ExportError(
                f"body {self._record.name}: twinop computes it with torch, and does not know what "
                f"{op_type} is there. Write it with other operators, or give the tests the op's meaning: "
                "reference(op) that returns a twinop.testing.references.Reference with `compute`"
            )

        def add(*inputs: Any, _outputs: int = 1, **attributes: Any) -> Any:
            named = {key: v.value if isinstance(v, AttributeValue) else v for key, v in attributes.items()}
            given = [self._tensor(v, inputs) for v in inputs]
            try:
                found = self._apply(op_type, partial(function, **named), given)
                several = found[:_outputs] if isinstance(found, tuple) else (found,)
                return several if _outputs > 1 else several[0]
            except (TypeError, NotImplementedError) as error:  # what torch's function does not take
                raise ExportError(
                    f"body {self._record.name}: {op_type}({len(inputs)} inputs, {named}) cannot be computed "
                    f"with torch: {str(error).splitlines()[0].rstrip('.')}. Write it with other operators"
                ) from error

        return add

    def _apply(self, op_type: str, function: Callable[..., Any], inputs: list[Any]) -> Any:
        return function(*inputs)

    def _tensor(self, value: Any, inputs: Sequence[Any]) -> Any:
        """Makes tensors of numbers, in the dtype of a tensor beside them."""
        if isinstance(value, AttributeValue):
            value = value.value
        if isinstance(value, (list, tuple)):
            return torch.tensor(value, dtype=torch.int64)
        if not isinstance(value, (bool, int, float)):
            return value
        given = (getattr(each, "value", each) for each in inputs)
        beside = next((each for each in given if isinstance(each, Tensor)), None)
        if beside is not None and (beside.is_floating_point() or isinstance(value, int)):
            return torch.tensor(value, dtype=beside.dtype)
        return torch.tensor(value, dtype=self._compute if isinstance(value, float) else torch.int64)


def _ints(tensor: Any) -> list[int]:
    return [int(value) for value in tensor.reshape(-1)] if tensor is not None else []


def _reduction(function):
    """Returns an operator Reduce*, from a function of (x, dims, keepdim)."""

    def reduction(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
        dims = _ints(axes) or ([] if noop_with_empty_axes else list(range(x.ndim)))
        return function(x, dims, bool(keepdims)) if dims else x

    return reduction


def _slice(x, starts, ends, axes=None, steps=None):
    for i, axis in enumerate(_ints(axes) or range(len(starts))):
        size, step = x.shape[axis], _ints(steps)[i] if steps is not None else 1
        indices = range(size)[slice(_ints(starts)[i], _ints(ends)[i], step)]
        x = x.index_select(axis, torch.tensor(indices, dtype=torch.int64, device=x.device))
    return x


def _pad(x, pads, value=None, axes=None, *, mode="constant"):
    sizes, pairs = _ints(pads), [(0, 0)] * x.ndim
    padded = _ints(axes) or list(range(x.ndim))
    for i, axis in enumerate(padded):
        pairs[axis] = sizes[i], sizes[i + len(padded)]
    flat = [size for pair in reversed(pairs) for size in pair]
    return F.pad(x, flat, mode, 0 if value is None else float(value))


def _reshape(x, shape, *, allowzero=0):
    sizes = enumerate(_ints(shape))
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in sizes])


def _unsqueeze(x, axes):
    rank = x.ndim + len(_ints(axes))
    for axis in sorted(axis % rank for axis in _ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _arg(function):
    """Returns ArgMax or ArgMin, from a function of (x, dim, keepdim) that gives the first index."""

    def arg(x, *, axis=0, keepdims=1, select_last_index=0):
        if not select_last_index:
            return function(x, axis, bool(keepdims))
        return x.shape[axis] - 1 - function(x.flip(axis), axis, bool(keepdims))

    return arg


def _cumsum(x, axis, *, exclusive=0, reverse=0):
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    sums = x.cumsum(axis) - x if exclusive else x.cumsum(axis)
    return sums.flip(axis) if reverse else sums


def _gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    product = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return product if c is None else product + beta * c


def _product(x, dims, keep):
    for axis in sorted((axis % x.ndim for axis in dims), reverse=True):
        x = x.prod(axis, keep)
    return x


def _cast(x, *, to, saturate=1):
    name = dtype_name(to)
    if name in FLOATS_8 and saturate:  # older versions of torch do not saturate
        largest = torch.finfo(getattr(torch, name)).max
        x = x.clamp(-largest, largest)
    return x.to(getattr(torch, name))


def _unique(x, *, axis=None, sorted=1):
    _, inverse, counts = torch.unique(x.detach(), return_inverse=True, return_counts=True, dim=axis)
    flat = inverse.reshape(-1)
    first = torch.full_like(counts, flat.numel()).scatter_reduce(0, flat, torch.arange(len(flat)), "amin")
    if not sorted:
        order = first.argsort()
        first, counts, flat = first[order], counts[order], order.argsort()[flat]
    return (x.reshape(-1) if axis is None else x).index_select(axis or 0, first), first, flat, counts


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(x, indices, updates, *, axis=0, reduction="none"):
    indices = indices % max(x.shape[axis], 1)
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _REDUCTIONS[reduction])


def _scatter_nd(x, indices, updates, *, reduction="none"):
    if reduction not in ("none", "add"):
        raise NotImplementedError(f"reduction {reduction}")
    return x.index_put(indices.unbind(-1), updates, accumulate=reduction == "add")


def _gather_nd(x, indices, *, batch_dims=0):
    if batch_dims == 0:
        return x[tuple(indices.movedim(-1, 0))]
    pairs = zip(x, indices, strict=True)
    return torch.stack([_gather_nd(*pair, batch_dims=batch_dims - 1) for pair in pairs])


OPERATORS: dict[str, Callable[..., Any]] = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "Compress": lambda x, chosen, *, axis=None: (x.reshape(-1) if axis is None else x).index_select(
        axis or 0, chosen.nonzero()[:, 0]
    ),
    "CumSum": _cumsum,
    "Einsum": lambda *tensors, equation: torch.einsum(equation, *tensors),
    "Flatten": lambda x, *, axis=1: x.reshape(math.prod(x.shape[:axis]), -1),
    "GatherElements": lambda x, indices, *, axis=0: x.gather(axis, indices % x.shape[axis]),
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "HardSigmoid": lambda x, *, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "Hardmax": lambda x, *, axis=-1: F.one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis).to(x.dtype),
    "IsInf": lambda x, *, detect_negative=1, detect_positive=1: (
        x.isinf() & (((x < 0) & bool(detect_negative)) | ((x > 0) & bool(detect_positive)))
    ),
    "Mean": lambda *tensors: reduce(torch.add, tensors) / len(tensors),
    "NonZero": lambda x: x.nonzero().mT,
    "OneHot": lambda x, depth, values, *, axis=-1: values[
        F.one_hot(x % int(depth), int(depth)).movedim(-1, axis)
    ],
    "Pow": lambda a, b: torch.pow(a, b).to(a.dtype),
    "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "Selu": lambda x, *, alpha=1.6732632423543772, gamma=1.0507009873554805: (
        gamma * torch.where(x > 0, x, alpha * x.clamp(max=0).expm1())
    ),
    "Shrink": lambda x, *, bias=0.0, lambd=0.5: torch.where(
        x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)
    ),
    "Swish": lambda x, *, alpha=1.0: x * (alpha * x).sigmoid(),
    "ThresholdedRelu": lambda x, *, alpha=1.0: torch.where(x > alpha, x, 0),
    "Tile": lambda x, repeats: x.tile(_ints(repeats)),
    "TopK": lambda x, k, *, axis=-1, largest=1, sorted=1: tuple(x.topk(int(k), axis, bool(largest))),
    "Cast": _cast,
    "CastLike": lambda x, like: x.to(like.dtype),
    "Clip": lambda x, low=None, high=None: x if low is high is None else x.clamp(low, high),
    "Concat": lambda *tensors, axis: torch.cat(tensors, axis),
    "Div": lambda a, b: torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc"),
    "Equal": lambda a, b: torch.tensor(a == b) if isinstance(a, str) else torch.eq(a, b),
    "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, _ints(shape))),
    "Gather": lambda x, indices, *, axis=0: (
        x.index_select(axis, indices.reshape(-1) % max(x.shape[axis], 1)).unflatten(axis, indices.shape)
        if indices.ndim
        else x.select(axis, int(indices))
    ),
    "GreaterOrEqual": torch.ge,
    "Identity": lambda x: x,
    "LeakyRelu": lambda x, *, alpha=0.01: F.leaky_relu(x, alpha),
    "LessOrEqual": torch.le,
    "LogSoftmax": lambda x, *, axis=-1: x.log_softmax(axis),
    "Max": lambda *tensors: reduce(torch.maximum, tensors),
    "Min": lambda *tensors: reduce(torch.minimum, tensors),
    "Mod": lambda a, b, *, fmod=0: (torch.fmod if fmod else torch.remainder)(a, b),
    "Pad": _pad,
    "Range": lambda start, *more: torch.arange(*(each.item() for each in (start, *more)), dtype=start.dtype),
    "ReduceL1": _reduction(lambda x, dims, keep: x.abs().sum(dims, keep)),
    "ReduceL2": _reduction(lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep)),
    "ReduceLogSumExp": _reduction(torch.logsumexp),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceMin": _reduction(torch.amin),
    "ReduceLogSum": _reduction(lambda x, dims, keep: x.sum(dims, keep).log()),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(torch.sum),
    "ReduceSumSquare": _reduction(lambda x, dims, keep: x.square().sum(dims, keep)),
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": lambda x, *, start=0, end=None: torch.tensor(x.shape[start:end], dtype=torch.int64),
    "Size": lambda x: torch.tensor(x.numel()),
    "Slice": _slice,
    "Softmax": lambda x, *, axis=-1: x.softmax(axis),
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "Split": lambda x, split=None, *, axis=0, num_outputs=None: (
        x.chunk(num_outputs, axis) if split is None else x.split(_ints(split), axis)
    ),
    "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(_ints(axes)),
    "Sum": lambda *tensors: reduce(torch.add, tensors),
    "Trilu": lambda x, k=0, *, upper=1: (torch.triu if upper else torch.tril)(x, int(k)),
    "Transpose": lambda x, *, perm=None: x.permute(perm or tuple(reversed(range(x.ndim)))),
    "Unique": _unique,
    "Unsqueeze": _unsqueeze,
}
"""Operators that torch's functions of the same name do not compute alone."""
