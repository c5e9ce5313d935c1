"""Writes Triton's config.pbtxt.

The file always lists inputs and outputs. Otherwise Triton's ONNX Runtime backend completes it from the
model and, if all first dimensions are dynamic, joins requests up to 4 rows (default-max-batch-size). It does
so even with `max_batch_size: 0`, which protobuf does not distinguish from a missing field.
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from ..service.datatypes import datatype_of
from ..service.settings import SettingsError
from ..tensor_specs import Spec

_THREADS = "intra_op_thread_count"  # a parameter of Triton's ONNX Runtime backend


def write_config(config: Any) -> str:
    """Returns the text of a ModelConfig from `make_config`, as it stands in config.pbtxt."""
    return ("" if config.max_batch_size else "max_batch_size: 0\n") + text_format.MessageToString(config)


def make_config(
    name: str,
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    *,
    gpu: bool = False,
    max_batch_size: int = 0,
    threads: int = 0,
    libraries: Sequence[str] = (),
) -> Any:
    """Returns the ModelConfig with which Triton's ONNX Runtime backend serves a model as this service does.

    `libraries`: their absolute paths in Triton's container. SettingsError: Triton has no such model.
    """
    config = model_config_pb2.ModelConfig(name=name, backend="onnxruntime", max_batch_size=max_batch_size)
    config.default_model_filename = "model.onnx"
    batched = max_batch_size > 0
    for kind, specs, added in (("input", inputs, config.input.add), ("output", outputs, config.output.add)):
        if not specs:
            raise SettingsError(
                f"the model has no {kind}s, without which Triton completes config.pbtxt itself: "
                "export it with one that has no default"
            )
        for spec in specs:
            if spec.shape is None and kind == "input":
                raise SettingsError(
                    f"{spec.name} is {spec}, and config.pbtxt needs a known rank: export the model with "
                    "a shape for it, whose sizes may be dynamic"
                )
            _describe(added(), spec, batched)
    if batched:
        config.dynamic_batching.SetInParent()  # an empty message too makes Triton join requests
    config.instance_group.add(count=1, kind="KIND_GPU" if gpu else "KIND_CPU")
    if libraries:
        config.model_operations.op_library_filename.extend(libraries)
    if threads:
        config.parameters[_THREADS].string_value = str(threads)
    return config


def _describe(tensor: Any, spec: Spec, batched: bool) -> None:
    """Fills in a ModelInput or ModelOutput; SettingsError: Triton has no such type, or there are no rows.

    `dims` must not be empty: scalars and batched vectors have [1]. The backend takes an output of unknown
    rank for a scalar, and answers with the shape that it gets.
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
