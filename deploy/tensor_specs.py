"""Describes the inputs and outputs of a session, and words the errors for values that do not fit."""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from twinop.record.dtypes import dtype_name, element_type, is_foreign_to_numpy, numpy_dtype

from .errors import FeedError, RunError

RIGHT_PADDED = "twinop.right_padded"
"""The metadata that names the mask of a model made with `twinop optimize --padding right`."""
WITHOUT_MAPS = (
    "Converters of classifiers add maps with ZipMap: convert the model again with zipmap=False (skl2onnx: "
    "options={'zipmap': False}), and it returns a tensor"
)
"""How a model without maps is made."""


@dataclass(frozen=True)
class Spec:
    """One input or output of a model."""

    name: str
    type: str  # ONNX Runtime's name of it, such as "tensor(float)"
    element: int | None  # ONNX's number of the element type; None: it is no tensor (a sequence, a map)
    shape: tuple[int | str | None, ...] | None  # sizes, names of dynamic ones, None; None for an unknown rank
    fixed: tuple[tuple[int, int], ...] = ()  # axis and size of the dimensions that are not dynamic
    numpy_dtype: np.dtype | None = None
    # How element types are called in messages, by numpy's names, where they have other names.
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    right_padded: bool = False  # a mask [B, T] whose rows must be ones, then zeros (`RIGHT_PADDED`)

    @classmethod
    def of_value(cls, value: onnx.ValueInfoProto) -> "Spec":
        """Makes the spec of a value in a model's graph, where no session can be opened."""
        kind = value.type.WhichOneof("value") or "of no type"
        if kind != "tensor_type":
            return cls(value.name, kind, None, None)
        tensor = value.type.tensor_type
        shape = None
        if tensor.HasField("shape"):
            shape = [getattr(each, each.WhichOneof("value") or "", None) for each in tensor.shape.dim]
        name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        return cls.of(value.name, f"tensor({name})", shape)

    @classmethod
    def of(cls, name: str, type: str, shape: Sequence[int | str | None] | None) -> "Spec":
        element = element_type(type)
        fixed = tuple((axis, size) for axis, size in enumerate(shape or ()) if isinstance(size, int))
        dtype = numpy_dtype(element) if element is not None else None
        return cls(name, type, element, tuple(shape) if shape is not None else None, fixed, dtype)

    @property
    def dtype(self) -> str:
        """numpy's and torch's name of the element type; ONNX Runtime's name where there is none."""
        return dtype_name(self.element) if self.element is not None else self.type

    @property
    def type_name(self) -> str:
        """The element type in messages."""
        return self.names.get(self.dtype, self.dtype)

    def sources(self, inputs: Iterable["Spec"]) -> tuple[int | tuple[str, int], ...] | None:
        """Returns where each size is known from, itself or an (input, axis); None: one is not known."""
        if self.shape is None or self.element is None:
            return None
        places = {
            size: (each.name, axis)
            for each in inputs
            for axis, size in enumerate(each.shape or ())
            if isinstance(size, str)
        }
        found = [size if isinstance(size, int) else places.get(size or "") for size in self.shape]
        return None if None in found else tuple(source for source in found if source is not None)

    def accepts(self, shape: Sequence[int]) -> bool:
        """Returns whether a tensor of this shape fits."""
        if self.shape is None:
            return True
        if len(shape) != len(self.shape):
            return False
        for axis, size in self.fixed:  # noqa: SIM110  (a generator would double the time)
            if shape[axis] != size:
                return False
        return True

    def sized(self, sizes: Mapping[str, int], default: int) -> tuple[int, ...] | None:
        """Returns the shape with `sizes` for dynamic dimensions by name; None for an unknown rank."""
        if self.shape is None:
            return None
        return tuple(size if isinstance(size, int) else sizes.get(size or "", default) for size in self.shape)

    def random(self, shape: Sequence[int], generator: np.random.Generator) -> np.ndarray:
        """Returns normally distributed floats, integers 0 and 1, which are valid indices, or strings."""
        assert self.numpy_dtype is not None
        if self.right_padded:
            return np.ones(shape, self.numpy_dtype)
        if self.numpy_dtype.kind == "O":
            return np.full(shape, "a", object)
        if self.numpy_dtype.kind in "biu":
            return generator.integers(0, 2, shape).astype(self.numpy_dtype)
        return generator.standard_normal(shape).astype(self.numpy_dtype)

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.type_name} of any shape"
        return f"{self.type_name}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"

    def mismatch(self, type_name: str, shape: Sequence[int]) -> FeedError:
        """Returns the error for a tensor of another type (with numpy's name) or shape."""
        type_name = self.names.get(type_name, type_name)
        given = f"{type_name}[{', '.join(map(str, shape))}]"
        if type_name != self.type_name:
            what = f"convert it to {self.type_name}"
        elif self.shape is not None and len(shape) != len(self.shape):
            what = f"it must have {len(self.shape)} dimensions, not {len(shape)}"
        else:
            what = "; ".join(
                f"dimension {axis} must be {size}, not {shape[axis]}"
                for axis, size in self.fixed
                if shape[axis] != size
            )
        return FeedError(f"input {self.name} is {given}, the model takes {self}: {what}")

    def require_right_padded(self, mask: np.ndarray) -> None:
        """Raises FeedError for a mask whose rows are not ones, then zeros."""
        shown = mask == 1
        wrong = ~shown[:, :1].all(1) | (~shown & (mask != 0)).any(1) | (shown[:, 1:] > shown[:, :-1]).any(1)
        if wrong.any():
            raise FeedError(
                f"input {self.name}, row {int(wrong.argmax())}: expected ones, then zeros. The model was "
                "made with `twinop optimize --padding right`, so its attention reads only the lengths. "
                "Pad sequences at their end, or optimise the model again without --padding right"
            )


