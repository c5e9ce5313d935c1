"""twinop's ops in PyTorch: `torch.ops.custom_domain.*`, the same as functions, and modules over them.

    from twinop import torch_op

    y = torch_op.relu(x)                 # = torch.ops.custom_domain.relu(x); works under torch.func as well
    model = torch_op.replace_modules(model)   # nn.ReLU -> CustomReLU

Importing this package loads `libtwinop_torch.so`. `load_library(path)` adds the ops of another library; each
op of a loaded library is a function here (`torch_op.<name>`), with autograd, a fake for torch.compile and
export, a vmap rule and clear errors, all derived from the op's record (`kernels/ops/<name>.h`).
"""

if __name__ != "twinop.torch_op":
    raise ImportError(
        f"import twinop.torch_op, not {__name__}: a second copy would register the ops again. "
        "Put the repository root (not its parent folders) on PYTHONPATH"
    )

from collections.abc import Callable
from typing import Any

from twinop.library import find_library
from twinop.torch_op.modules import CustomReLU, replace_modules
from twinop.torch_op.registry import functions, load_library, records

__all__ = ["CustomReLU", "load_library", "records", "replace_modules"]

load_library(find_library("twinop_torch"))


def __getattr__(name: str) -> Callable[..., Any]:
    if name in functions:
        return functions[name]
    raise AttributeError(f"twinop.torch_op has no op {name!r}; loaded ops: {', '.join(sorted(functions))}")
