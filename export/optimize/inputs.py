"""Generates inputs for a model from nothing but its graph."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from twinop.errors import ExportError

from .graph import attribute, constant, dims

Case = dict[str, np.ndarray]
_PASS_THROUGH = (
    "Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze",
)  # fmt: skip
"""Operators whose output has elements of their first input."""

_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
}  # fmt: skip
_UNKNOWN_ROWS = 2  # integers of unknown meaning are 0 or 1, like masks and token types


@dataclass(frozen=True)
class Sizes:
    """The sizes of dynamic dimensions.

    Attributes:
        batch: of the first dimension of each input.
        length: of all others.
        step: by how much the lengths of two names differ: a query and a memory may have other lengths.
    """

    batch: int
    length: int
    step: int = 0


# To try: odd sizes, a batch of one, and lengths for models that refuse short ones; lengths that differ by
# name first.
SIZES = [
    Sizes(batch, length, step) for batch, length in ((3, 7), (1, 13), (2, 64), (1, 224)) for step in (2, 0)
]


def generate(model: ir.Model, sizes: Sizes, *, hide: str, seed: int = 0, positive: bool = False) -> Case:
    """Generates one case: ids within the tables that they index, masks of 0 and 1, and normal numbers.

    Args:
        sizes: of the dynamic dimensions. Dimensions of one name have one size.
        hide: which end of the sequences masks hide: "right", "left", "nothing" or "everything".
        positive: generate positive floats only, for logarithms and roots.
    """
    rng = np.random.default_rng(seed)
    case, by_name = {}, shapes(model, sizes)
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        dtype, shape = value.dtype, by_name[str(value.name)]
        assert dtype is not None and value.name is not None
        if is_mask(value):
            array = padding_mask(shape, hide) != _is_inverted(value.name, dtype.numpy())
        elif dtype.is_floating_point():
            normal = rng.standard_normal(shape)
            array = np.abs(normal) + 0.1 if positive else normal
        elif dtype.is_integer():
            if not (rows := table_rows(value)):
                raise ExportError(f"input {value.name} is an index into a table without rows")
            array = rng.integers(0, rows, shape)
        elif hide == "nothing" and "mask" in value.name.lower():
            array = np.ones(shape, bool)
        else:
            array = rng.random(shape) < 0.5
            if array.ndim >= 3:  # a mask of scores: some rows hide everything, others nothing
                array[..., :1, :] = False
                array[..., 1:2, :] = True
        case[value.name] = np.asarray(array, dtype.numpy())
    return case


def shapes(model: ir.Model, sizes: Sizes) -> dict[str, list[int]]:
    """Returns the shapes of the inputs. The first use of a name decides whether it is a batch or a length."""
    by_name: dict[str, int] = {}
    lengths, found = 0, {}
    for value in model.graph.inputs:
        shape = []
        for axis, dim in enumerate(dims(value) or []):
            if isinstance(dim, str) and dim not in by_name:
                by_name[dim] = sizes.length + sizes.step * lengths if axis else sizes.batch
                lengths += axis > 0
            size = by_name[dim] if isinstance(dim, str) else dim
            shape.append(size if size is not None else sizes.length if axis else sizes.batch)
        found[str(value.name)] = shape
    return found


def _is_inverted(name: str, dtype: np.dtype) -> bool:
    """Whether a mask hides what is 1, as torch's `key_padding_mask` does."""
    return dtype == np.bool_ and "padding" in name.lower()


def is_mask(value: ir.Value) -> bool:
    """Whether an input is a padding mask of 0 and 1. Only its name tells."""
    return is_mask_name(str(value.name)) and len(dims(value) or ()) == 2


def is_mask_name(name: str) -> bool:
    """Whether an input of this name is a mask."""
    return "mask" in name.lower() or "padding" in name.lower()


def padding_mask(shape: list[int], hide: str) -> np.ndarray:
    """Returns a mask [batch, length] of ones.

    Each sequence but the first of several has zeros at one end, unless `hide` is "nothing" or "everything".
    """
    batch, length = shape
    counts = 2 * np.arange(batch) + 2 * (batch == 1)
    if hide in ("nothing", "everything"):
        return np.full((batch, length), hide == "nothing")
    hidden = np.minimum(counts, length - 1)[:, None]
    at = np.arange(length)[None, :]
    return np.broadcast_to(at < length - hidden if hide == "right" else at >= hidden, (batch, length))


def hides_left(case: Case) -> bool:
    """Whether a padding mask of a case hides the first token of a sequence."""
    masks = {name: array for name, array in case.items() if is_mask_name(name) and array.ndim == 2}
    return any(
        ((array[:, :1] != 0) == _is_inverted(name, array.dtype)).any() for name, array in masks.items()
    )


def draws_random(node: ir.Node) -> bool:
    """Whether two runs of a node may differ."""
    training = constant(node.inputs[2]) if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    return node.op_type in _RANDOM or (training is not None and bool(training.all()))


def table_rows(value: ir.Value, seen: frozenset[ir.Value] = frozenset()) -> int:
    """Returns the number of rows of the smallest table that an input of integers indexes."""
    found = []
    for use in value.uses():
        node = use.node
        if node.op_type in ("Gather", "GatherElements", "EmbedLayerNormalization") and use.idx:
            table = constant(node.inputs[0])
            if table is not None:
                found.append(table.shape[attribute(node, "axis", 0)])
        elif node.op_type in _PASS_THROUGH and use.idx == 0 and node.outputs[0] not in seen:
            below = table_rows(node.outputs[0], seen | {value})
            found += [below] if below != _UNKNOWN_ROWS else []
    return min(found, default=_UNKNOWN_ROWS)


def read_npz(path: str, model: ir.Model, padding: str | None) -> tuple[list[Case], Sizes]:
    """Reads the inputs of a model from an .npz file, and the sizes of a padding mask among them.

    Raises:
        ExportError: the file cannot be read, an input is missing, or a mask breaks the promise of `padding`.
    """
    wanted = [str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers]
    try:
        file = np.load(path)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array without a name; numpy.savez writes several with names")
        given: Mapping[str, np.ndarray] = {name: file[name] for name in file.files}
    except Exception as error:
        raise ExportError(f"--inputs {path}: cannot be read as .npz: {error}") from error
    if missing := [name for name in wanted if name not in given]:
        raise ExportError(
            f"--inputs {path}: has {', '.join(given) or 'no arrays'}; the model also takes "
            f"{', '.join(missing)}"
        )
    case = {
        name: given[name].astype(np.float32) if given[name].dtype == np.float16 else given[name]
        for name in wanted
    }
    if padding == "right" and hides_left(case):
        raise ExportError(
            f"--inputs {path}: a mask hides the first token of a sequence, and --padding right promises that "
            "none does. Leave out --padding, or give other inputs"
        )
    masks = [case[str(value.name)] for value in model.graph.inputs if is_mask(value)]
    sizes = [
        Sizes(array.shape[0], array.shape[1], step=2) for array in masks if array.ndim == 2 and array.size
    ]
    return [case], sizes[0] if sizes else SIZES[0]
