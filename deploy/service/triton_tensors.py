"""Inputs and outputs in Triton's config.pbtxt."""

from typing import Any

from ..tensor_specs import Spec
from .datatypes import datatype_of
from .protocol import model_config_pb2
from .settings import SettingsError


def describe(tensor: Any, spec: Spec, batched: bool) -> None:
    """Fill in a ModelInput or ModelOutput.

    `dims` must not be empty: scalars and batched vectors have [1]. The backend takes an output of unknown
    rank for a scalar, and answers with the shape that it gets.

    Raises:
        SettingsError: Triton has no such type, or the model is batched and has no rows.
    """
    datatype = datatype_of(spec.numpy_dtype)
    if datatype is None or (batched and not spec.shape):
        raise SettingsError(
            f"{spec.name} is {spec}: config.pbtxt needs a data type of the protocol, and rows if batched"
        )
    tensor.name = spec.name
    tensor.data_type = model_config_pb2.DataType.Value(
        f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"
    )
    sizes = [size if isinstance(size, int) else -1 for size in spec.shape or ()]
    tensor.dims.extend(sizes[batched:] or [1])
    if batched and len(sizes) == 1:
        tensor.reshape.SetInParent()
