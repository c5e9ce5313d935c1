"""Kernels of CUDA C++ in the plans of an op, compiled without a GPU."""

import sys
from typing import Any

import pytest
import torch
from ahead_kernels import number, plan_of, pointer
from launchers import record

from twinop.aot_kernels.expression import constant, size
from twinop.aot_kernels.nvrtc import CudaKernel, cuda_kernel
from twinop.aot_kernels.plan import POINTER, Launch, Pointer, Scalar
from twinop.errors import BuildError
from twinop.triton.launches import compile_plans
from twinop.triton.trace import trace
from twinop.triton.traced import TracedLaunch

ONE = constant(1)

scale_kernel = cuda_kernel(
    """
    extern "C" __global__ void scale(const float* x, float* y, long long n, int step, float by, bool negate) {
      for (long long i = blockIdx.x; i < n; i += step) y[i] = negate ? -x[i] * by : x[i] * by;
    }
    """,
    "scale",
)

wrong_kernel = cuda_kernel(
    """extern "C" __global__ void wrong(float* y) {
      y[0] = nothing;
    }""",
    "wrong",
)


def launch_of(kernel: Any, *arguments: Pointer | Scalar) -> TracedLaunch:
    return TracedLaunch(kernel, kernel.label, "op.py:7", (ONE, ONE, ONE), arguments, block=(ONE, ONE, ONE))


def compiled(launch: TracedLaunch) -> tuple[Launch, Any]:
    (plan,), (kernel,) = compile_plans([plan_of(launch)], (80, 90))
    (step,) = plan.steps
    assert isinstance(step, Launch)
    return step, kernel


def scale_arguments() -> list[Pointer | Scalar]:
    return [
        pointer("x", "input"),
        pointer("y", "output"),
        number("n", size(0, 0)),
        number("step", 4),
        number("by", 0.5, "fp32"),
        number("negate", 1, "i1"),
    ]


def test_a_kernel_of_cuda() -> None:
    step, kernel = compiled(launch_of(scale_kernel, *scale_arguments()))
    (variant,) = step.variants
    kinds = [kind for _, kind in variant.parameters]
    assert kinds == [POINTER, POINTER, "i64", "i32", "fp32", "u8"]
    assert variant.requirements == ()
    assert step.block == (ONE, ONE, ONE)
    *cubins, ptx = kernel.images
    assert [image.arch for image in cubins] == ["80", "90"]
    assert all(image.code.startswith(b"\x7fELF") for image in cubins)
    assert ptx.is_ptx and ptx.arch == "80" and ptx.code.rstrip().endswith(b"}")
    assert (kernel.name, kernel.scratch_pointers) == ("scale", 0)
    assert kernel.label.startswith("scale, test_nvrtc.py:")


def test_a_kernel_of_cuda_that_does_not_compile() -> None:
    with pytest.raises(BuildError) as error:
        compiled(launch_of(wrong_kernel, pointer("y", "output")))
    first_line = int(wrong_kernel.label.rpartition(":")[2]) + 1
    assert str(error.value).startswith("wrong, test_nvrtc.py:")
    assert f'test_nvrtc.py({first_line + 1}): error: identifier "nothing" is undefined' in str(error.value)


def test_a_name_that_the_source_does_not_have() -> None:
    kernel = cuda_kernel('extern "C" __global__ void one(float* y) {}', "two")
    with pytest.raises(BuildError, match=r"two, .*: the source has no kernel of this name"):
        compiled(launch_of(kernel, pointer("y", "output")))


def test_arguments_that_do_not_fit_a_kernel_of_cuda() -> None:
    x, y, *numbers = scale_arguments()
    with pytest.raises(BuildError, match=r"scale, .*: op.py:7 gives it 5 arguments; expected 6"):
        compiled(launch_of(scale_kernel, x, y, *numbers[:-1]))
    with pytest.raises(BuildError, match=r"gives a tensor as argument 4; its parameter has the type u32"):
        compiled(launch_of(scale_kernel, x, y, numbers[0], x, *numbers[2:]))
    with pytest.raises(BuildError, match=r"gives a number of type fp32 as argument 3; .* the type u64"):
        compiled(launch_of(scale_kernel, x, y, numbers[2], *numbers[1:]))


def test_a_kernel_of_cuda_outside_of_a_library() -> None:
    with pytest.raises(
        BuildError, match=r"scale, .*: it runs in a library. Build the op's file with `twinop build`"
    ):
        scale_kernel[1, 1](None)


def test_nvrtc_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BuildError, match=r"scale, .*: NVRTC cannot be imported"):
        compiled(launch_of(scale_kernel, *scale_arguments()))


def test_launches_are_recorded() -> None:
    def launcher(x):
        y = torch.empty_like(x)
        scale_kernel[5, (32, 2)](x, y, x.numel(), 1, 0.5, False)
        return y

    (plan,) = [plan for plan in trace(record("f", "x"), launcher).plans if plan.ranks == (1,)]
    (step,) = plan.steps
    assert isinstance(step, TracedLaunch) and isinstance(step.kernel, CudaKernel)
    assert [each.evaluate() for each in (*step.grid, *(step.block or ()))] == [5, 1, 1, 32, 2, 1]
    assert step.arguments[2] == Scalar(size(0, 0), "int", "argument 3")
