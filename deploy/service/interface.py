"""What a model's inputs and outputs must be so that it can be served."""

from collections.abc import Iterable

from ..errors import ModelError
from ..tensor_specs import WITHOUT_MAPS, Spec
from .datatypes import DATATYPES, datatype_of


def require_servable(model: str, inputs: Iterable[Spec], outputs: Iterable[Spec], batched: bool) -> None:
    """Raise ModelError if the protocol lacks a type, or a batched model has an input without rows."""
    for kind, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if datatype_of(spec.numpy_dtype) is None:
                cure = "Put a Cast or an operator that makes one tensor of it into the model"
                raise ModelError(
                    f"{model}: {kind} {spec.name} is {spec.type}, which the Open Inference Protocol cannot "
                    f"carry: it has tensors of {', '.join(DATATYPES)}. "
                    f"{WITHOUT_MAPS if 'map(' in spec.type else cure}"
                )
            if batched and not has_rows(spec):
                raise ModelError(
                    f"{model}: {kind} {spec.name} is {spec}, and max_batch_size needs a dynamic first "
                    "dimension: set it to 0, or export the model with a dynamic batch (--dynamic)"
                )


def has_rows(spec: Spec) -> bool:
    """Return whether the first dimension may have any size."""
    return spec.shape is None or (len(spec.shape) > 0 and not isinstance(spec.shape[0], int))
