"""Generates inputs for a model from nothing but its graph."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from twinop.errors import ExportError, option
from twinop.model import weights
from twinop.record.dimensions import sizes_of

from . import graph as g

Case = dict[str, np.ndarray]
_PASS_THROUGH = (
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze",
)  # fmt: skip
"""Operators whose output has elements of their first input."""

_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
}  # fmt: skip
MOST = 18_000_000  # elements of all inputs, of which there are several cases; or of a mask
_MOST_OVERRIDDEN = 2**20  # elements of an initializer that is an input, too
_EDGE: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "inputs of zeros": np.zeros_like,
    "inputs of ones": np.ones_like,
    "large inputs": lambda array: array * array.dtype.type(1000),
}
MASK = "a mask"  # in the `meta` of inputs of integers that the graph uses as masks of 0 and 1
PADDING = "a padding mask of attentions"
"""In the `meta` of inputs whose zeros attentions are known to hide (`masks.py`)."""
_HIDES = {"right": "the end", "left": "the beginning", "holes": "tokens between others"}
_COMPARES = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
_ARITHMETIC = ("Abs", "Add", "Div", "Max", "Min", "Mul", "Neg", "ReduceSum", "Sub", "Sum")
_TAKES_NUMBERS = (
    "Conv", "Gelu", "Gemm", "LayerNormalization", "MatMul", "ReduceMean", "Relu", "Shape",
    "Sigmoid", "Size", "Tanh",
)  # fmt: skip
_HIDING = 1000.0  # what a mask is multiplied with is at least so much
_LARGE_INTEGERS = 100_000  # fp16 ends at 65,504
_ALL_ROWS = 4096  # of a table of no more rows, all ids are tried
_LARGEST = 256  # of others those of so many of the largest rows
_ENDS = 8  # and so many of the first and the last
_MOST_REPEATS = 64
_MOST_LARGE = 8
_FIXES: Mapping[str, tuple[int, int]] = {
    "Conv": (1, 1), "ConvTranspose": (1, 0), "GRU": (-1, 2), "Gemm": (1, 0), "LSTM": (-1, 2), "RNN": (-1, 2),
    "LayerNormalization": (-1, -1), "MatMul": (-1, -2), "RMSNormalization": (-1, -1),
}  # fmt: skip
"""The axis of an operator's first input whose size is that of an axis of its weight, which is the second."""
_UNKNOWN_ROWS = 2  # integers of unknown meaning are 0 or 1, like masks and token types


class TooLarge(ExportError):
    """Inputs of these sizes would take too much memory."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of dynamic dimensions."""

    batch: int  # of the first dimension of each input
    length: int  # of all others
    step: int = 0  # by how much the lengths of two names differ, such as those of a query and a memory
    fixed: tuple[tuple[str, int], ...] = ()  # those that are known, by name, such as channels
    total: int = 0  # of a decoder's run: the tokens before and the new ones


# To try: odd sizes, a batch of one, and lengths for models that refuse short ones, as those of sound do;
# lengths that differ by name first.
SIZES = [
    Sizes(batch, length, step)
    for batch, length in ((3, 7), (1, 13), (2, 64), (1, 224), (1, 1024))
    for step in (2, 0)
]


