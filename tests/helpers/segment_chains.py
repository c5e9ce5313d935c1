"""Runs segments one after the other, as a model that is too large to run whole does."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from twinop.deploy.ort_runs import NotRunnable, run
from twinop.errors import TwinopError
from twinop.optimize import decoders, inputs
from twinop.optimize.cached_attention import SHARED_CACHES
from twinop.optimize.segments import Part, Segment, extract

Values = dict[str, np.ndarray]


def run_part(model: ir.Model, part: Part, given: Values) -> Values:
    """Runs a part of a model on values by name, and returns its outputs."""
    taken = extract(model, part)
    case = {}
    for value in taken.graph.inputs:
        array = given[str(value.name)]
        case[str(value.name)] = array if value.dtype is None else array.astype(value.dtype.numpy())
    proto = ir.to_proto(taken).SerializeToString()
    found = run(proto, None, [case], optimize=False).outputs[0]
    return dict(zip(part.outputs, found, strict=True))


def run_chain(model: ir.Model, parts: Sequence[Part], case: Values) -> Values:
    """Runs parts of a model in order; returns all that they return."""
    found = dict(case)
    for part in parts:
        found |= run_part(model, part, found)
    return found


def run_beside(result: ir.Model, segments: Sequence[Segment], original: Values) -> Values:
    """Runs each part of the result on what the original's parts have returned so far."""
    found = Values()
    for segment in segments:
        found |= run_part(result, segment.result, original)
    return found


def accepted_case(model: ir.Model, result: ir.Model) -> inputs.Case:
    """Returns inputs that a model with its weights in memory accepts, and its optimised form, too."""
    kinds = {node.op_type for node in result.graph}
    model.graph.meta[SHARED_CACHES] = "CustomAttentionCached" in kinds
    decoders.set_sizes(model)
    steps, may_hide = decoders.runs(model)
    for each in [*steps, *inputs.SIZES]:
        case = inputs.generate(model, each, hide="right" if may_hide else "nothing")
        try:
            run(ir.to_proto(model).SerializeToString(), None, [case])
        except (NotRunnable, TwinopError) as error:
            reason = error
            continue
        return case
    raise AssertionError(f"no inputs fit the model: {reason}")
