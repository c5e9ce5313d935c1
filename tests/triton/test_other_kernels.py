"""Kernels of CUDA C++ and of numba in the plans of an op, compiled without a GPU."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ahead_kernels import number, plan_of, pointer
from numba import cuda

from twinop.aot_kernels.expression import constant, size
from twinop.aot_kernels.numba import NumbaKernel, numba_launches
from twinop.aot_kernels.nvrtc import CudaKernel, cuda_kernel, cuda_launches
from twinop.aot_kernels.plan import POINTER, Launch, Pointer, Scalar
from twinop.errors import BuildError
from twinop.triton.launches import compile_plans
from twinop.triton.traced import Argument, TracedLaunch

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


@cuda.jit
def square_kernel(x, y, by):
    i: int = cuda.grid(1)  # type: ignore[call-arg]
    if i < x.size:
        y[i, 0] = x[i] * x[i] * by


@cuda.jit
def failing_kernel(x):
    x[0] = no_such_name  # type: ignore[name-defined]  # noqa: F821


def launch_of(kernel: Any, *arguments: Argument) -> TracedLaunch:
    return TracedLaunch(kernel, kernel.label, "op.py:7", (ONE, ONE, ONE), arguments, block=(ONE, ONE, ONE))


def compiled(launch: TracedLaunch) -> tuple[Launch, Any]:
    (plan,), (kernel,) = compile_plans([plan_of(launch)], (80, 90))
    (step,) = plan.steps
    assert isinstance(step, Launch)
    return step, kernel


def scale_arguments() -> list[Argument]:
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
    assert kernel.label.startswith("scale, test_other_kernels.py:")


def test_a_kernel_of_cuda_that_does_not_compile() -> None:
    with pytest.raises(BuildError) as error:
        compiled(launch_of(wrong_kernel, pointer("y", "output")))
    first_line = int(wrong_kernel.label.rpartition(":")[2]) + 1
    assert str(error.value).startswith("wrong, test_other_kernels.py:")
    assert f'test_other_kernels.py({first_line + 1}): error: identifier "nothing" is undefined' in str(
        error.value
    )


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


def test_a_kernel_of_numba() -> None:
    shape = size(0, 0)
    x = Argument("x", Pointer("input", 0), "float32", (shape,))
    y = Argument("y", Pointer("output", 0), "float32", (shape, constant(3)))
    step, kernel = compiled(launch_of(NumbaKernel(square_kernel.py_func), x, y, number("by", 2.0, "fp32")))
    (variant,) = step.variants
    assert [kind for _, kind in variant.parameters].index(POINTER) == 4
    values = [
        argument if isinstance(argument, Pointer) else argument.value.evaluate([(5,)])
        for argument in step.arguments
    ]
    assert values == [
        0,
        0,
        5,
        4,
        Pointer("input", 0),
        5,
        4,
        0,
        0,
        15,
        4,
        Pointer("output", 0),
        5,
        3,
        12,
        4,
        2.0,
    ]
    assert variant.parameters[-1] == (16, "fp64")
    *cubins, ptx = kernel.images
    assert ptx.is_ptx and ptx.code.count(b".param .") >= len(values)
    assert [image.arch for image in cubins] == ["80", "90"]
    assert kernel.name == "square_kernel"
    assert all(b".text.square_kernel\0" in image.code for image in cubins)
    assert kernel.label.startswith("square_kernel, test_other_kernels.py:")


def test_a_kernel_of_numba_that_does_not_compile() -> None:
    x = Argument("x", Pointer("output", 0), "float32", (size(0, 0),))
    with pytest.raises(
        BuildError, match=r"failing_kernel, test_other_kernels.py:\d+: numba does not compile it"
    ):
        compiled(launch_of(NumbaKernel(failing_kernel.py_func), x))


def test_a_dtype_that_numba_does_not_have() -> None:
    x = Argument("x", Pointer("output", 0), "bfloat16", (size(0, 0),))
    with pytest.raises(BuildError, match="numba has no arrays of bfloat16"):
        compiled(launch_of(NumbaKernel(failing_kernel.py_func), x))


def test_absent_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(BuildError, match=r"scale, .*: NVRTC cannot be imported"):
        compiled(launch_of(scale_kernel, *scale_arguments()))
    with pytest.raises(BuildError, match=r"square_kernel, .*: numba cannot be imported"):
        compiled(launch_of(NumbaKernel(square_kernel.py_func), number("by", 1)))


class Recorded:
    """Stands for the recorder of a trace."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def launch(
        self, kernel: Any, label: str, grid: Sequence[Any], arguments: Mapping[str, Any], block: Sequence[Any]
    ) -> None:
        self.launches.append((kernel, label, tuple(grid), list(arguments.values()), tuple(block)))


def test_launches_are_recorded() -> None:
    recorded: Any = Recorded()
    with cuda_launches(recorded), numba_launches(recorded):
        scale_kernel[5, (32, 2)]("x", "y")
        square_kernel[(6, 7), 64]("x", "y", 2)
    first, second = recorded.launches
    assert isinstance(first[0], CudaKernel) and isinstance(second[0], NumbaKernel)
    assert first[2:] == ((5,), ["x", "y"], (32, 2))
    assert second[2:] == ((6, 7), ["x", "y", 2], (64,))


def test_a_stream_of_its_own_is_refused() -> None:
    recorded: Any = Recorded()
    with (
        numba_launches(recorded),
        pytest.raises(BuildError, match=r"square_kernel, .*: a launch with a stream"),
    ):
        square_kernel[1, 1, 5]("x", "y", 2)


def test_numbers_keep_their_expressions() -> None:
    step, _ = compiled(launch_of(scale_kernel, *scale_arguments()))
    assert step.arguments[2] == Scalar(size(0, 0), "int")