def generate(
    model: ir.Model,
    sizes: Sizes,
    *,
    hide: str,
    seed: int = 0,
    positive: bool = False,
    only: Collection[ir.Value] | None = None,
) -> Case:
    """Generates one case: ids within the tables that they index, masks of 0 and 1, and normal numbers.

    Args:
        hide: which end of the sequences masks hide: "right", "left", "nothing", "everything", or "holes" for
            some tokens between others.
        positive: generate positive floats only, for logarithms and roots.
        only: the inputs to generate; by default all.

    ExportError: an input is an index into a table without rows; TooLarge: there are too many elements.
    """
    rng = np.random.default_rng(seed)
    case, by_name = {}, shapes(model, sizes)
    wanted = [
        value for value in model.graph.inputs
        if value.name not in model.graph.initializers and (only is None or value in only)
    ]  # fmt: skip
    sized = [value for value in wanted if not is_cache(value)]  # those have the size that they need
    elements = {str(value.name): math.prod(by_name[str(value.name)]) for value in sized}
    if sum(elements.values()) > MOST:
        largest = max(elements, key=lambda name: elements[name])
        raise TooLarge(f"input {largest} of shape {by_name[largest]} is too large to try")
    for value in wanted:
        dtype, shape = value.dtype, by_name[str(value.name)]
        assert dtype is not None and value.name is not None
        if is_mask(value):
            array = padding_mask(shape, hide) != is_inverted(value.name, dtype.numpy())
        elif dtype.is_floating_point():
            normal = rng.standard_normal(shape)
            array = np.abs(normal) + 0.1 if positive else normal
        elif _chooses(value):  # with a cache, or one and then the other
            caches = [0 not in by_name[str(each.name)] for each in model.graph.inputs if is_cache(each)]
            array = np.full(shape, all(caches) if caches else seed % 2 == 0)
        elif sizes.total and (lengths := _lengths(value)):
            array = np.full(shape, sizes.total - lengths.pop())
        elif dtype.is_integer():
            rows = min((weights.sizes(table)[axis] for table, axis in _tables(value)), default=_UNKNOWN_ROWS)
            if not rows:
                raise ExportError(f"input {value.name} is an index into a table without rows")
            numbers = _choices(value)
            array = np.full(shape, numbers[seed % 2]) if numbers else rng.integers(0, rows, shape)
        elif hide == "nothing" and "mask" in value.name.lower():
            array = np.ones(shape, bool)
        else:
            array = rng.random(shape) < 0.5
            if array.ndim >= 3:  # a mask of scores: some rows hide everything, others nothing
                array[..., :1, :] = False
                array[..., 1:2, :] = True
        case[value.name] = np.asarray(array, dtype.numpy())
    return case


def _chooses(value: ir.Value) -> bool:
    """Whether an input chooses the branch of an If."""
    return value.dtype is ir.DataType.BOOL and any(use.node.op_type == "If" for use in value.uses())


def _choices(value: ir.Value) -> list[int]:
    """Returns a number with which the graph compares an integer to choose a branch, as a sample rate, and
    another one; or nothing."""
    equal = [node.inputs[1 - at] for node, at in _uses(value) if node.op_type == "Equal" and at >= 0]
    numbers = [int(number) for each in equal if (number := g.scalar(each)) is not None]
    is_one = all(dim == 1 for dim in g.dims(value) or ())
    return [max(numbers), int(not max(numbers))] if numbers and is_one else []


def other_branch(model: ir.Model, case: Case) -> Case:
    """Returns a case with the other branches of its Ifs; nothing if no input chooses them."""
    chosen = {str(value.name) for value in model.graph.inputs if _chooses(value)}
    changed = {name: np.asarray(~array) for name, array in case.items() if name in chosen}
    return case | changed if changed else {}


def hidden(padding: str | None) -> list[str]:
    """Returns what masks may hide, if `padding` is promised."""
    return ["right"] if padding == "right" else ["right", "left", "holes", "everything"]


def edge_cases(model: ir.Model, case: Case, hidden: Sequence[str]) -> dict[str, Case]:
    """Returns a case again, by what differs: numbers that are all 0 or 1 or large, and other masks."""
    values = {str(value.name): value for value in model.graph.inputs if value.name in case}
    masks = {name: case[name] for name, value in values.items() if is_mask(value) and case[name].ndim == 2}
    numbers = {
        name: case[name]
        for name, value in values.items()
        if case[name].dtype.kind in "fV" and not (is_mask_name(name) or is_cache(value))
    }
    found = {}
    for name, change in _EDGE.items() if numbers else ():
        found[name] = case | {key: np.asarray(change(array)) for key, array in numbers.items()}
    defaults = {
        str(value.name): value.const_value.numpy()
        for value in model.graph.inputs
        if value.const_value is not None and value.const_value.size <= _MOST_OVERRIDDEN
    }
    for kind, letters in (("floats", "f"), ("integers", "iub")):
        other = {name: _other(array) for name, array in defaults.items() if array.dtype.kind in letters}
        if other:
            found[f"other {kind} in place of initializers"] = case | other
    rng = np.random.default_rng(0)
    integers = {
        name: rng.integers(1, _LARGE_INTEGERS, array.shape).astype(array.dtype)
        for name, value in values.items()
        if (array := case[name]).dtype.kind == "i" and array.itemsize >= 4 and _is_number(value)
    }
    if integers:
        found["large integers"] = case | integers
    for hide in hidden if masks else ():
        found[f"a mask that hides {_HIDES.get(hide, hide)}"] = case | {
            key: (padding_mask([*array.shape], hide) != is_inverted(key, array.dtype)).astype(array.dtype)
            for key, array in masks.items()
        }
    return found


