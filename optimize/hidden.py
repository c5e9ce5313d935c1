"""Finds the positions of outputs that padding masks hide: what stands there means nothing, and may vary.

It is not compared if a mask is known to hide padding, and an output certainly has its axes: by their names,
or as the only ones that had its sizes in runs of several sizes. A sequence that is hidden as a whole counts.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from . import graph as g
from .inputs import is_inverted

Place = tuple[tuple[str, ...], int, int]  # masks [B, S], and the axes B and S of an output


def places(
    model: ir.Model,
    values: Sequence[ir.Value],
    masks: Collection[str | None],
    cases: Sequence[Mapping[str, np.ndarray]] = (),
    outputs: Sequence[Sequence[Any]] = (),
) -> list[Place | None]:
    """Returns where values have the positions that masks hide; None for those that are compared whole.
    `masks` are inputs that are known to hide padding; `cases` and `outputs` the model's inputs and the values
    for them."""
    alike, found = defaultdict[tuple[g.Dim, ...], list[str]](list), list[Place | None]()
    for value in [value for value in model.graph.inputs if value.name in masks]:
        alike[tuple(g.dims(value) or ())].append(str(value.name))
    for index, value in enumerate(values):
        dims, placed = g.dims(value) or (), list[Place]()
        sizes = [*zip(*(getattr(each[index], "shape", ()) for each in outputs), strict=False)]
        for mask, names in alike.items():
            # Of two numbers, one may be the size of something else.
            axes = _axes(dims, mask) if isinstance(mask[-1], str) or len(dims) > 2 else []
            known = [*zip(*(case[names[0]].shape for case in cases if names[0] in case), strict=True)]
            if not axes and all(len({*each}) > 1 for each in known):
                axes = _axes(sizes, known)
            placed += [((*names,), axes[0], axes[1])] if axes else []
        found.append(placed[0] if len(placed) == 1 else None)
    return found


def _axes(dims: Sequence[Any], mask: Sequence[Any]) -> list[int]:
    """Returns the only axes with the names or sizes of a mask's, none if there are others."""
    found = [dims.index(each) for each in mask if each is not None and dims.count(each) == 1]
    return found if len({*found}) == 2 else []


def shown(value: Any, case: Mapping[str, np.ndarray], place: Place | None) -> Any:
    """Returns the positions of a value that masks show; all of it if they hide none, or have other sizes."""
    if place is None or not isinstance(value, np.ndarray) or not case.keys() >= {*place[0]}:
        return value
    names, *axes = place
    hides = np.logical_and.reduce([(case[n] != 0) == is_inverted(n, case[n].dtype) for n in names])
    hides &= ~hides.all(1, keepdims=True)
    if not hides.any() or [*hides.shape] != [size for axis in axes for size in value.shape[axis : axis + 1]]:
        return value
    return np.moveaxis(value, axes, (0, 1))[~hides]
