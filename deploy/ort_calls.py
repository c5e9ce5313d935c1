"""Calls of ONNX Runtime below its Python classes: their errors, null pointers, and types that numpy lacks."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from twinop.record.dtypes import is_foreign_to_numpy

from .errors import RunError
from .tensor_specs import Spec

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


def to_numpy(value: Any, spec: Spec) -> np.ndarray:
    """Copies a bound output to a numpy array, also in dtypes that ONNX Runtime does not convert."""
    if spec.element is None or not is_foreign_to_numpy(spec.element) or spec.numpy_dtype is None:
        return value.numpy()
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * spec.numpy_dtype.itemsize
    memory = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bytearray(memory), spec.numpy_dtype).reshape(shape)
