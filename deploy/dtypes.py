"""Element types: ONNX's numbers, and the names that numpy, torch and the op records share."""

import ml_dtypes
import numpy as np
from onnx import TensorProto

_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.STRING: "str",
    TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
    TensorProto.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    TensorProto.FLOAT8E5M2: "float8_e5m2",
    TensorProto.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
}
_PLAIN = {
    "float16", "bfloat16", "bool", "complex64", "complex128",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip


def dtype_name(element: int) -> str:
    """ "float32" for TensorProto.FLOAT; what torch and numpy call it, where they have it."""
    return _NAMES.get(element) or TensorProto.DataType.Name(element).lower()


def element_type(ort_type: str) -> int | None:
    """TensorProto.FLOAT for "tensor(float)"; None for what is no tensor of whole bytes (sequences, int4)."""
    inner = ort_type.removeprefix("tensor(").removesuffix(")").upper()
    if not ort_type.startswith("tensor(") or inner not in TensorProto.DataType.keys():  # noqa: SIM118
        return None
    element = TensorProto.DataType.Value(inner)
    return element if element in _NAMES or dtype_name(element) in _PLAIN else None


def numpy_dtype(element: int) -> np.dtype:
    """The numpy dtype; bfloat16 and the 8-bit floats are those of ml_dtypes, strings are objects."""
    name = dtype_name(element)
    if name == "str":
        return np.dtype(object)
    return np.dtype(getattr(ml_dtypes, name, name))


def is_foreign_to_numpy(element: int) -> bool:
    """ONNX Runtime's own numpy conversion does not know these types."""
    return hasattr(ml_dtypes, dtype_name(element))
