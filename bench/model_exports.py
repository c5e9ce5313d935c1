"""The ONNX files of `twinop bench models`. Each function runs in a process of its own, on the CPU."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from twinop.export import export
from twinop.export.optimize import optimize

from .model_zoo import RIGHT, ROWS, Row

STOCK, ORTS, OURS = "stock", "optimizer", "twinop"
KINDS = (STOCK, ORTS, OURS)
FEW = 2  # exports and comparisons take a batch of two, as the batch dimension stays open


def dtype_of(row: Row, device: torch.device) -> torch.dtype:
    """Returns a row's dtype; on the CPU float32, where kernels of 16 bits are missing or slow."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    return dtype if device.type == "cuda" else torch.float32


def torch_export(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    path: Path,
    exporter: str = "dynamo",
    fixed: bool = False,
) -> Path:
    """Writes torch's own export, with an open batch dimension if it is not `fixed`."""
    dynamic = None if fixed else {name: {0: "batch"} for name in inputs}
    export(model, tuple(inputs.values()), path, exporter=exporter, dynamic=dynamic, verify=False)
    return path


def prepare(name: str, kind: str, dtype: str, small: bool, path: str) -> dict[str, Any]:
    """Writes the file of a column.

    Args:
        name: of the row.
        kind: one of `KINDS`.

    Returns:
        What the optimizers say of it.
    """
    row, target, given = ROWS[name], Path(path), getattr(torch, dtype)
    inputs = row.batch(small, None if row.graph else FEW)
    narrow = {
        each: tensor.to(given) if tensor.is_floating_point() else tensor for each, tensor in inputs.items()
    }
    if kind == STOCK:
        torch_export(row.model(small, row.exported).to(given), narrow, target, fixed=row.graph)
        return {}
    source = target.with_name(f"{target.stem}-source.onnx")
    if kind == OURS:
        torch_export(row.model(small, row.exported), inputs, source, fixed=row.graph)
        np.savez(target.with_suffix(".npz"), **{each: tensor.numpy() for each, tensor in inputs.items()})  # type: ignore[arg-type]
        made = optimize(
            source,
            target,
            dtype=dtype,
            padding=RIGHT if row.padding == RIGHT else None,
            inputs_file=target.with_suffix(".npz"),
        )
        facts = asdict(made)
        return {each: facts[each] for each in ("made", "left", "taken_back", "notes", "error", "own_error")}
    return _orts(row, small, given, source, narrow if given is torch.bfloat16 else inputs, target)


def _orts(
    row: Row,
    small: bool,
    dtype: torch.dtype,
    source: Path,
    inputs: Mapping[str, torch.Tensor],
    target: Path,
) -> dict[str, Any]:
    """ONNX Runtime's own optimizer, whose conversion knows float16 only: bfloat16 is exported as such."""
    from onnxruntime.transformers import optimizer

    model = row.model(small, attention="eager")  # the form that it recognises
    given = model.to(dtype) if dtype is torch.bfloat16 else model
    torch_export(given, inputs, source, "torchscript", fixed=row.graph)
    size = row.small if small else row.size
    made = optimizer.optimize_model(
        str(source),
        model_type=row.model_type,
        num_heads=size.heads,
        hidden_size=size.width,
        opt_level=0,
        use_gpu=True,
    )
    if dtype is torch.float16:
        made.convert_float_to_float16(keep_io_types=False)
    onnx.save(made.model, str(target))
    fused = made.get_fused_operator_statistics()
    return {"made": {kind: count for kind, count in fused.items() if count}}
