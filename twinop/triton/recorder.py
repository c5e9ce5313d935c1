"""Records what a launcher does: the tensors that it allocates and fills, and the kernels that it launches."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..aot_kernels.expression import Expression, as_expression
from ..aot_kernels.plan import Fill, Pointer, Scalar
from ..errors import BuildError
from ..libraries.kernel_op import place_of
from ..record.dtypes import torch_name
from ..record.op_spec import OpSpec
from .symbols import SYMBOLIC, Symbols, Varying

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_FILLED = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "full": None, "full_like": None, "new_full": None, "fill_": None,
}  # fmt: skip
"""Operators that set all elements to a value; None: to their second argument, or the third of `new_full`."""

Named = Mapping[str, Any]
_LOCAL = "storage"
"""The base of a pointer to a tensor of which it is not known yet whether it is an output."""


@dataclass(frozen=True)
class TracedLaunch:
    """One launch of a kernel."""

    kernel: Any  # the `triton.runtime.JITFunction`
    label: str  # the kernel and the line of its definition, "mish_kernel, mish.py:7"
    line: str  # where the launcher launches it, "mish.py:14"
    grid: tuple[Expression, Expression, Expression]  # in programs (blocks)
    arguments: tuple[Pointer | Scalar, ...]  # in the order of the kernel's parameters, without constants
    constants: Mapping[str, Any] = field(default_factory=dict)  # that are `tl.constexpr`, or None, by name
    options: Mapping[str, Any] = field(default_factory=dict)  # the compiler's, such as num_warps


@dataclass(frozen=True)
class Output:
    """A tensor that a launcher returned."""

    dtype: str
    shape: tuple[Expression, ...]


class Recorder(TorchDispatchMode):
    """Records one run of a launcher: `symbols` are its sizes and attributes, `steps` what it did."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self.symbols, self.steps = symbols, list[TracedLaunch | Fill]()
        self.error, self.expression = symbols.error, symbols.expression
        self._storages: dict[int, Pointer] = {}
        self._sizes: list[Expression] = []
        self._kept: list[torch.Tensor] = []  # an address must not be that of two tensors
        self._written: list[torch.Tensor] = []
        self.notes: list[str] = []

    def add_input(self, place: Pointer, tensor: torch.Tensor) -> None:
        """Makes a tensor known as an input; one that the op writes has the place of an output."""
        self._storages[_address(tensor)] = place
        self._kept.append(tensor)
        if place.base == "output":
            self._written.append(tensor)

    def constant(self, name: str, value: Any) -> Any:
        """Returns a value that must be known when the kernel is compiled; raises BuildError if it varies."""
        if isinstance(value, torch.SymBool):
            return bool(value)
        if isinstance(value, torch.Tensor):
            raise self.error(f"the constant {name} is a tensor; expected a number, a text or None")
        try:
            return self.symbols.fix(value.node.expr) if isinstance(value, SYMBOLIC) else value
        except Varying:
            raise self.error(
                f"{name} varies with sizes or attributes without a range, and a kernel is compiled for each "
                "of its values. Choose it by comparisons, or with triton.next_power_of_2"
            ) from None

    def launch(
        self, kernel: Any, label: str, grid: Sequence[Any], arguments: Named, constants: Named, options: Named
    ) -> None:
        """Records a launch of a `triton.JITFunction`.

        The label is for messages, "mish_kernel, mish.py:7". The grid is of one to three numbers. Arguments
        are tensors and numbers by the names of the kernel's parameters, in their order; the kernel is
        compiled for each value of the `constants`, which `constant` gave, and of the compiler's options.
        BuildError: a library cannot give such an argument, or an option varies.
        """
        fixed = dict(constants)
        known = {name: self.constant(name, value) for name, value in options.items()}
        traced = []
        for name, value in arguments.items():
            if value is None:
                fixed[name] = None
            else:
                traced.append(self._argument(label, name, value))
        blocks = self._grid(label, grid)
        self.steps.append(
            TracedLaunch(kernel, label, self.symbols.line(), blocks, tuple(traced), fixed, known)
        )

    def finish(
        self, returned: Any, record: OpSpec
    ) -> tuple[tuple[Output, ...], tuple[Expression, ...], tuple[Any, ...]]:
        """Returns outputs, with the written inputs at the end, the bytes of temporary tensors, and the steps.

        `returned` is what the launcher returned: the outputs and, where sizes come from the data, a tensor of
        these. BuildError: these are not as many new tensors as the record has.
        """
        count, counted = len(record.outputs) - len(record.written), len(record.sizes)
        returned = returned if returned is not None or count else ()
        returned = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        at = f"{place_of(self.symbols.launcher)}: {self.symbols.launcher.__name__}"
        text = record.texts.get("sizes")
        said = f" and, behind them, an int64 tensor of {counted} for: {text}" * bool(counted)
        if len(returned) != count + bool(counted) or not all(
            isinstance(tensor, torch.Tensor) for tensor in returned
        ):
            kinds = ", ".join(type(value).__name__.replace("FakeTensor", "tensor") for value in returned)
            raise BuildError(
                f"{at} returns {kinds}; its schema has {count} output{'s' * (count != 1)}" + said
            )
        if counted and (returned[-1].dtype != torch.int64 or returned[-1].numel() != counted):
            raise BuildError(f"{at} returns {torch_name(returned[-1].dtype)} in its last tensor" + said)
        places: dict[int, Pointer] = {}
        for index, tensor in enumerate(returned):
            storage = self._storages.get(_address(tensor))
            if storage is None or storage.base != _LOCAL:
                raise BuildError(
                    f"{at} returns an input, or a view of one, as output {index}; expected a new tensor, as "
                    "torch.empty_like makes it"
                )
            size = self.expression(tensor.numel() * tensor.element_size())
            if storage.index in places or size != self._sizes[storage.index] or not tensor.is_contiguous():
                raise BuildError(
                    f"{at} returns a view as output {index}; expected a contiguous tensor of its own memory"
                )
            places[storage.index] = Pointer("output", index) if index < count else Pointer("counts", 0)
        sizes: list[Expression] = []  # of temporary tensors

        def placed(value: Any) -> Any:
            if not isinstance(value, Pointer) or value.base != _LOCAL:
                return value
            if value.index not in places:
                places[value.index] = Pointer("temporary", len(sizes))
                sizes.append(self._sizes[value.index])
            return replace(value, base=places[value.index].base, index=places[value.index].index)

        steps = tuple(
            replace(step, pointer=placed(step.pointer))
            if isinstance(step, Fill)
            else replace(step, arguments=tuple(map(placed, step.arguments)))
            for step in self.steps
        )
        tensors = (*returned[:count], *self._written)
        outputs = tuple(Output(torch_name(t.dtype), tuple(map(self.expression, t.shape))) for t in tensors)
        return outputs, tuple(sizes), steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not (name in _EMPTY or name in _FILLED or func.is_view or str(func) == "prim.device.default"):
            if name == "_local_scalar_dense":
                raise self.error("this reads an element of a tensor, but the plan may depend on sizes only")
            raise self.refusal(name)
        was = self.symbols.in_torch
        self.symbols.in_squeeze = name == "squeeze"
        self.symbols.in_torch = not self.symbols.in_squeeze
        try:
            if func is torch.ops.aten.slice.Tensor:
                func = _slice
            if func is torch.ops.aten.select.int and isinstance(args[2], torch.SymInt):
                self.symbols.in_torch, func = was, _select
            result = func(*args, **kwargs)
        except RuntimeError:
            if name != "expand":
                raise
            self.symbols.in_torch, self.symbols.in_squeeze = False, True  # a size may be 1
            result = func(*args, **kwargs)
        finally:
            self.symbols.in_torch, self.symbols.in_squeeze = was, False
        if isinstance(result, torch.Tensor) and _address(result) not in self._storages:
            self._allocate(result)
        if name in _FILLED:
            self._fill(result, kwargs.get("fill_value", args[-1]) if _FILLED[name] is None else _FILLED[name])
        return result

    def refusal(self, name: str) -> BuildError:
        """Returns the error of a function of torch that a library cannot call."""
        return self.error(
            f"the launcher computes with torch.{name}, but it may only allocate tensors, fill them with a "
            "byte, view them and launch kernels. Compute it in a kernel"
        )

    def _allocate(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            raise self.error(f"a tensor on the device {tensor.device}; expected the device of the inputs")
        self._storages[_address(tensor)] = Pointer(_LOCAL, len(self._sizes))
        self._sizes.append(self.expression(tensor.untyped_storage().nbytes()))
        self._kept.append(tensor)

    def _fill(self, tensor: torch.Tensor, value: Any) -> None:
        pointer = self._pointer(tensor, "the tensor")
        if isinstance(value, (*SYMBOLIC, torch.Tensor)) or len(set(_bytes(value, tensor.dtype))) != 1:
            raise self.error(
                f"the library fills tensors with a byte, and {value} in {torch_name(tensor.dtype)} has "
                "several. Fill the tensor in a kernel"
            )
        if pointer.base == "input":
            raise self.error("the launcher writes to an input. Its schema says which it writes: Tensor(a!) x")
        if not tensor.is_contiguous():
            raise self.error("only contiguous tensors can be filled. Fill this one in a kernel")
        size = self.expression(tensor.numel() * tensor.element_size())
        self.steps.append(Fill(pointer, size, _bytes(value, tensor.dtype)[0]))

    def _pointer(self, tensor: torch.Tensor, what: str) -> Pointer:
        storage = self._storages.get(_address(tensor))
        if storage is None:
            raise self.error(f"{what} is neither an input nor allocated by the launcher")
        return replace(storage, offset=self.expression(tensor.storage_offset() * tensor.element_size()))

    def _argument(self, label: str, name: str, value: Any) -> Pointer | Scalar:
        if isinstance(value, torch.Tensor):
            pointer = self._pointer(value, f"{name} of {label}")
            return replace(pointer, name=name, dtype=torch_name(value.dtype))
        if isinstance(value, (bool, torch.SymBool)):
            return Scalar(as_expression(int(bool(value))), "i1", name)
        if isinstance(value, (int, torch.SymInt)):
            return Scalar(self.expression(value), "int", name)
        if isinstance(value, (float, torch.SymFloat)):
            return Scalar(self.expression(value), "fp32", name)
        kind = type(value).__name__
        advice = ": make the descriptor in the kernel, with tl.make_tensor_descriptor" * (
            kind == "TensorDescriptor"
        )
        raise self.error(
            f"{label}: {name} is a {kind}; a library can give a kernel tensors and numbers{advice}"
        )

    def _grid(self, label: str, values: Sequence[Any]) -> tuple[Expression, Expression, Expression]:
        if isinstance(values, (int, torch.SymInt)):
            values = (values,)
        if not 1 <= len(values) <= 3 or not all(isinstance(v, (int, torch.SymInt)) for v in values):
            kinds = ", ".join(type(value).__name__ for value in values)
            raise self.error(f"{label}: its grid is ({kinds}); expected one to three ints")
        x, y, z = map(self.expression, (*values, 1, 1)[:3])
        return x, y, z


def _select(tensor: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """Does what `aten.select` does, which gives a symbolic index an offset without a formula."""
    size, sizes, strides = tensor.shape[dim], list(tensor.shape), list(tensor.stride())
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    offset = tensor.storage_offset() + (index + size if index < 0 else index) * strides.pop(dim)
    sizes.pop(dim)
    return tensor.as_strided(sizes, strides, offset)


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _bytes(value: Any, dtype: torch.dtype) -> bytes:
    name = torch_name(dtype)
    return np.array(value, getattr(ml_dtypes, name, name)).tobytes()


def _slice(
    tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    """Does what `aten.slice` does. Before torch 2.13, that gives symbolic bounds a size without a formula."""
    size = tensor.shape[dim]
    if step < 1:
        raise ValueError("slice step must be positive")

    def within(index: Any) -> Any:
        return torch.sym_min(torch.sym_max(index + size if index < 0 else index, 0), size)

    first = 0 if start is None else within(start)
    last = size if end is None or end == sys.maxsize else within(end)
    sizes, strides = list(tensor.shape), list(tensor.stride())
    sizes[dim] = (torch.sym_max(last - first, 0) + step - 1) // step
    offset = tensor.storage_offset() + first * strides[dim]
    strides[dim] *= step
    return tensor.as_strided(sizes, strides, offset)
