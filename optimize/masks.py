"""Classifies the masks of a model's attentions by computing them on generated inputs.

A mask that always hides the later tokens, and nothing else, is causal. One that never hides anything is left
out. One that hides what the 2-dimensional mask input marks with 0, and depends on no other input, is computed
from that input in a few nodes. If the user has promised padding on the right, it becomes the length of each
sequence. A mask that depends on other inputs, such as token ids, or on numbers above `_LARGEST` stays as it
is: a few cases do not show everything that it may hide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from twinop.deploy.ort_runs import NotRunnable, Parts, run
from twinop.errors import TwinopError
from twinop.model.parts import parts
from twinop.record.dimensions import expressions

from . import graph as g
from . import inputs
from .attention import is_attention, masks_of
from .scores import HIDES, KNOWN, KnownMask, known_of

_HIDDEN = -1e4  # exp() of this or less is 0, in fp16 too
_LOWEST = -1e30  # no score exceeds it
_LONG = 2048  # a length at which windows show, however they are written
_LARGEST = 4096  # numbers up to this are exceeded; longer masks take too much memory
_SMALL = 8  # elements; larger constants are buffers

MaskKind = tuple[bool, str]
"""What a mask hides: the future or not, and "nothing" else, or padding: "right" or "any"; "padding": any, and
perhaps with -inf or the future, which no rewrite takes."""
_PADDING = [(True, "padding"), (False, "padding")]
_KINDS = [(True, "nothing"), (True, "right"), (False, "nothing"), (False, "right"), (False, "any"), *_PADDING]
_FINITE = (False, "")  # whatever it hides, not with -inf


@dataclass
class _Mask:
    """A mask, the kinds that it may have, and the numbers that it hides with."""

    value: ir.Value
    kinds: set[MaskKind] = field(default_factory=lambda: {*_KINDS, _FINITE})
    lowest: set[float] = field(default_factory=set)
    elements: int = 0  # of one sequence, at the lengths that were tried first


def classify(context: g.RewriteContext, sizes: inputs.Sizes, padding: str | None) -> None:
    """Computes the masks of all attentions, and notes in their `meta` what they hide; `sizes`: a batch of
    several sequences and lengths that the model accepts."""
    softmaxes = filter(is_attention, context.nodes("Softmax"))
    values = dict.fromkeys(mask for softmax in softmaxes for mask in masks_of(softmax))
    masks = [
        _Mask(value) for value in values
        if (value.dtype is ir.DataType.FLOAT or HIDES in value.meta) and g.rank(value) in (2, 4)
        and _is_known(value)
    ]  # fmt: skip
    given = [
        value for value in context.graph.inputs
        if inputs.is_mask(value) and value.dtype is not None and value.dtype.is_integer()
    ]  # fmt: skip
    name = str(given[0].name) if len(given) == 1 else ""
    # Lengths that differ by name come first, as with given inputs nobody knows whether they may differ.
    tried = dict.fromkeys((sizes, replace(sizes, step=0)))
    found = next(
        (each for each in tried if masks and _try(context.model, masks, each, name, sizes.batch)), None
    )
    if found is None:
        return
    for mask in masks:
        if not mask.kinds - {_FINITE} or not _try_long(context.model, mask, found, name):
            continue
        if len(mask.lowest) > 1:
            mask.kinds.discard((False, "any"))
        kinds = [each for each in _KINDS if each in mask.kinds and each[1] in ("nothing", padding, "any")]
        kind = kinds[0] if kinds else (False, "")
        number = max(mask.lowest, default=-math.inf)
        mask.value.meta[KNOWN] = KnownMask(*kind, _FINITE in mask.kinds, name, number)
        if not mask.kinds.isdisjoint(_PADDING):
            given[0].meta[inputs.PADDING] = True


def forget_small(graph: ir.Graph) -> dict[ir.Value, KnownMask]:
    """Forgets what is known of masks that large scores may exceed; returns it."""
    values = (*graph.initializers.values(), *(value for node in graph for value in node.outputs))
    return {value: value.meta.pop(KNOWN) for value in values if known_of(value).number > _LOWEST}


def _try(model: ir.Model, masks: Sequence[_Mask], sizes: inputs.Sizes, name: str, batch: int = 0) -> bool:
    """Removes the kinds that masks do not have at some lengths; returns False if they cannot be computed.
    `batch`: of more cases than those of one sequence, 0 for none."""
    kinds = [(1, "right"), (1, "left"), (1, "holes")]
    given = g.given_of(*(mask.value for mask in masks))
    if batch:
        kinds += [(batch, hide) for hide in ("nothing", *inputs.hidden(None))]
    try:
        cases = [
            inputs.generate(model, replace(sizes, batch=size), hide=hide, seed=seed, only=given)
            for seed, (size, hide) in enumerate(kinds)
        ]
        part = model_of(model, [mask.value for mask in masks])
        runs = [cases] if batch else [[case] for case in cases]  # one by one: long masks may be large
        found = [arrays for each in runs for arrays in run(part, False, each).outputs]
    except (NotRunnable, TwinopError):
        return False
    for case, arrays in zip(cases, found, strict=True):
        for mask, array in zip(masks, map(np.asarray, arrays), strict=True):
            if HIDES in mask.value.meta:
                on_true, lowest = mask.value.meta[HIDES]
                array = np.where(array == on_true, lowest, 0.0)
            if batch:
                mask.elements = array.size // (len(array) if array.ndim > 2 else 1)
            mask.kinds &= {kind for kind in mask.kinds if _is_of_kind(array, kind, case.get(name))}
            hidden = array[array <= _HIDDEN]
            mask.lowest |= {float(hidden.min()), float(hidden.max())} if hidden.size else set()
    return True


def _try_long(model: ir.Model, mask: _Mask, sizes: inputs.Sizes, name: str) -> bool:
    """Tries a mask at the largest length that its model accepts, where its windows show; returns False if
    there is none, except for a model of one length."""
    ancestors = g.ancestors(mask.value)
    short, numbers = sizes.length, _numbers(ancestors)
    longest = max(_LONG, *((int(number) // 64 + 1) * 64 for number in numbers), 0)
    buffers = [each for each in ancestors if each.const_value is not None and each.const_value.size > _SMALL]
    sizes_of_buffers = {size for each in buffers for size in g.dims(each) or () if isinstance(size, int)}
    lengths = {longest, longest // short * short, _LONG, 1024, 512, 256, 128, 64, *sizes_of_buffers}
    sizes = replace(sizes, batch=1, fixed=_fixed_for(mask.value, sizes))
    if inputs.shapes(model, sizes) == inputs.shapes(model, replace(sizes, length=longest)):
        return True
    tried = sorted((length for length in lengths if short < length <= longest), reverse=True)
    least = max((a * b for a in numbers for b in numbers), default=0)  # a window may be their product
    for length in tried:
        long = replace(sizes, length=length)
        if _elements(model, mask, sizes, long) <= inputs.MOST:
            if _try(model, [mask], long, name):
                return True
        elif length <= least:
            return False
    return False


def _fixed_for(mask: ir.Value, sizes: inputs.Sizes) -> tuple[tuple[str, int], ...]:
    """Returns the sizes that stay while the lengths that a mask depends on grow, also channels, height and
    width."""
    small = [value for value in g.given_of(mask) if g.rank(value) < 4]
    grows = {dim for value in small for dim in (g.dims(value) or ())[1:]}
    found = expressions([dim for dim in grows if isinstance(dim, str)])
    grows |= {name for each in found.values() for name in each.names.values()}
    return tuple((name, size) for name, size in sizes.fixed if name not in grows)


def _elements(model: ir.Model, mask: _Mask, short: inputs.Sizes, long: inputs.Sizes) -> float:
    """Returns about how many elements a mask has, or a larger input that it is computed from: they grow as
    the pairs of the input's do. An image of twice the width and height has four times the tokens."""
    given = [str(value.name) for value in g.given_of(mask.value)]
    before, after = (
        [math.prod(inputs.shapes(model, sizes)[name]) for name in given] for sizes in (short, long)
    )
    growth = max((b / a for a, b in zip(before, after, strict=True)), default=1.0)
    return max(mask.elements * growth**2, *after, 0)


