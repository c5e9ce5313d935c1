"""x * x with a kernel that numba compiles: writes the C++ source of the op, with the kernel's machine code.

    python generate.py build/numba_square.generated.cpp

`twinop build` writes such sources of kernels in Triton, whose plans it traces. Here the plan is written by
hand.
"""

import re
import sys
from pathlib import Path

from cuda.bindings import nvjitlink
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
from twinop.record.schema_text import record_of

THREADS, ARCHS = 256, (80, 90)


def square(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] * x[i]


def compiled(arch: int) -> Image:
    pointer = types.CPointer(types.float32)
    signature = types.void(pointer, pointer, types.int64)
    cc = divmod(arch, 10)
    ptx, _ = cuda.compile(square, signature, device=False, abi="numba", cc=cc, output="ptx")
    # numba's own name for the kernel counts its compilations.
    (name,) = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    text = ptx.replace(name, "square").encode()
    linker = nvjitlink.create(1, [f"-arch=sm_{arch}"])
    nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "square")
    nvjitlink.complete(linker)
    code = bytearray(nvjitlink.get_linked_cubin_size(linker))
    nvjitlink.get_linked_cubin(linker, code)
    return Image(str(arch), bytes(code), threads=THREADS)


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
kernel = Kernel("square", "square, generate.py", tuple(map(compiled, ARCHS)))
archs = ",".join(f"{arch}-real" for arch in ARCHS)
generate(Contents("numba_square", (op,), (kernel,), archs), Path(sys.argv[1]))
