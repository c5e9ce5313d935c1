"""Kernels compiled for several architectures without a GPU."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ahead_kernels import (
    add_kernel,
    assert_kernel,
    big_kernel,
    calling_kernel,
    counter_kernel,
    dependent_kernel,
    gelu_kernel,
    gelu_launch,
    launch_of,
    loop_kernel,
    number,
    outer_kernel,
    plan_of,
    pointer,
    print_kernel,
    while_kernel,
    wrong_kernel,
)

from twinop.aot_kernels.expression import size
from twinop.aot_kernels.plan import Launch
from twinop.errors import BuildError
from twinop.triton.compile import Compiled, compile_kernels
from twinop.triton.intercept import label_of
from twinop.triton.launches import compile_plans
from twinop.triton.recorder import TracedLaunch
from twinop.triton.variants import variants


@pytest.fixture(scope="module", autouse=True)
def cache_for_all(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINOP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def refusal(*launches: TracedLaunch, archs: tuple[int, ...] = (80,)) -> str:
    with pytest.raises(BuildError) as error:
        compile_plans([plan_of(*launches)], archs, ptx=False)
    return str(error.value)


def test_gelu_for_several_architectures() -> None:
    """Those without portable PTX get that of 8.9."""
    (plan,), kernels = compile_plans([plan_of(gelu_launch("bfloat16"))], (90, 120))
    assert len(plan.steps) == 1
    assert len(kernels) == 3
    for kernel in kernels:
        *cubins, ptx = kernel.images
        assert [image.arch for image in cubins] == ["90a", "120a"]
        assert all(image.code.startswith(b"\x7fELF") for image in cubins)
        assert ptx.is_ptx and ptx.arch == "89"
        assert b".target sm_89\n" in ptx.code and b".version 8.0\n" in ptx.code
        assert b"//" not in ptx.code
        assert {(image.threads, image.shared) for image in kernel.images} == {(128, 0)}
        assert (kernel.name, kernel.scratch_pointers) == ("gelu_kernel", 2)
        assert kernel.label.startswith("gelu_kernel, ahead_kernels.py:")
    shipped = {image.code for kernel in kernels for image in kernel.images}
    # 1 MB for an op of three dtypes, with the code that launches the kernels.
    assert sum(map(len, shipped)) < 250_000
    here = str(Path(__file__).parent.parent.parent).encode()
    assert not any(word in code for code in shipped for word in (here, b"ahead_kernels", b"site-packages"))


def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = variants(gelu_launch())[0].kernel
    (first,) = compile_kernels([source], (80,), ptx=False)

    def no_compiler(*arguments: Any, **options: Any) -> None:
        raise AssertionError("ptxas was started")

    monkeypatch.setattr(subprocess, "run", no_compiler)
    assert compile_kernels([source], (80,), ptx=False) == [first]
    (other,) = compile_kernels([source], (80,), check_ptx=False)
    assert isinstance(other, Compiled) and [image.is_ptx for image in other.kernel.images] == [False, True]


@pytest.mark.parametrize(
    ("kernel", "options"), [(dependent_kernel, {"launch_pdl": True}), (gelu_kernel, {"num_ctas": 2})]
)
def test_what_older_gpus_cannot_run_has_no_ptx(kernel: Any, options: dict[str, Any]) -> None:
    launch = launch_of(kernel, *gelu_launch().arguments, options=options, BLOCK=1024)
    _, kernels = compile_plans([plan_of(launch)], (90,))
    assert [[image.arch for image in kernel.images] for kernel in kernels] == 3 * [["90a"]]
    assert {(kernel.pdl, kernel.cluster) for kernel in kernels} == {
        (options.get("launch_pdl", False), options.get("num_ctas", 1))
    }


def test_a_kernel_that_needs_32_bits_gets_a_general_variant_of_32_bits() -> None:
    launch = launch_of(counter_kernel, pointer("y_ptr", "output", dtype="int32"), number("n", size(0, 0)))
    (plan,), _ = compile_plans([plan_of(launch)], (80,), ptx=False)
    (step,) = plan.steps
    assert isinstance(step, Launch)
    assert [variant.parameters[1] for variant in step.variants] == [(1, "i32")] * 3
    assert step.variants[-1].requirements == ()


def test_limits_of_offsets_of_32_bits() -> None:
    tensors = [("input", 0), ("input", 1), ("output", 0)]
    pointers = [pointer(name, *t) for name, t in zip(("x_ptr", "y_ptr", "out_ptr"), tensors, strict=True)]
    narrow = launch_of(add_kernel, *pointers, number("n", size(0, 0)), BLOCK=64)
    wide = gelu_launch()
    (first, second), _ = compile_plans([plan_of(narrow, wide), plan_of(wide)], (80,), ptx=False)
    assert set(first.limits) == {(*tensor, 2**31 - 1) for tensor in tensors}
    assert second.limits == ()


def test_a_store_to_an_input_is_refused() -> None:
    launch = launch_of(
        loop_kernel, pointer("a_ptr", "output"), pointer("b_ptr", "input", 1), pointer("out_ptr", "input"),
        number("n", size(0, 0)), BLOCK=64,
    )  # fmt: skip
    message = refusal(launch)
    assert message.startswith("loop_kernel, ahead_kernels.py:")
    assert "it stores to out_ptr, which is an input of the op where op.py:7 launches it" in message


def test_an_atomic_operation_on_an_input_is_refused() -> None:
    launch = launch_of(
        while_kernel, pointer("a_ptr", "output"), pointer("out_ptr", "input"), number("n", size(0, 0))
    )  # fmt: skip
    assert "it stores to out_ptr" in refusal(launch)


def test_printing_and_asserting_are_refused() -> None:
    arguments = pointer("y_ptr", "output", dtype="int32"), number("n", size(0, 0))
    message = refusal(launch_of(print_kernel, *arguments))
    assert "print_kernel, ahead_kernels.py" in message and "tl.device_print" in message
    assert "tl.device_assert with" in refusal(launch_of(assert_kernel, *arguments, options={"debug": True}))
    compile_plans([plan_of(launch_of(assert_kernel, *arguments))], (80,), ptx=False)


def test_functions_that_are_not_inlined_are_followed() -> None:
    def launch(y: str, z: str) -> TracedLaunch:
        names = (("x_ptr", "input", 0), ("y_ptr", y, 1), ("z_ptr", z, 2))
        return launch_of(calling_kernel, *(pointer(*name) for name in names), BLOCK=64)

    (plan,), _ = compile_plans([plan_of(launch("output", "output"))], (80,), ptx=False)
    tensors = [("input", 0), ("output", 1), ("output", 2)]
    assert set(plan.limits) == {(*tensor, 2**31 - 1) for tensor in tensors}
    assert "it stores to y_ptr, which is an input" in refusal(launch("input", "output"))
    assert "it stores to z_ptr, which is an input" in refusal(launch("output", "input"))


def test_a_kernel_that_does_not_compile_names_its_line() -> None:
    arguments = pointer("y_ptr", "output", dtype="int32"), number("n", size(0, 0))
    message = refusal(launch_of(wrong_kernel, *arguments))
    line = int(label_of(wrong_kernel).rpartition(":")[2]) + 1
    assert message.startswith(f"wrong_kernel, ahead_kernels.py:{line}: it does not compile for ")
    assert "power of 2" in message


def test_a_called_function_that_does_not_compile_is_named() -> None:
    arguments = pointer("y_ptr", "output", dtype="int32"), number("n", size(0, 0))
    message = refusal(launch_of(outer_kernel, *arguments))
    assert message.startswith("outer_kernel, ahead_kernels.py:") and "no_such_function" in message


def test_too_much_shared_memory() -> None:
    names = (("a_ptr", "input", 0), ("b_ptr", "input", 1), ("y_ptr", "output", 0))
    pointers = [pointer(*name, "float16") for name in names]
    launch = launch_of(big_kernel, *pointers, options={"num_stages": 3, "num_warps": 8}, BLOCK=128)
    message = refusal(launch, archs=(86,))
    assert message.startswith("big_kernel, ahead_kernels.py:")
    assert "it needs 128 KiB of shared memory on compute capability 86, which has 99. Take" in message
    assert "build without 86" in message


def test_an_unknown_architecture() -> None:
    message = refusal(gelu_launch(), archs=(80, 42))
    assert "it does not compile for compute capability 42:" in message and "sm_42" in message