def _other(array: np.ndarray) -> np.ndarray:
    """Returns other values than those of an array."""
    if array.dtype.kind == "f":
        return np.asarray(array * array.dtype.type(1.5) + array.dtype.type(0.25))
    return np.asarray(~array if array.dtype.kind == "b" else array + array.dtype.type(1))


def shapes(model: ir.Model, sizes: Sizes) -> dict[str, list[int]]:
    by_name = sizes_by_name(model, sizes)

    def size(dim: g.Dim, axis: int) -> int:
        default = sizes.length if axis else sizes.batch
        return by_name[dim] if isinstance(dim, str) else default if dim is None else dim

    return {
        str(value.name): [size(dim, axis) for axis, dim in enumerate(g.dims(value) or [])]
        for value in model.graph.inputs
    }


def sizes_by_name(model: ir.Model, sizes: Sizes) -> dict[str, int]:
    """Returns the sizes of the dimensions of inputs. The first use of a name says whether it is a batch: a
    first axis, or the second one of states [layers, batch, width]."""
    axes: dict[str, int] = {}
    for value in model.graph.inputs:
        dims = g.dims(value) or []
        batch = int([*map(type, dims)] == [int, str, int] and dims[0] != 1)
        for axis, dim in enumerate(dims):
            axes.setdefault(dim, abs(axis - batch)) if isinstance(dim, str) else None
    return sizes_of(axes, sizes.batch, sizes.length, sizes.step, dict(sizes.fixed))


def of_weights(model: ir.Model, sizes: Sizes) -> Sizes | None:
    """Returns sizes with those of the inputs' names that weights fix, such as channels, or what they are
    concatenated with; None if nothing does."""
    model, fixed = model.clone(), dict(sizes.fixed)
    ShapeInferencePass(check_type=False, strict_mode=False)(model)
    names = {dim for value in model.graph.inputs for dim in g.dims(value) or () if isinstance(dim, str)}
    for node in model.graph:
        pairs, shapes = list[tuple[g.Dim, g.Dim]](), [g.dims(value) or [] for value in node.inputs]
        if node.op_type in _FIXES and shapes[0] and (tensor := g.tensor(node.inputs[1])) is not None:
            axis, of_weight = _FIXES[node.op_type]
            of_weight = 1 if g.attribute(node, "transB", 0) else of_weight
            size = weights.sizes(tensor)[of_weight] * g.attribute(node, "group", 1)
            pairs.append((shapes[0][axis], size))
        elif node.op_type == "Concat" and all(shapes):
            axis = g.attribute(node, "axis", 0) % len(shapes[0])
            others = [dims for index, dims in enumerate(zip(*shapes, strict=True)) if index != axis]
            pairs += [
                (dim, size) for dims in others for dim in dims for size in dims if isinstance(size, int)
            ]
        fixed |= {str(name): size for name, size in pairs if name in names and isinstance(size, int)}
    return replace(sizes, fixed=tuple(fixed.items())) if len(fixed) > len(sizes.fixed) else None


def is_inverted(name: str, dtype: np.dtype) -> bool:
    """Whether a mask hides what is 1, as torch's `key_padding_mask` does."""
    return dtype == np.bool_ and "padding" in name.lower()


def is_cache(value: ir.Value) -> bool:
    """Whether an input holds the keys or values of tokens before."""
    attends = any(use.node.op_type == "GroupQueryAttention" and use.idx in (3, 4) for use in value.uses())
    return attends or bool(grows(value))


def grows(value: ir.Value) -> str:
    """Returns the name of the dimension along which the model returns an input with more rows, or ""."""
    for use in value.uses():
        shape, axis = g.dims(value) or [], g.attribute(use.node, "axis", 0)
        if use.node.op_type != "Concat" or use.idx or len(shape) < 3 or value.dtype is ir.DataType.INT64:
            continue
        joined, name = use.node.outputs[0], shape[axis]
        in_branch = any(each.node.graph is not use.node.graph for each in joined.uses())
        if (joined.is_graph_output() or in_branch) and isinstance(name, str):
            return name
    return ""


def is_mask(value: ir.Value) -> bool:
    """Whether an input is a padding mask of 0 and 1. Only its name tells."""
    return is_mask_name(str(value.name)) and g.rank(value) == 2


def is_mask_name(name: str) -> bool:
    return "mask" in name.lower() or "padding" in name.lower()


