"""twinop's ops in PyTorch: `torch.ops.custom_domain.*`, the same as functions, and modules over them.

    from twinop import torch_op

    y = torch_op.relu(x)                 # = torch.ops.custom_domain.relu(x); works under torch.func as well
    model = torch_op.replace_modules(model)   # nn.ReLU -> CustomReLU, nn.LayerNorm -> CustomLayerNorm ...

Importing this package loads `libtwinop_torch.so`. `load_library(path)` adds the ops of another library; each
op of a loaded library is a function here (`torch_op.<name>`), with autograd, a fake for torch.compile and
export, a vmap rule and clear errors, all derived from the op's record (`kernels/ops/<name>.h`).

Inputs may be views. Elementwise ops read any strides where they are, and row-wise ops (softmax, the norms,
packed swiglu) rows at one distance from each other, such as the columns of a wider tensor; all else is copied
first. Outputs of elementwise ops have the memory order of the first dense input of their shape, others are
contiguous.

Operands have one dtype: nothing is promoted, but under torch.autocast `add`, `mul`, `pow` and `swiglu` take
the wider one. A Python number beside a tensor, `add(x, 2.0)`, becomes a 0-d tensor of its dtype, rounded to
it. The norms also take fp32 weights beside fp16 and bf16 rows.
"""

if __name__ != "twinop.torch_op":
    raise ImportError(
        f"import twinop.torch_op, not {__name__}: a second copy would register the ops again. "
        "Put the repository root (not its parent folders) on PYTHONPATH"
    )

from collections.abc import Callable
from typing import Any

from twinop.library import find_library
from twinop.torch_op.modules import (
    CustomGatedMLP,
    CustomGELU,
    CustomLayerNorm,
    CustomReLU,
    CustomRMSNorm,
    CustomSigmoid,
    CustomSiLU,
    CustomSoftmax,
    CustomSoftplus,
    CustomSwiGLU,
    CustomTanh,
)
from twinop.torch_op.registry import functions, load_library, records
from twinop.torch_op.replace import Replacement, replace_modules

__all__ = [
    "CustomGELU",
    "CustomGatedMLP",
    "CustomLayerNorm",
    "CustomRMSNorm",
    "CustomReLU",
    "CustomSiLU",
    "CustomSigmoid",
    "CustomSoftmax",
    "CustomSoftplus",
    "CustomSwiGLU",
    "CustomTanh",
    "Replacement",
    "load_library",
    "records",
    "replace_modules",
]

load_library(find_library("twinop_torch"))


def __getattr__(name: str) -> Callable[..., Any]:
    if name in functions:
        return functions[name]
    raise AttributeError(f"twinop.torch_op has no op {name!r}; loaded ops: {', '.join(sorted(functions))}")
