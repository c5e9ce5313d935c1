"""Classifies the masks of a model's attentions by computing them on generated inputs.

A mask that always hides the later tokens, and nothing else, is causal. One that never hides anything is left
out. One that hides what the 2-dimensional mask input marks with 0, and depends on no other input, is computed
from that input in a few nodes. If the user has promised padding on the right, it becomes the length of each
sequence. A mask that depends on other inputs, such as token ids, stays as it is: a few cases do not show
everything that it may hide.
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

_HIDDEN = -1e4  # exp() of this or less is 0, in fp16 too


def classify(work: Work, sizes: tuple[int, int], padding: str | None) -> None:
    """Computes the masks of all attentions, and fills the fields of `work` that end in `_masks`.

    Args:
        sizes: a batch of several sequences and a length that the model accepts.
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
    except (NotRunnable, TwinopError):  # masks that cannot be computed alone stay as they are
        return
    for index, mask in enumerate(masks):
        arrays = [np.asarray(each[index]) for each in found]
        if any(array.ndim not in (2, 4) for array in arrays):
            continue
        if any(np.isneginf(array).any() for array in arrays):
            work.infinite_masks[mask] = any(np.isneginf(array).all(-1).any() for array in arrays)
        if not all(inputs.is_mask(value) for value in _inputs_of(mask)):
            continue
        for causal in (True, False):
            if all(_hides_exactly(array, causal, None) for array in arrays):
                (work.causal_masks if causal else work.empty_masks).add(mask)
                break
            if len(given) != 1:
                continue
            padded = [
                (array, np.asarray(case[str(given[0].name)]))
                for array, case in zip(arrays, cases, strict=True)
            ]
            on_right = [(array, shown) for array, shown in padded if _is_right_padded(shown)]
            if padding == "right" and all(_hides_exactly(array, causal, shown) for array, shown in on_right):
                work.right_padding_masks[mask] = given[0]
                work.causal_masks |= {mask} if causal else set()
                break
            if causal or mask in work.infinite_masks:
                continue
            if all(_hides_exactly(array, False, shown) for array, shown in padded):
                work.padding_masks[mask] = given[0]
                break


def _inputs_of(mask: ir.Value) -> set[ir.Value]:
    """Returns the model inputs whose values, and not only shapes, a mask is computed from."""
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
    """Whether a mask [B, H, S, T] hides just the future (if `causal`) and what is 0 in `shown` [B, T]."""
    wide = array.reshape((1,) * (4 - array.ndim) + array.shape)
    rows, columns = wide[0, 0].shape
    if causal and rows != columns:
        return False
    expected = np.tril(np.ones((rows, columns), bool)) if causal else np.ones((rows, columns), bool)
    if shown is not None:
        if shown.shape[1] != columns:
            return False
        expected = expected & (shown != 0)[:, None, None, :]
    is_binary = ((wide == 0) | (wide <= _HIDDEN)).all()
    return bool(is_binary and ((wide == 0) == expected).all())


def _compute(
    model: ir.Model, values: Sequence[ir.Value], cases: Sequence[inputs.Case]
) -> list[list[np.ndarray]]:
    """Computes values of a model for each case."""
    names = [value.name for value in values]
    part = model.clone()
    known = [*part.graph.inputs, *part.graph.initializers.values()]
    known += [value for node in part.graph for value in node.outputs]
    by_name = {value.name: value for value in known}
    part.graph.outputs[:] = [by_name[name] for name in names]
    for value in part.graph.outputs:
        value.shape = None
    clean(part)
    part.functions.clear()
    return run(ir.to_proto(part).SerializeToString(), False, cases).outputs