def padding_mask(shape: list[int], hide: str) -> np.ndarray:
    """Returns a mask [batch, length] of ones. Each sequence but the first of several has zeros at one end,
    unless `hide` is "nothing", "everything" or "holes"."""
    batch, length = shape
    if hide == "holes":
        shown = np.random.default_rng(0).random((batch, length)) < 0.6
        shown[:, 0:3:2], shown[:, 1:2] = True, length < 3
        return shown
    counts = 2 * np.arange(batch) + 2 * (batch == 1)
    if hide in ("nothing", "everything"):
        return np.full((batch, length), hide == "nothing")
    hidden = np.minimum(counts, length - 1)[:, None]
    at = np.arange(length)[None, :]
    return np.broadcast_to(at < length - hidden if hide == "right" else at >= hidden, (batch, length))


def hidden_tokens(case: Case) -> list[np.ndarray]:
    """Returns what each padding mask of a case hides."""
    masks = {name: array for name, array in case.items() if is_mask_name(name) and array.ndim == 2}
    return [(array != 0) == is_inverted(name, array.dtype) for name, array in masks.items()]


def hides_end(case: Case, ends: Sequence[int] = (0,)) -> bool:
    """Whether a padding mask of a case hides the first (0) or last (-1) token of a sequence."""
    return any(each[:, [*ends]].any() for each in hidden_tokens(case) if each.size)


def draws_random(node: ir.Node) -> bool:
    """Whether two runs of a node may differ. A Dropout that is told when to drop may drop."""
    mode = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    return node.op_type in _RANDOM or (mode is not None and g.scalar(mode) != 0)