def _is_known(mask: ir.Value) -> bool:
    """Whether a mask depends on nothing but shapes and padding masks, and its numbers can be exceeded."""
    ancestors = g.ancestors(mask)
    given = [value for value in ancestors if value.is_graph_input()]
    nodes = [node for value in ancestors if (node := value.producer()) is not None]
    if any(node.domain not in ("", g.MICROSOFT) for node in nodes):  # it runs without a library
        return False
    return all(map(inputs.is_mask, given)) and max(_numbers(ancestors), default=0.0) <= _LARGEST


def _numbers(values: set[ir.Value]) -> set[float]:
    """Returns the sizes that small constants may stand for: a window of 12 may be written as -12 or 1/12."""
    found = set[float]()
    for value in values:
        if value.const_value is not None and value.const_value.size > _SMALL:
            continue
        array = g.constant(value)
        if array is None or array.dtype.kind not in "iuf":
            continue
        is_compared = any(user.op_type.startswith(("Less", "Greater")) for user in value.consumers())
        for number in np.abs(array.astype(np.float64)).reshape(-1):
            is_size = number < (2**31 - 1 if array.dtype.kind != "f" or is_compared else -_HIDDEN - 1)
            found |= {max(number, 1 / number)} if number and is_size else set()
    return found


def _is_of_kind(array: np.ndarray, kind: MaskKind, shown: np.ndarray | None) -> bool:
    """Whether a mask [B, H, S, T] or [S, T] hides just what its kind says; `shown`: the padding mask."""
    if kind == _FINITE:
        return not np.isneginf(array).any()
    causal, padding = kind
    if array.ndim not in (2, 4) or (padding != "nothing" and shown is None):
        return False
    if padding == "any" and np.isneginf(array).any():
        return False  # these stay as they are
    if padding == "right" and shown is not None and (np.diff(shown.astype(int), axis=1) > 0).any():
        return True  # it was promised that this does not occur
    wide = array.reshape((1,) * (4 - array.ndim) + array.shape)
    rows, columns = wide[0, 0].shape
    if causal and rows != columns:
        return False
    expected = np.tril(np.ones((rows, columns), bool)) if causal else np.ones((rows, columns), bool)
    if padding != "nothing" and shown is not None:
        if shown.shape[1] != columns:
            return False
        expected = expected & (shown != 0)[:, None, None, :]
        if padding == "padding" and rows == columns:  # DeBERTa hides all from hidden tokens
            wide = np.where((shown != 0)[:, None, :, None], wide, np.where(expected, 0, _LOWEST))
    is_binary = ((wide == 0) | (wide <= _HIDDEN)).all()
    return bool(is_binary and ((wide == 0) == expected).all())


def model_of(model: ir.Model, values: Sequence[ir.Value]) -> Parts:
    """Returns a model that computes some values of a model; large weights whose shapes they need stay where
    they are."""
    given = g.given_of(*values)
    read = [each for each in model.graph.inputs if each in given]
    graph = ir.convenience.extract(model.graph, read, values)
    for value in graph.outputs:
        value.shape = None
    return parts(ir.Model(graph, ir_version=model.ir_version))
