"""twinop's ops in PyTorch: `torch.ops.custom_domain.*`, the same as functions, and modules over them.

    from twinop import torch_op

    y = torch_op.relu(x)                 # = torch.ops.custom_domain.relu(x); works under torch.func as well
    model = torch_op.replace_modules(model)   # nn.ReLU -> CustomReLU, nn.LayerNorm -> CustomLayerNorm ...

Importing this package loads `libcustom_ops.so`: each of its ops is a function here (`torch_op.<name>`), with
autograd, a fake for torch.compile and export, a vmap rule and clear errors, all derived from the op's record
(`kernels/ops/<name>.h`). `load(path)` does the same for another library and returns its ops:

    mish = torch_op.load("build/libmish.so")
    y = mish.mish(x)                 # = torch.ops.mish.mish(x); the library's domain is the namespace

A package that AOTInductor compiled names the ops as `torch.ops` does, and no library. The process that loads
the package loads the libraries of these ops first: `from twinop import torch_op`, then `torch_op.load(path)`
for those of other domains.

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

from .modules import (
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
from .registry import Ops, functions, load, records
from .replacement import Replacement, replace_modules

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
    "Ops",
    "Replacement",
    "load",
    "records",
    "replace_modules",
]

load(find_library("custom_ops"))


def __getattr__(name: str) -> Callable[..., Any]:
    if name in functions:
        return functions[name]
    raise AttributeError(f"twinop.torch_op has no op {name!r}; loaded ops: {', '.join(sorted(functions))}")
