"""Finds out what the masks of a model's attentions hide, by computing them.

A mask that is 0 up to each token and hides the rest, whatever the inputs are, is causal: exactly so. One
that hides nothing, whatever the inputs are, is left out. One that hides what the model's 2-dimensional mask
input marks with 0, and that input alone, is made of it in a few nodes; if the user has promised padding on
the right, it becomes the length of each sequence. A mask that follows from other inputs, such as token ids,
stays as it is: a few cases do not show all that it may hide.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from twinop.errors import TwinopError

from ..comparison import NotRunnable, run
from . import inputs
from .attention import attentions, masks_of
from .graph import Work, dims
from .prepare import clean

_HIDDEN = -1e4  # what an exp() of leaves nothing, in fp16 too


def classify(work: Work, sizes: tuple[int, int], padding: str | None) -> None:
    """Fills `work.causal`, `work.clear`, `work.infinite`, `work.lengths` and `work.padding`.

    Args:
        sizes: a batch of several and a length that the model takes.
    """
    masks = list(dict.fromkeys(mask for softmax in attentions(work) for mask in masks_of(softmax)))
    masks = [mask for mask in masks if mask.dtype is ir.DataType.FLOAT and len(dims(mask) or ()) in (2, 4)]
    given = [
        value for value in work.graph.inputs if inputs.is_mask(value) and value.dtype is not ir.DataType.BOOL
    ]
    if not masks:
        return
    batch, length = sizes
    cases = [
        inputs.generate(work.model, size, tokens, hide=hide, seed=seed)
        for seed, (size, tokens, hide) in enumerate(
            [
                (batch, length, "nothing"),
                (batch, length, "right"),
                (batch, length, "left"),
                (1, length, "right"),
            ]
        )
    ]
    try:
        found = _compute(work.model, masks, cases)
    except (NotRunnable, TwinopError):  # masks that cannot be computed alone stay what they are
        return
    for index, mask in enumerate(masks):
        arrays = [np.asarray(each[index]) for each in found]
        if any(array.ndim not in (2, 4) for array in arrays):
            continue
        if any(np.isneginf(array).any() for array in arrays):
            work.infinite[mask] = any(np.isneginf(array).all(-1).any() for array in arrays)
        if not all(inputs.is_mask(value) for value in _inputs_of(mask)):
            continue
        for causal in (True, False):
            if all(_hides_exactly(array, causal, None) for array in arrays):
                (work.causal if causal else work.clear).add(mask)
                break
            if len(given) != 1:
                continue
            padded = [
                (array, np.asarray(case[str(given[0].name)]))
                for array, case in zip(arrays, cases, strict=True)
            ]
            on_right = [(array, shown) for array, shown in padded if _is_right_padded(shown)]
            if padding == "right" and all(_hides_exactly(array, causal, shown) for array, shown in on_right):
                work.lengths[mask] = given[0]
                work.causal |= {mask} if causal else set()
                break
            if causal or mask in work.infinite:
                continue
            if all(_hides_exactly(array, False, shown) for array, shown in padded):
                work.padding[mask] = given[0]
                break


def _inputs_of(mask: ir.Value) -> set[ir.Value]:
    """Returns the model's inputs whose values, not only their shapes, a mask is computed from."""
    found, waiting, seen = set[ir.Value](), [mask], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            found |= {value} if value.is_graph_input() else set()
        elif node.op_type not in ("Shape", "Size"):
            waiting += [each for each in node.inputs if each is not None]
    return found


def _is_right_padded(shown: np.ndarray) -> bool:
    return bool((np.diff(shown.astype(int), axis=1) <= 0).all())


def _hides_exactly(array: np.ndarray, causal: bool, shown: np.ndarray | None) -> bool:
    """Whether a mask [B, H, S, T] hides just the future (`causal`) and what is not `shown` [B, T]."""
    wide = array.reshape((1,) * (4 - array.ndim) + array.shape)
    rows, columns = wide[0, 0].shape
    if causal and rows != columns:
        return False
    expected = np.tril(np.ones((rows, columns), bool)) if causal else np.ones((rows, columns), bool)
    if shown is not None:
        if shown.shape[1] != columns:
            return False
        expected = expected & (shown != 0)[:, None, None, :]
    clear = ((wide == 0) | (wide <= _HIDDEN)).all()
    return bool(clear and ((wide == 0) == expected).all())


def _compute(
    model: ir.Model, values: Sequence[ir.Value], cases: Sequence[inputs.Case]
) -> list[list[np.ndarray]]:
    """Computes values of a model for each case."""
    names = [value.name for value in values]
    part = model.clone()
    known = [*part.graph.inputs, *part.graph.initializers.values()]
    made = {value.name: value for value in [*known, *(each for node in part.graph for each in node.outputs)]}
    part.graph.outputs[:] = [made[name] for name in names]
    for value in part.graph.outputs:
        value.shape = None
    clean(part)
    part.functions.clear()
    return run(ir.to_proto(part).SerializeToString(), False, cases).outputs
