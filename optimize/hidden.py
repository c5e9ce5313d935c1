"""Finds the positions of outputs that padding masks hide: what stands there means nothing, and may vary.

It is not compared if a mask is known to hide padding, and an output certainly has its axes: by their names,
or as the only ones that had its sizes in runs of several sizes. A sequence that is hidden as a whole counts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from . import graph as g
from .inputs import hidden_by

Place = tuple[tuple[str, ...], int, int]
"""Masks [B, S], and the axes B and S of an output."""


def places(
    model: ir.Model,
    values: Sequence[ir.Value],
    masks: Collection[str | None],
    cases: Sequence[Mapping[str, np.ndarray]] = (),
    outputs: Sequence[Sequence[Any]] = (),
) -> list[Place | None]:
    """Returns where values have the positions that masks hide; None for those that are compared whole.

    Args:
        masks: the names of inputs that are known to hide padding.
        cases, outputs: inputs of the model, and the values for them.
    """
    named = dict[tuple[g.Dim, ...], list[str]]()
    for value in model.graph.inputs:
        if value.name in masks and value.name not in model.graph.initializers:
            named.setdefault((*(g.dims(value) or ()),), []).append(str(value.name))
    found = list[Place | None]()
    for index, value in enumerate(values):
        arrays = [each[index] for each in outputs]
        shapes = [each.shape for each in arrays if isinstance(each, np.ndarray)]
        placed = list[Place]()
        for dims, names in named.items():
            sizes = [case[names[0]].shape for case in cases]
            axes = _by_names(g.dims(value) or (), *dims) or (
                _by_sizes(shapes, sizes) if len(shapes) == len(sizes) else None
            )
            placed += [((*names,), *axes)] if axes else []
        found.append(placed[0] if len(placed) == 1 else None)
    return found


def _by_names(dims: Sequence[g.Dim], batch: g.Dim, length: g.Dim) -> tuple[int, int] | None:
    """Returns the only axes of a mask's names. Numbers of two axes may be those of something else."""
    is_certain = None not in (batch, length) and batch != length
    is_certain = is_certain and (isinstance(length, str) or len(dims) > 2)
    if not is_certain or [dims.count(each) for each in (batch, length)] != [1, 1]:
        return None
    return dims.index(batch), dims.index(length)


def _by_sizes(shapes: Sequence[tuple[int, ...]], sizes: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """Returns the only axes that had the sizes of a mask, each of which had several."""
    wanted = [*zip(*sizes, strict=True)]
    axes = [*zip(*shapes, strict=True)] if len({*map(len, shapes)}) == 1 else []
    if not axes or any(len({*each}) < 2 or axes.count(each) != 1 for each in wanted):
        return None
    return axes.index(wanted[0]), axes.index(wanted[1])


def shown(value: Any, case: Mapping[str, np.ndarray], place: Place | None) -> Any:
    """Returns the positions of a value that masks show; all of it if they hide none, or have other sizes."""
    if place is None or not isinstance(value, np.ndarray) or not case.keys() >= {*place[0]}:
        return value
    names, *axes = place
    hides = np.logical_and.reduce([hidden_by(name, case[name]) for name in names])
    hides &= ~hides.all(1, keepdims=True)
    if not hides.any() or [*hides.shape] != [size for axis in axes for size in value.shape[axis : axis + 1]]:
        return value
    return np.moveaxis(value, axes, (0, 1))[~hides]
