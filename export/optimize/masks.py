"""Classifies the masks of a model's attentions by computing them on generated inputs.

A mask that always hides the later tokens, and nothing else, is causal. One that never hides anything is left
out. One that hides what the 2-dimensional mask input marks with 0, and depends on no other input, is computed
from that input in a few nodes. If the user has promised padding on the right, it becomes the length of each
sequence. A mask that depends on other inputs, such as token ids, or on a window of more than `_LONGEST`
tokens stays as it is: a few cases do not show everything that it may hide.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from twinop.errors import TwinopError

from ..comparison import NotRunnable, run
from . import inputs
from .attention import attentions, masks_of
from .graph import Work, constant, dims
from .prepare import clean

_HIDDEN = -1e4  # exp() of this or less is 0, in fp16 too
_LONGEST = 4096  # tokens of a window that is tried; a longer mask takes too much memory
_MANY = 16  # lengths to try

Form = tuple[bool, str]
"""What a mask hides: the future or not, and "nothing" else, or padding: "right" or "any"."""
FORMS = [(causal, padding) for causal in (True, False) for padding in ("nothing", "right", "any")]
FINITE = (False, "")  # whatever it hides, not with -inf


def classify(work: Work, sizes: inputs.Sizes, padding: str | None) -> None:
    """Computes the masks of all attentions, and fills the fields of `work` that end in `_masks`.

    Args:
        sizes: a batch of several sequences and lengths that the model accepts.
    """
    masks = list(dict.fromkeys(mask for softmax in attentions(work) for mask in masks_of(softmax)))
    masks = [
        mask for mask in masks
        if mask.dtype is ir.DataType.FLOAT and len(dims(mask) or ()) in (2, 4) and _is_known(mask)
    ]  # fmt: skip
    given = [
        value for value in work.graph.inputs if inputs.is_mask(value) and value.dtype is not ir.DataType.BOOL
    ]
    name = str(given[0].name) if len(given) == 1 else ""
    forms = {mask: {*FORMS, FINITE} for mask in masks}
    if not masks:
        return
    # Lengths that differ by name come first, as with given inputs nobody knows whether they may differ.
    tried = dict.fromkeys((sizes, replace(sizes, step=0)))
    if not any(_evaluate(work.model, forms, each, name) for each in tried):
        return
    work.finite_masks |= {mask for mask, possible in forms.items() if FINITE in possible}
    for mask, possible in forms.items():
        allowed = [("nothing", True), ("right", padding == "right"), ("any", True)]
        form = next((each for each in FORMS if each in possible and dict(allowed)[each[1]]), None)
        if form in ((True, "nothing"), (False, "nothing")):
            (work.causal_masks if form[0] else work.empty_masks).add(mask)
        elif form in ((True, "right"), (False, "right")):
            work.right_padding_masks[mask] = given[0]
            work.causal_masks |= {mask} if form[0] else set()
        elif form == (False, "any"):
            work.padding_masks[mask] = given[0]


def _evaluate(model: ir.Model, forms: dict[ir.Value, set[Form]], sizes: inputs.Sizes, name: str) -> bool:
    """Removes the forms that masks do not have. Returns False if the masks cannot be computed alone.

    A window of c tokens shows at lengths above c only, so each such number in the computation of a mask is
    exceeded by two lengths, one of them a multiple of 64 for models that accept no others.

    Args:
        name: of the padding mask among the inputs, or "".
    """
    part = _model_of(model, list(forms))
    lengths = {mask: _lengths_to_try(mask) for mask in forms}
    for length in [sizes.length, *sorted(set().union(*lengths.values()) - {sizes.length})]:
        at = replace(sizes, length=length)
        one = replace(at, batch=1)
        kinds = [(one, "right"), (one, "left")]
        if length == sizes.length:
            kinds += [(at, "nothing"), (at, "right"), (at, "left")]
        cases = [
            inputs.generate(model, each, hide=hide, seed=seed) for seed, (each, hide) in enumerate(kinds)
        ]
        try:
            found = run(part, False, cases).outputs
        except (NotRunnable, TwinopError):
            if length == sizes.length:
                return False
            continue  # the model does not accept this length
        for case, arrays in zip(cases, found, strict=True):
            for possible, array in zip(forms.values(), arrays, strict=True):
                possible &= {form for form in possible if _has_form(np.asarray(array), form, case.get(name))}
    return True


def _ancestors(mask: ir.Value) -> set[ir.Value]:
    """Returns all values that a mask is computed from, also those that subgraphs read."""
    waiting, seen = [mask], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is not None and node.op_type not in ("Shape", "Size"):
            nodes = [node, *(inner for graph in _subgraphs(node) for inner in graph.all_nodes())]
            waiting += [each for one in nodes for each in one.inputs if each is not None]
            waiting += [each for graph in _subgraphs(node) for each in graph.outputs]
    return seen


def _subgraphs(node: ir.Node) -> list[ir.Graph]:
    return [each.as_graph() for each in node.attributes.values() if each.type is ir.AttributeType.GRAPH]


def _is_known(mask: ir.Value) -> bool:
    """Whether a mask depends on nothing but shapes and padding masks, and its numbers can be exceeded."""
    ancestors = _ancestors(mask)
    if any(value.is_graph_input() and not inputs.is_mask(value) for value in ancestors):
        return False
    numbers = _numbers(ancestors)
    return not any(_LONGEST < number < 2**31 - 1 for number in numbers) and len(numbers) <= _MANY


def _lengths_to_try(mask: ir.Value) -> set[int]:
    numbers = {int(number) for number in _numbers(_ancestors(mask)) if number <= _LONGEST}
    return {length for number in numbers for length in (number + 1, ((number + 1) // 64 + 1) * 64)}


def _numbers(values: set[ir.Value]) -> set[float]:
    """Returns the numbers above 1 in small constants."""
    arrays = [constant(value) for value in values if value.const_value is None or value.const_value.size <= 8]
    numbers = {float(each) for array in arrays if array is not None for each in array.reshape(-1)}
    return {number for number in numbers if number > 1 and np.isfinite(number)}


def _is_right_padded(shown: np.ndarray) -> bool:
    return bool((np.diff(shown.astype(int), axis=1) <= 0).all())


def _has_form(array: np.ndarray, form: Form, shown: np.ndarray | None) -> bool:
    """Whether a mask [B, H, S, T] or [S, T] hides just what its form says.

    Args:
        shown: the padding mask [B, T] of the case.
    """
    if form == FINITE:
        return not np.isneginf(array).any()
    causal, padding = form
    if array.ndim not in (2, 4) or (padding != "nothing" and shown is None):
        return False
    if padding == "any" and (causal or np.isneginf(array).any()):
        return False  # these stay as they are
    if padding == "right" and shown is not None and not _is_right_padded(shown):
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
    is_binary = ((wide == 0) | (wide <= _HIDDEN)).all()
    return bool(is_binary and ((wide == 0) == expected).all())


def _model_of(model: ir.Model, values: Sequence[ir.Value]) -> bytes:
    """Returns a model that computes some values of a model."""
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
    return ir.to_proto(part).SerializeToString()
