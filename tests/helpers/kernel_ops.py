"""Files of ops whose kernels are written in Triton, for the tests."""

from pathlib import Path

MISH = """\
import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def NAME_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offsets, mask=offsets < n).to(tl.float32)
    e = 1 + tl.exp(v)
    tl.store(y + offsets, v * (e * e - 1) / (e * e + 1), mask=offsets < n)


def gradient(grad, x):
    t = torch.tanh(torch.nn.functional.softplus(x))
    return grad * (t + x * (1 - t * t) * torch.sigmoid(x))


@twinop.triton_op("NAME(Tensor x) -> Tensor", body=torch.nn.functional.mish, backward=gradient)
def NAME(x):
    y = torch.empty_like(x)
    NAME_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
"""


def mish_file(folder: Path, name: str) -> Path:
    """Writes the file of an op of this name, which computes Mish."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(MISH.replace("NAME", name))
    return path
