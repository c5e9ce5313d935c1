"""Generates inputs for a model from nothing but its graph."""

from collections.abc import Mapping

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

# (batch, length) to try: odd sizes, a batch of one, and lengths for models that refuse short ones.
SIZES = ((3, 7), (1, 13), (2, 64), (1, 224))
_UNKNOWN_ROWS = 2  # integers of unknown meaning are 0 or 1, like masks and token types


def generate(model: ir.Model, batch: int, length: int, *, hide: str, seed: int = 0) -> Case:
    """Generates one case: ids within the tables that they index, masks of 0 and 1, and normal numbers.

    Args:
        length: of every dynamic dimension but the first.
        hide: which end of the sequences masks hide: "right", "left" or "nothing".
    """
    rng = np.random.default_rng(seed)
    case = {}
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        sizes = [
            dim if isinstance(dim, int) else (length if at else batch)
            for at, dim in enumerate(dims(value) or [])
        ]
        dtype = value.dtype
        assert dtype is not None and value.name is not None
        if is_mask(value):
            shown = padding_mask(sizes, hide)
            hides = dtype is ir.DataType.BOOL and "padding" in value.name  # torch's key_padding_mask
            case[value.name] = (~shown if hides else shown).astype(dtype.numpy())
        elif dtype.is_floating_point():
            case[value.name] = np.asarray(rng.standard_normal(sizes), dtype.numpy())
        elif dtype.is_integer():
            case[value.name] = np.asarray(rng.integers(0, table_rows(value), sizes), dtype.numpy())
        else:
            case[value.name] = np.asarray(rng.random(sizes) < 0.5, dtype.numpy())
    return case


def is_mask(value: ir.Value) -> bool:
    """Whether an input is a padding mask of 0 and 1. Only its name tells."""
    name = str(value.name).lower()
    return ("mask" in name or "padding" in name) and len(dims(value) or ()) == 2


def padding_mask(sizes: list[int], hide: str) -> np.ndarray:
    """Returns a mask [batch, length] of ones; each sequence but the first of several has zeros at one end."""
    batch, length = sizes
    counts = 2 * np.arange(batch) + 2 * (batch == 1)
    hidden = np.minimum(counts, length - 1)[:, None] if hide != "nothing" else 0
    at = np.arange(length)[None, :]
    return np.broadcast_to(at < length - hidden if hide == "right" else at >= hidden, (batch, length))


def hides_left(case: Case) -> bool:
    """Whether a mask of a case hides the first token of a sequence."""
    masks = [array for name, array in case.items() if "mask" in name.lower() and array.ndim == 2]
    return any((array[:, 0] == 0).any() for array in masks)


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


def read_npz(path: str, model: ir.Model) -> tuple[list[Case], tuple[int, int]]:
    """Reads the inputs of a model from an .npz file, and the batch and length of a mask among them.

    Raises:
        ExportError: the file cannot be read, or an input is missing.
    """
    wanted = [str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers]
    try:
        with np.load(path) as file:
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
    shapes = [case[str(value.name)].shape for value in model.graph.inputs if is_mask(value)]
    return [case], ((shapes[0][0], shapes[0][1]) if shapes else SIZES[0])
