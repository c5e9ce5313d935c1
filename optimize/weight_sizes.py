"""Finds the sizes that weights give to dynamic dimensions, such as the channels of an image.

The first nodes of a model run on generated inputs, up to one that fails. Then the dimensions that it reads
get other sizes, until it runs: those of its weights, and those that differ from the size that failed by as
much as the tensors of the node differ.
"""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from twinop import deploy
from twinop.deploy.ort_runs import NotRunnable, run
from twinop.errors import TwinopError
from twinop.record.dimensions import expressions

from . import graph as g
from . import inputs
from .graph import given_of
from .inputs import Sizes
from .masks import model_of

_LARGEST = 8192  # sizes to try
_AT_ONCE = 16
_SMALL = 8  # elements; larger constants are no shapes


def fit(model: ir.Model, sizes: Sizes, library: deploy.Libraries) -> Sizes | None:
    """Returns sizes with which all nodes run, or None if none are found."""
    model = model.clone()
    ShapeInferencePass(check_type=False, strict_mode=False)(model)  # the results of a part need types
    nodes, names = list(model.graph), _names(model)
    for _ in names:

        def runs(count: int, sizes: Sizes = sizes) -> bool:
            """Whether the first nodes run: their results that none of them reads."""
            first = {*nodes[:count]}
            results = [value for node in nodes[:count] for value in node.outputs if value.name]
            unread = [value for value in results if first.isdisjoint(value.consumers())]
            return _run(model, unread, [sizes], library) is not None

        if runs(len(nodes)):
            return sizes
        node = nodes[bisect_left(range(1, len(nodes)), True, key=lambda count: not runs(count))]
        tried = _candidates(model, node, sizes, library)
        for start in range(0, len(tried), _AT_ONCE):
            some = tried[start : start + _AT_ONCE]
            if (found := _run(model, list(node.outputs), some, library)) is not None:
                sizes = found[0]
                break
        else:
            return None
    return None


def _names(model: ir.Model) -> list[str]:
    """Returns the names of the dimensions of inputs, those of batches last."""
    axes = [(axis == 0, dim) for value in model.graph.inputs for axis, dim in enumerate(g.dims(value) or ())]
    names = dict.fromkeys(dim for _, dim in sorted(axes, key=lambda each: each[0]) if isinstance(dim, str))
    return [name for name in names if name not in expressions(names)]


def _candidates(model: ir.Model, node: ir.Node, sizes: Sizes, library: deploy.Libraries) -> list[Sizes]:
    """Returns sizes of which one more is fixed, with which a node may run."""
    read = list(dict.fromkeys(value for value in node.inputs if value is not None))
    answer = _run(model, read, [sizes], library)
    if answer is None:
        return []
    vary = [bool(given_of(value)) for value in read]
    pairs = sorted(zip(vary, answer[1], strict=True), key=lambda each: each[0])
    found = {size for varies, array in pairs if varies for size in array.shape}
    wanted = dict.fromkeys(size for _, array in pairs for size in (*array.shape, *_small_integers(array)))
    factors = [each.value for each in node.attributes.values() if each.type is ir.AttributeType.INT]
    heads = [a + 2 * b for a in factors for b in factors]  # of q, k and v in one tensor
    pairs_of = [(size, each) for size in wanted for each in (*factors, *heads) if each > 0]
    divided = [size // each for size, each in pairs_of if size % each == 0]
    wanted |= dict.fromkeys(size * factor for size in wanted for factor in factors)
    wanted |= dict.fromkeys(divided)
    now, fixed = inputs.sizes_by_name(model, sizes), dict(sizes.fixed)
    names = {dim for value in given_of(*read) for dim in g.dims(value) or () if isinstance(dim, str)}
    names |= {name for each in expressions(names).values() for name in each.names.values()}
    free = [name for name in _names(model) if name in names and name not in fixed]
    tried = [(name, size) for size in wanted for name in free]
    tried += [(name, now[name] + size - has) for size in wanted for has in found for name in free]
    tried += [(name, now[name] * size // max(has, 1)) for size in wanted for has in found for name in free]
    return [
        replace(sizes, fixed=(*sizes.fixed, (name, size)))
        for name, size in dict.fromkeys(tried)
        if 0 < size <= _LARGEST and size != now[name]
    ]


def _small_integers(array: np.ndarray) -> list[int]:
    return array.reshape(-1).tolist() if array.dtype.kind == "i" and array.size <= _SMALL else []


def _run(
    model: ir.Model, values: list[ir.Value], tried: list[Sizes], library: deploy.Libraries
) -> tuple[Sizes, list[np.ndarray]] | None:
    """Computes some values of a model on generated inputs; returns the first sizes with which that is
    possible, and the values, or None."""
    try:
        needed, part = given_of(*values), model_of(model, values)
        cases, small = list[inputs.Case](), list[Sizes]()
        for each in tried:
            with suppress(inputs.TooLarge):
                cases.append(inputs.generate(model, each, hide="right", only=needed))
                small.append(each)
        if not cases:
            return None
        outputs = run(part, library, cases, required=0).outputs
    except (NotRunnable, TwinopError, ValueError):  # a part above 2 GiB
        return None
    ran = [(each, [*map(np.asarray, found)]) for each, found in zip(small, outputs, strict=True) if found]
    return ran[0] if ran else None
