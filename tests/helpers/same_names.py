"""Compares the values of an optimised model that have names of the original: they have the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from twinop.deploy.ort_runs import NotRunnable, run
from twinop.errors import TwinopError
from twinop.optimize import decoders, inputs
from twinop.optimize.cached_attention import SHARED_CACHES
from twinop.optimize.equivalence import relative_error
from twinop.optimize.load import load


def errors_by_name(original: Path, result: Path) -> dict[str, float]:
    """Returns the relative error of each value that both files compute, by name."""
    models = [load(path) for path in (original, result)]
    common = [name for name in _computed(models[0]) if name in set(_computed(models[1]))]
    found = list[list[Any]]()
    for model, path in zip(models, (original, result), strict=True):
        ir.external_data.load_to_model(model)
        if path is original:
            case = accepted_case(model, models[1])
        values = {str(value.name): value for node in model.graph for value in node.outputs}
        model.graph.outputs[:] = [values[name] for name in common]
        given = {
            str(value.name): case[str(value.name)].astype(value.dtype.numpy())
            for value in model.graph.inputs
            if value.dtype is not None and str(value.name) in case
        }
        proto = ir.to_proto(model).SerializeToString()
        found.append(run(proto, None, [given], optimize=False).outputs[0])
    pairs = zip(common, *found, strict=True)
    return {name: _error(*map(np.asarray, pair)) for name, *pair in pairs}


def _computed(model: ir.Model) -> list[str]:
    return [str(value.name) for node in model.graph for value in node.outputs if value.name]


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


def _error(expected: np.ndarray, found: np.ndarray) -> float:
    if expected.dtype.kind == "V" or found.dtype.kind == "V" or expected.dtype != found.dtype:
        expected, found = (each.astype(np.float32) for each in (expected, found))
    return relative_error(expected, found)
