"""Element types: the names that records, numpy and torch share, and ONNX's numbers for them."""

from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

_TYPES = (
    "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float16", "bfloat16", "bool", "complex64", "complex128",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip

ELEMENT_TYPES: dict[str, int] = {
    "str": TensorProto.STRING,
    **{name: helper.np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, name, name))) for name in _TYPES},
}
"""ONNX's number of every element type of whole bytes, by name: "float32" is TensorProto.FLOAT."""

_NAMES = {element: name for name, element in ELEMENT_TYPES.items()}
_ONNX_NAMES = {number: name.lower() for name, number in TensorProto.DataType.items()}

FLOATING = ("float32", "float16", "bfloat16", "float64")
"""The floating-point types that the ops compute in."""

FLOATS_8 = ("float8_e4m3fn", "float8_e5m2")
"""Those that tensors have beside them: they are computed in float32, also in function bodies."""


def torch_name(dtype: Any) -> str:
    """Returns the name of a torch dtype: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def described(tensor: Any) -> str:
    """Returns the dtype and the shape of a torch tensor, for messages: "float32[2, 3]"."""
    return f"{torch_name(tensor.dtype)}{list(tensor.shape)}"


def dtype_name(element: int) -> str:
    """Returns numpy's and torch's name of an ONNX element type; for types that they lack, ONNX's own."""
    return _NAMES.get(element) or _ONNX_NAMES.get(element, f"type {element}")


def onnx_name(name: str) -> str:
    """Returns ONNX's name of a tensor type: "tensor(double)" for "float64"."""
    return f"tensor({TensorProto.DataType.Name(ELEMENT_TYPES[name]).lower()})"


def element_type(ort_type: str) -> int | None:
    """Returns ONNX's number for "tensor(float)"; None for sequences and elements of less than a byte."""
    return _ELEMENT_OF_ORT_TYPE.get(ort_type)


_ELEMENT_OF_ORT_TYPE = {onnx_name(name): element for name, element in ELEMENT_TYPES.items()}


def numpy_dtype(element: int) -> np.dtype:
    """Returns the numpy dtype. bfloat16 and 8-bit floats are those of ml_dtypes; strings are objects."""
    return helper.tensor_dtype_to_np_dtype(element)


def is_foreign_to_numpy(element: int) -> bool:
    """Returns whether numpy needs ml_dtypes for this type; ONNX Runtime does not convert such arrays."""
    return hasattr(ml_dtypes, dtype_name(element))


def to_array(tensor: Any) -> np.ndarray:
    """Returns a torch tensor as a contiguous numpy array, and a numpy array as it is.

    A numpy scalar, which arithmetic on an array of rank 0 gives, becomes such an array again.
    """
    if isinstance(tensor, np.ndarray | np.generic):
        return np.asarray(tensor)
    import torch

    tensor = tensor.detach().cpu().contiguous()
    name = torch_name(tensor.dtype)
    if not hasattr(ml_dtypes, name):
        return np.asarray(tensor.numpy(force=True))  # also of a view that negates or conjugates
    bits = torch.int16 if tensor.element_size() == 2 else torch.int8
    return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))


def to_tensor(array: np.ndarray) -> Any:
    """Returns a torch tensor in the memory of a numpy array."""
    import torch

    if not hasattr(ml_dtypes, array.dtype.name):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))
