"""x * x with a kernel that numba compiles: writes the C++ source of the op, with the kernel as PTX.

    python generate.py build/numba_square.generated.cpp

`twinop build` writes such sources of kernels in Triton, whose plans it traces. Here the plan is written by
hand.
"""

import re
import sys
from pathlib import Path

from numba import cuda, types

from twinop.aot_kernels.expression import constant, size
from twinop.aot_kernels.generate import generate
from twinop.aot_kernels.plan import (
    POINTER,
    Contents,
    DeviceOp,
    Image,
    Kernel,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Variant,
)
from twinop.schema_text import record_of

THREADS, ARCH = 256, 80


def square(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] * x[i]


def compiled() -> Kernel:
    pointer = types.CPointer(types.float32)
    signature = types.void(pointer, pointer, types.int64)
    cc = divmod(ARCH, 10)
    ptx, _ = cuda.compile(square, signature, device=False, abi="numba", cc=cc, output="ptx")
    (name,) = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    return Kernel(
        name, "square, generate.py", (Image(str(ARCH), ptx.encode(), is_ptx=True, threads=THREADS),)
    )


def plan(rank: int) -> Plan:
    """What a call with an input of this rank does: one launch, with a thread for each element."""
    n = constant(1)
    for dimension in range(rank):
        n *= size(0, dimension)
    arguments = (Pointer("input", 0), Pointer("output", 0), Scalar(n, "int", "n"))
    general = Variant((), ((0, POINTER), (1, POINTER), (2, "i64")), kernel=0)
    blocks = (n + (THREADS - 1)) // THREADS
    return Plan(0, (rank,), (Launch((blocks, constant(1), constant(1)), arguments, (general,)),))


record = record_of("numba_square(Tensor x) -> Tensor", "numba_square", dtypes="float32")
op = DeviceOp(record, tuple(plan(rank) for rank in range(1, 5)))
generate(Contents("numba_square", (op,), (compiled(),), f"{ARCH}-virtual"), Path(sys.argv[1]))
