"""How much memory and disk a model takes while it is optimised, before anything of it is written.

What is held at once is a segment, not the model (`segments.py`): its weights as the original's and the
result's session have them, in fp32 where the CPU lacks their dtype.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from twinop.errors import ExportError
from twinop.system.memory import free_bytes

from . import graph as g
from . import sliced
from .segments import MOST_BYTES

_BASE = 500_000_000  # bytes: Python, ONNX Runtime and the graph, in both processes
_COPIES = 3.5  # of a segment in fp32, as a session has it: measured, 2.3 GB for 8B in fp16, 1.0 GB in int4
_BESIDE = 200_000_000  # bytes on the disk that are not the result's, at most
_SMALL = 10_000_000  # and of a small model, beside as much as its weights


@dataclass(frozen=True)
class Estimate:
    """Bytes that a run takes, and those that are free."""

    memory: int
    disk: int
    free_memory: int
    free_disk: int

    def __str__(self) -> str:
        """The estimate as a line of text."""
        return (
            f"takes about {_gb(self.memory)} of memory ({_gb(self.free_memory)} are free) and "
            f"{_gb(self.disk)} of disk ({_gb(self.free_disk)} are free)"
        )

    def require(self, source: Path, target: Path) -> None:
        """Raises ExportError if memory or disk is too small: nothing has been written yet."""
        if self.memory > self.free_memory:
            raise ExportError(
                f"{source}: optimising it takes about {_gb(self.memory)} of memory, and "
                f"{_gb(self.free_memory)} are free (the machine's, or what the limit of a cgroup leaves). "
                "Raise the limit, or use a machine with more"
            )
        if self.disk > self.free_disk:
            raise ExportError(
                f"{target}: to write it takes {_gb(self.disk)} of disk, and {_gb(self.free_disk)} are free "
                f"in {target.parent}. Free space, or name another folder"
            )


def estimate(model: ir.Model, target: Path, dtype: str = "") -> Estimate:
    """Estimates what a model takes as its file has it; `dtype`: what floating-point weights get, "" if they
    keep theirs."""
    tensors = g.tensors(model)
    wides = [_written(each, 32) for each in tensors]  # in the dtype in which the CPU computes
    largest = min(max(wides, default=0), sliced.MOST_BYTES)
    stored, wide = sum(int(each.nbytes) for each in tensors), sum(wides)
    held = min(wide, max(largest, MOST_BYTES * wide // max(stored, 1)))
    bits = int(dtype[-2:]) if dtype else 0
    disk = sum(_written(tensor, bits) for tensor in tensors) + min(_BESIDE, stored + _SMALL)
    folder = next(each for each in (target, *target.absolute().parents) if each.is_dir())
    usage = shutil.disk_usage(folder)
    free = usage.free if usage.total else disk  # a file system without sizes says itself what it cannot write
    return Estimate(int(_BASE + _COPIES * held), disk, free_bytes(), free)


def _written(tensor: ir.TensorProtocol, bits: int) -> int:
    """Returns the bytes of a tensor, if its numbers get so many bits, where they are floats."""
    changes = bits and tensor.dtype.is_floating_point() and tensor.dtype.bitwidth >= 16
    return tensor.size * bits // 8 if changes else int(tensor.nbytes)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"
