"""twinop's ops in PyTorch: `torch.ops.custom_domain.*`, the same as functions, and modules over them.

    from twinop import torch_op

    y = torch_op.relu(x)                 # = torch.ops.custom_domain.relu(x); works under torch.func as well
    model = torch_op.replace_modules(model)   # nn.ReLU -> CustomReLU, nn.LayerNorm -> CustomLayerNorm ...

Importing this package loads `libcustom_ops.so`, or `libcustom_relu.so` where only `./build.sh demo` has run.
Each of its ops is a function here (`torch_op.<name>`), with autograd, a fake for torch.compile and export, a
vmap rule and clear errors, all derived from the op's record (`kernels/ops`). `load(path)` does the same for
another library and returns its ops:

    mish = torch_op.load("build/libmish.so")
    y = mish.mish(x)                 # = torch.ops.mish.mish(x); the library's domain is the namespace

`load_domain("mish")` finds the library (`twinop.libraries.find`) and loads it.

A package that AOTInductor compiled names ops as `torch.ops` does, without their libraries. The process that
loads the package first loads these libraries: with `from twinop import torch_op`, and with
`torch_op.load(path)` for other domains.

Inputs may be views. Elementwise ops read tensors with any strides in place. Row-wise ops (softmax, the norms,
packed swiglu) read rows at a constant distance from each other in place, such as some columns of a wider
tensor. Other views are copied first. An output of an elementwise op has the memory order of the first dense
input of its shape. Other outputs are contiguous.

Operands have one dtype, and nothing is promoted. Under torch.autocast, `add`, `mul`, `pow` and `swiglu`
promote to the wider dtype, and `linear` and `linear_swiglu` convert to autocast's. A Python number beside a
tensor, `add(x, 2.0)`, becomes a 0-d tensor of the tensor's dtype. The norms also take fp32 weights with fp16
and bf16 rows.

`linear(x, weight, bias, residual)` is activation(x W + bias + residual). In `linear_swiglu`, x W + bias is a
gate and then as many others, and the result activation(gate) * others. With layout "nk" the weight is as in
torch's layers, with "kn" as in ONNX. With `rms_eps`, x is first divided by sqrt(mean(x^2) + rms_eps). TF32
is used for fp32 only if the environment says TWINOP_TF32=1 before the first product.
"""

if __name__ != "twinop.torch_op":
    raise ImportError(
        f"import twinop.torch_op, not {__name__}: a second copy would register the ops again. "
        "Put the repository root (not its parent folders) on PYTHONPATH"
    )

from collections.abc import Callable
from typing import Any

from twinop.libraries.find import find_library_of
from twinop.libraries.library import find_library

from . import linear_rules, second_derivatives, written_derivatives  # noqa: F401 (rules of ops)
from .eager_kernels import load_declared
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
from .registry import Ops, functions, library_of, load, missing_op, records
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
    "library_of",
    "load",
    "load_declared",
    "load_domain",
    "records",
    "replace_modules",
]

load(find_library("custom_ops", "custom_relu"))


def load_domain(domain: str) -> Ops:
    """Finds the library of a domain in `build/`, in installed packages or in twinop's folders, and loads it.

    Raises:
        LibraryError: there is none, several packages have the domain, or `load` refuses the library.
    """
    return load(find_library_of(domain))


def __getattr__(name: str) -> Callable[..., Any]:
    if name in functions:
        return functions[name]
    raise AttributeError(missing_op(name))