def _reads(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yields the nodes that read an input's elements in whatever shape and dtype, with the index."""
    for node, index in value.uses():
        yield node, index
        if node.op_type in _PASS_THROUGH and index == 0:
            yield from _reads(node.outputs[0])


def _tables(value: ir.Value) -> Iterator[tuple[ir.TensorProtocol, int]]:
    """Yields the tables that an input of integers indexes, and along which axis."""
    for node, index in _reads(value):
        if node.op_type in ("Gather", "GatherElements", "EmbedLayerNormalization") and index:
            table = g.tensor(node.inputs[0])
            if table is not None:
                yield table, g.attribute(node, "axis", 0)


def _lengths(value: ir.Value) -> set[int]:
    """Returns by how much less than all its tokens attention over a cache gets as a length; or nothing."""
    return {6 - at for node, at in _reads(value) if node.op_type == "GroupQueryAttention" and at in (5, 6)}


def cases_of_ids(model: ir.Model, case: Case) -> tuple[str, list[Case]]:
    """Returns cases with the ids that may give the largest numbers, and the names of their inputs.

    These are all rows of a small table; of a large one those of reserved ids at both ends, and of the largest
    norms and elements. A case holds up to `_MOST_REPEATS` times the sequences of the given one, and its masks
    hide nothing. Beside images so many ids are tried as `_MOST_LARGE` cases of `MOST` elements hold.
    """
    ids, times, batch, count = dict[str, np.ndarray](), 1, None, 0
    for value in model.graph.inputs:
        array = case.get(str(value.name))
        if array is None or array.dtype.kind != "i" or not array.size or is_mask(value):
            continue
        if tables := [*_tables(value)]:
            rows = min(weights.sizes(table)[axis] for table, axis in tables)
            found = {each for table, axis in tables for each in _ids(table, axis, rows)}
            ids[str(value.name)] = np.array(sorted(found), array.dtype)
            times, batch = max(times, -(-len(found) // array.size)), (g.dims(value) or [None])[0]
            count = array.shape[0] if array.ndim else 0
    fitting = max(1, MOST // max(1, sum(array.size for array in case.values())))  # images are large
    times = min(times, _MOST_LARGE * fitting)
    repeats = min(times, _MOST_REPEATS, fitting) if isinstance(batch, str) else 1
    whole = dict[str, np.ndarray]()
    for value in model.graph.inputs:
        if (name := str(value.name)) in case:
            array = case[name]
            if is_mask(value) and array.ndim == 2:
                shown = padding_mask([*array.shape], "nothing") != is_inverted(name, array.dtype)
                array = shown.astype(array.dtype)
            for axis, dim in enumerate(g.dims(value) or ()):
                of_mask = is_mask(value) and not axis and isinstance(dim, str) and len(array) == count
                is_batch = dim == batch or of_mask  # whose batch torch.export may name otherwise
                array = np.concatenate([array] * repeats, axis) if is_batch and repeats > 1 else array
            whole[name] = array
    cases = list[Case]()
    for start in range(0, times, repeats) if ids else ():
        rolled = {name: np.roll(found, -start * case[name].size) for name, found in ids.items()}
        cases.append(whole | {name: np.resize(each, whole[name].shape) for name, each in rolled.items()})
    return ", ".join(ids), cases


def _ids(table: ir.TensorProtocol, axis: int, rows: int) -> Collection[int]:
    if rows <= _ALL_ROWS:
        return range(rows)
    if table.dtype.numpy().kind != "f":
        return range(_ENDS)
    sizes = [statistic(table, axis)[:rows] for statistic in (weights.row_norms, weights.row_maxima)]
    largest = np.concatenate([np.argpartition(each, -_LARGEST)[-_LARGEST:] for each in sizes])
    return {*range(_ENDS), *range(rows - _ENDS, rows), *map(int, largest)}


def acts_as_mask(value: ir.Value) -> bool:
    """Whether the graph uses integers as a mask: (1 - mask) * -10000, or only mask == 0 and the like."""
    uses = [*_uses(value)]
    numbers = [(node.op_type, g.scalar(node.inputs[1 - at]) if at >= 0 else None) for node, at in uses]
    hides = any(op_type == "Mul" and abs(number or 0) >= _HIDING for op_type, number in numbers)
    compares = [op_type in _COMPARES and number in (0.0, 1.0) for op_type, number in numbers]
    return hides or (bool(compares) and all(compares))


def _uses(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yields the nodes that read integers, in whatever shape and dtype, or 1 less them, with the index."""
    for node, index in value.uses():
        is_inverse = node.op_type == "Sub" and 1.0 in map(g.scalar, node.inputs)
        if is_inverse or (node.op_type in _PASS_THROUGH and index == 0):
            yield from _uses(node.outputs[0])
        elif node.op_type in _COMPARES or (node.op_type in _ARITHMETIC and len(node.inputs) == 2):
            yield node, index
        elif node.op_type not in ("Shape", "Size"):
            yield node, -1  # without another input


def _is_number(value: ir.Value) -> bool:
    """Whether the graph only computes with integers as numbers: they are no ids, sizes or masks of scores."""
    waiting, seen = [value], {value}
    while waiting:
        for node, index in waiting.pop().uses():
            if node.op_type in _ARITHMETIC or (node.op_type in _PASS_THROUGH and index == 0):
                waiting += [each for each in node.outputs if each not in seen]
                seen.update(node.outputs)
            elif node.op_type not in _TAKES_NUMBERS:
                return False
    return bool(value.uses()) and not acts_as_mask(value)


def read_npz(path: str, model: ir.Model, padding: str | None) -> tuple[list[Case], Sizes]:
    """Reads the inputs of a model from an .npz file, and the sizes of its dimensions; ExportError: the file
    cannot be read, an input is missing, or a mask breaks the promise of `padding`."""
    wanted = [str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers]
    try:
        file = np.load(path)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array without a name; numpy.savez writes several with names")
        given: Mapping[str, np.ndarray] = {name: file[name] for name in file.files}
    except Exception as error:
        raise ExportError(f"{option('inputs_file', path)}: cannot be read as .npz: {error}") from error
    if missing := [name for name in wanted if name not in given]:
        raise ExportError(
            f"{option('inputs_file', path)}: has {', '.join(given) or 'no arrays'}; the model also takes "
            f"{', '.join(missing)}"
        )
    case = {name: given[name] for name in wanted}
    case |= {name: each.astype(np.float32) for name, each in case.items() if each.dtype == np.float16}
    if padding == "right" and hides_end(case):
        raise ExportError(
            f"{option('inputs_file', path)}: a mask hides the first token of a sequence, and "
            f"{option('padding', 'right')} promises that none does. Leave out {option('padding')}, or give "
            "other inputs"
        )
    masks = [case[str(value.name)] for value in model.graph.inputs if is_mask(value)]
    two_axes = [array.shape for array in masks if array.ndim == 2 and array.size]
    sizes = [Sizes(batch, length, step=2) for batch, length in two_axes]
    found = {
        dim: case[str(value.name)].shape[axis]
        for value in model.graph.inputs
        for axis, dim in enumerate(g.dims(value) or ())
        if axis and isinstance(dim, str) and axis < np.ndim(case.get(str(value.name), 0))
    }
    return [case], replace(sizes[0] if sizes else SIZES[0], fixed=tuple(found.items()))
