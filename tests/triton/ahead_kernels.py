"""Kernels for the tests of compilation ahead of time, and launches of them as a trace gives them."""

from typing import Any

import triton
import triton.language as tl

from twinop.aot_kernels.expression import Expression, as_expression, constant, size
from twinop.aot_kernels.plan import Plan, Pointer, Scalar
from twinop.triton.intercept import label_of
from twinop.triton.recorder import TracedLaunch

ONE = constant(1)


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n).to(tl.float32)
    y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    tl.store(y_ptr + offsets, y, mask=offsets < n)


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(
        out_ptr + offsets,
        tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask),
        mask=mask,
    )


@triton.jit
def copy_rows_kernel(x_ptr, y_ptr, rows, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        at = tl.arange(0, BLOCK)
        tl.store(
            y_ptr + row * stride + at,
            tl.load(x_ptr + row * stride + at, mask=at < columns),
            mask=at < columns,
        )


@triton.jit
def strided_kernel(x_ptr, y_ptr, stride_0, stride_1, stride_2, rows, columns, BLOCK: tl.constexpr):
    """Copies rows of a tensor of three dimensions to a contiguous one."""
    batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + batch * stride_0 + row * stride_1 + at * stride_2, mask=at < columns)
    tl.store(y_ptr + (batch * rows + row) * columns + at, x, mask=at < columns)


@triton.jit(do_not_specialize=["a"], do_not_specialize_on_alignment=["b"])
def typed_kernel(y_ptr, a, b, c: tl.int64, d: tl.float64, e, flag, nothing):
    if flag:
        tl.store(y_ptr, a + b + c + d + e)


@triton.jit
def loop_kernel(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Walks three pointers at once, as matrix products do."""
    at = tl.arange(0, BLOCK)
    a_ptrs, b_ptrs, out_ptrs = a_ptr + at, b_ptr + at, out_ptr + at
    for _ in range(0, n, BLOCK):
        tl.store(out_ptrs, tl.load(a_ptrs) + tl.load(b_ptrs))
        a_ptrs += BLOCK
        b_ptrs += BLOCK
        out_ptrs += BLOCK


@triton.jit
def while_kernel(a_ptr, out_ptr, n):
    """A loop whose pointers change, a branch that chooses a pointer, and an atomic operation."""
    i = 0
    target = out_ptr
    while i < n:
        if i % 2 == 0:  # noqa: SIM108
            target = out_ptr + i
        else:
            target = out_ptr
        tl.atomic_add(target, tl.load(a_ptr + i))
        i += 1


@triton.jit
def counter_kernel(y_ptr, n):
    """Does not compile with a wider n: the type of total would change in the loop."""
    total = tl.program_id(0)
    for _ in range(3):
        total = total + n
    tl.store(y_ptr, total)


@triton.jit
def print_kernel(y_ptr, n):
    tl.device_print("n", n)
    tl.store(y_ptr, n)


@triton.jit
def assert_kernel(y_ptr, n):
    tl.device_assert(n > 0, "positive")
    tl.store(y_ptr, n)


@triton.jit
def wrong_kernel(y_ptr, n):
    tl.store(y_ptr + tl.arange(0, 3), n)


@triton.jit
def outer_kernel(y_ptr, n):
    _wrong_function(y_ptr, n)


@triton.jit
def _wrong_function(y_ptr, n):
    tl.store(y_ptr, tl.no_such_function(n))


@triton.jit(noinline=True)
def _shift(to_ptr, from_ptr, start, BLOCK: tl.constexpr):
    at = start * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at))
    return to_ptr + 4


@triton.jit
def calling_kernel(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    """Stores to y through a function that is not inlined, and to z through what the function returns."""
    _shift(y_ptr, x_ptr, tl.program_id(0), BLOCK)
    tl.store(_shift(z_ptr, x_ptr, tl.program_id(0), BLOCK), 1.0)


@triton.jit
def big_kernel(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    """Keeps two blocks of fp32 in shared memory for its product."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    y = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(8):
        y = tl.dot(tl.load(a_ptr + step * BLOCK * BLOCK + at), tl.load(b_ptr + step * BLOCK * BLOCK + at), y)
    tl.store(y_ptr + at, y)


@triton.jit
def dependent_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Waits for the kernel before it, as GPUs from 9.0 on can."""
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def pointer(name: str, base: str, index: int = 0, dtype: str = "float32") -> Pointer:
    return Pointer(base, index, name=name, dtype=dtype)


def number(name: str, value: Expression | int | float, kind: str = "int") -> Scalar:
    return Scalar(as_expression(value), kind, name)


def launch_of(
    kernel: Any, *arguments: Pointer | Scalar, options: dict[str, Any] | None = None, **constants: Any
) -> TracedLaunch:
    return TracedLaunch(
        kernel, label_of(kernel), "op.py:7", (ONE, ONE, ONE), arguments, constants, options or {}
    )


def gelu_launch(dtype: str = "float32") -> TracedLaunch:
    return launch_of(
        gelu_kernel,
        pointer("x_ptr", "input", dtype=dtype),
        pointer("y_ptr", "output", dtype=dtype),
        number("n", Expression.of("*", size(0, 0), size(0, 1))),
        BLOCK=1024,
    )


def plan_of(*launches: TracedLaunch) -> Plan[TracedLaunch]:
    return Plan(0, (2,), launches)