def named_sizes(inputs: Mapping[str, Spec], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the sizes that the shapes of some inputs give to dynamic dimensions, by name."""
    return {
        size: given
        for name, shape in shapes.items()
        for size, given in zip(inputs[name].shape or (), shape, strict=False)
        if isinstance(size, str)
    }


def unknown_name(kind: str, name: Any, known: Mapping[str, Any]) -> FeedError:
    """Returns the error for a name that is not among the model's inputs or outputs (`kind`)."""
    return FeedError(f"the model has no {kind} {name!r}; its {kind}s: {', '.join(known)}")


def kind_of(value: Any) -> str:
    """Returns what a value is, for messages: "a torch tensor", "an OrtValue", or the name of its type."""
    module, name = type(value).__module__.split(".")[0], type(value).__qualname__
    if isinstance(value, np.ndarray):
        return "a numpy array"
    known = {"torch": "a torch tensor", "onnxruntime": "an OrtValue"}
    return known.get(module, f"a {name}")


# ------------------------------------------------------------------ calls below ONNX Runtime's classes

# ONNX Runtime refuses null pointers, which empty tensors have. Nothing is read or written here.
_nothing = (ctypes.c_char * 16)()
NOWHERE = ctypes.addressof(_nothing)


def guarded(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ONNX Runtime and turns its errors into a RunError that has only the message."""
    try:
        return call(*arguments)
    except Exception as error:
        text = str(error)
        _, found, status = text.partition("Status Message: ")
        raise RunError(status if found else text, type(error).__name__) from error


def to_ort_value(array: np.ndarray, element: int) -> Any:
    """Returns an OrtValue on the memory of a contiguous array, also in dtypes that numpy lacks."""
    from onnxruntime import OrtValue  # late, because torch must be imported first where CUDA is used

    if not is_foreign_to_numpy(element):
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), element)


def to_numpy(value: Any, spec: Spec) -> np.ndarray:
    """Copies a bound output to a numpy array, also in dtypes that ONNX Runtime does not convert."""
    if spec.element is None or not is_foreign_to_numpy(spec.element) or spec.numpy_dtype is None:
        return value.numpy()
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * spec.numpy_dtype.itemsize
    memory = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bytearray(memory), spec.numpy_dtype).reshape(shape)
