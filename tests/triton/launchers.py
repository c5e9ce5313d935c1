"""Launchers of Triton kernels as users write them, and what they do when they run with plain numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from twinop.aot_kernels.plan import Fill, Plan, Pointer, Refuse, Scalar
from twinop.record.op_spec import OpSpec
from twinop.record.schema_text import record_of
from twinop.triton.recorder import TracedLaunch
from twinop.triton.trace import SAMPLE_SIZES, TracedOp


def record(
    name: str,
    *inputs: str,
    attributes: Mapping[str, tuple[str, str | None]] | None = None,
    outputs: Sequence[str] = ("y",),
    **texts: Any,
) -> OpSpec:
    """Makes a record. `attributes`: kind and default by name; an input "x?" is optional."""
    tensors = [f"Tensor? {each[:-1]}" if each.endswith("?") else f"Tensor {each}" for each in inputs]
    given = (attributes or {}).items()
    others = [f"{kind} {key}" + f"={default}" * (default is not None) for key, (kind, default) in given]
    returned = "Tensor" if outputs == ("y",) else f"({', '.join(f'Tensor {each}' for each in outputs)})"
    schema = f"{name}({', '.join(tensors + others)}) -> {returned}"
    return record_of(schema, "custom_domain", **{"dtypes": "float32", **texts})


def sized(**shapes: tuple[int | None, ...]) -> list[dict[str, torch.Tensor]]:
    """Returns samples as a build makes them: for each of the sizes, which None stands for."""
    return [
        {
            name: torch.empty([size if n is None else n for n in shape], device="meta")
            for name, shape in shapes.items()
        }
        for size in SAMPLE_SIZES
    ]


@triton.jit
def pointwise_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)


@triton.jit
def row_kernel(x, y, stride, n, eps, BLOCK: tl.constexpr, CAUSAL: tl.constexpr = False):
    pass


@triton.jit
def partial_kernel(x, locks, partial, rows, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    pass


@triton.jit
def sum_kernel(partial, y, rows, n, BLOCK: tl.constexpr):
    pass


def gelu(x):
    y = torch.empty_like(x)
    pointwise_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def softmax(x):
    rows, n = x.shape
    BLOCK = triton.next_power_of_2(n)
    num_warps = 4
    if BLOCK >= 2048:
        num_warps = 8
    if BLOCK >= 4096:
        num_warps = 16
    y = torch.empty_like(x)
    row_kernel[(rows,)](x, y, x.stride(0), n, 0.5, BLOCK=BLOCK, num_warps=num_warps)
    return y


def layer_norm(x, weight, *, eps):
    rows = x.view(-1, x.shape[-1])
    y, mean = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    BLOCK = min(512, triton.next_power_of_2(rows.shape[1]))
    num_warps = min(max(BLOCK // 64, 1), 4)
    row_kernel[(rows.shape[0],)](
        rows, y.view_as(rows), rows.stride(0), rows.shape[1], eps, BLOCK=BLOCK, num_warps=num_warps
    )
    pointwise_kernel[1, 1](weight, mean, mean.numel(), BLOCK=16)
    return y, mean


def column_sum(x):
    rows, n = x.shape
    GROUP = 64 if n > 1024 else 256
    locks = torch.zeros(2 * GROUP, dtype=torch.int32, device=x.device)
    partial = torch.zeros((GROUP, n), dtype=torch.float32, device=x.device)
    y = torch.empty(n, dtype=x.dtype, device=x.device)
    partial_kernel[(rows,)](x, locks, partial, rows, GROUP=GROUP, BLOCK=triton.next_power_of_2(n))

    def grid(meta):
        return (triton.cdiv(n, meta["BLOCK"]),)

    sum_kernel[grid](partial[1:], y, min(GROUP, rows), n, BLOCK=128)
    return y


CONFIGURATIONS = [
    triton.Config({"BLOCK_M": size, "BLOCK_N": 64}, num_warps=warps)
    for size, warps in ((512, 8), (32, 4), (128, 8))
]


def smaller(configs, arguments, **others):
    return [config for config in configs if config.kwargs["BLOCK_M"] < 512]


def time_of(*, BLOCK_M, **others):
    return 1 / BLOCK_M


PRUNING = {"early_config_prune": smaller, "perf_model": time_of, "top_k": 1}


@triton.autotune(CONFIGURATIONS, key=["M", "N"], prune_configs_by=PRUNING)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % 32 == 0})
@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, stride_am, stride_bk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    pass


def matmul(a, b, *, activation):
    assert a.is_cuda and a.is_contiguous()
    assert a.shape[1] == b.shape[0], f"{a.shape[1]} columns and {b.shape[0]} rows"
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)

    def grid(meta):
        return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

    with torch.cuda.device(a.device):
        matmul_kernel[grid](a, b, c, M, N, K, a.stride(0), b.stride(0), ACTIVATION=activation)
    return c


def attention(q, k, v, *, scale, causal):
    batch, heads, n, head = q.shape
    assert head in (32, 64), f"the head size is {head}; expected 32 or 64"
    out = torch.empty_like(q)
    grid = (triton.cdiv(n, 64), batch * heads)
    row_kernel[grid](q, out, q.stride(1), n, scale * 1.5 / head**0.5, BLOCK=head, CAUSAL=causal, num_stages=2)
    return out


def direct(launcher: Callable[..., Any], shapes: Sequence[Sequence[int]], **attributes: Any) -> list[Any]:
    """Runs a launcher with plain numbers.

    Returns:
        For each launch: the kernel's name, the grid, the numbers by name, the constants, the options.
    """
    launches = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        constants = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | {k: options.pop(k) for k in names if k in options}
        constants |= {
            p.name: values.pop(p.name) for p in kernel.params if p.is_constexpr and p.name in values
        }
        grid = tuple(grid(constants | values) if callable(grid) else grid)
        numbers = {name: v for name, v in values.items() if not isinstance(v, torch.Tensor)}
        launches.append((kernel.fn.__name__, (*grid, 1, 1)[:3], numbers, constants, options))

    def run_tuned(tuner: Any, *args: Any, **options: Any) -> None:
        tuner.fn.run(*args, **options, **CONFIGURATIONS[2].all_kwargs())

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(triton.runtime.Autotuner, "run", run_tuned),
        mock.patch.object(torch.cuda, "device", lambda device: mock.MagicMock()),
        mock.patch.object(torch.Tensor, "is_cuda", True),
    ):
        launcher(*(torch.empty(shape, device="meta") for shape in shapes), **attributes)
    return launches


def chosen(op: TracedOp, shapes: Sequence[Sequence[int]], *attributes: Any, arch: int = 90) -> Any:
    """Returns the only plan of the first dtypes that fits a call."""
    ranks = tuple(map(len, shapes))
    fitting = [
        plan
        for plan in op.plans
        if plan.combination == 0
        and plan.ranks == ranks
        and all(guard.evaluate(shapes, attributes, arch) for guard in plan.guards)
    ]
    assert len(fitting) == 1, fitting
    return fitting[0]


def evaluated(plan: Plan[TracedLaunch], shapes: Sequence[Sequence[int]], *attributes: Any) -> list[Any]:
    """Returns the launches of a plan for a call as `direct` does."""
    launches = []
    for step in plan.steps:
        assert not isinstance(step, Refuse), step.message
        if isinstance(step, TracedLaunch):
            scalars = [argument for argument in step.arguments if isinstance(argument, Scalar)]
            numbers = {each.name: each.value.evaluate(shapes, attributes) for each in scalars}
            grid = tuple(size.evaluate(shapes, attributes) for size in step.grid)
            launches.append(
                (step.kernel.fn.__name__, grid, numbers, dict(step.constants), dict(step.options))
            )
    return launches


def pointers(step: TracedLaunch | Fill) -> list[tuple[str, int]]:
    """Returns the base and index of each pointer of a step."""
    values = [step.pointer] if isinstance(step, Fill) else step.arguments
    return [(value.base, value.index) for value in values if isinstance(value, Pointer)]
