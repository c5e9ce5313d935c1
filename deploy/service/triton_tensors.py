"""Inputs and outputs in Triton's config.pbtxt."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..tensor_specs import Spec
from .datatypes import datatype_of
from .protocol import model_config_pb2
from .settings import SettingsError


def describe(tensor: Any, spec: Spec, batched: bool) -> Any:
    """Fill in a ModelInput or ModelOutput, and return it.

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
    return tensor


def is_vector(tensor: Any, batched: bool) -> bool:
    """Return whether a reshape denotes a batched vector, whose dims would otherwise be empty."""
    return batched and list(tensor.dims) == [1] and not tensor.reshape.shape


def shape_of(tensor: Any, batched: bool) -> tuple[int, ...]:
    """Return the model's dims with one row, if batched."""
    dims: Sequence[int] = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    return (1, *dims) if batched else tuple(dims)


def differences(kind: str, declared: Any, specs: Mapping[str, Spec], batched: bool) -> Iterator[str]:
    """Yield how a ModelInput or ModelOutput in the file differs from the model's."""
    spec = specs.get(declared.name)
    if spec is None:
        yield f"{kind} {declared.name!r}: the model has {', '.join(specs)}"
        return
    expected = describe(type(declared)(), spec, batched)
    if declared.data_type not in (0, expected.data_type):  # 0: not given in the file
        given, known = map(model_config_pb2.DataType.Name, (declared.data_type, expected.data_type))
        yield f"data_type of {kind} {spec.name}: {given}, the model has {known}"
    fits = len(declared.dims) == len(expected.dims) and all(
        size in (-1, given) for size, given in zip(expected.dims, declared.dims, strict=True)
    )
    if spec.shape is not None and not fits:
        yield (
            f"dims of {kind} {spec.name}: {list(declared.dims)}, the model has {list(expected.dims)}"
            + (" without the batch axis" if batched else "")
        )
