"""What cannot be traced is refused with the line of the launcher."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from launchers import matmul_kernel, pointwise_kernel, record, row_kernel
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from twinop.errors import BuildError
from twinop.triton.trace import trace

OUTSIDE = torch.empty(3)


def launch(x: Any, y: Any, grid: Any = (1,), n: Any = 3, block: Any = 16) -> Any:
    pointwise_kernel[grid](x, y, n, BLOCK=block)
    return y


def filled(x: Any, grid: Any = (1,), n: Any = 3, block: Any = 16) -> Any:
    return launch(x, torch.empty_like(x), grid, n, block)


def writes(x):
    x.zero_()
    return torch.empty_like(x)


def processors_of_triton(x):
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    return filled(x, (properties["multiprocessor_count"],))


def always(x):
    raise ValueError("never")


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (lambda x: filled(x, (x[0].item(),)), "reads an element of a tensor"),
        (lambda x: launch(x, x + 1), "computes with torch.add.*Compute it in a kernel"),
        (lambda x: launch(x[[0, 1]], x), "computes with torch.index"),
        (lambda x: launch(x[x.shape[0] > 1], x), "computes with torch.index"),
        (lambda x: launch(x[:, None].expand(-1, 2).contiguous(), x), "computes with torch.clone"),
        (lambda x: launch(x[::-1], x), "refuses all calls; the first says: .*ValueError: .*step must be pos"),
        (lambda x: filled(x, block=x.numel()), "BLOCK varies .* without a range.*next_power_of_2"),
        (lambda x: filled(x, n=int(x.numel())), "takes one value of a size"),
        (lambda x: x.view(-1), "returns an input, or a view of one, as output 0"),
        (lambda x: launch(x, x), "returns an input, or a view of one, as output 0"),
        (lambda x: launch(x, torch.empty_like(x)[1:]), "returns a view as output 0"),
        (lambda x: (filled(x), filled(x)), "<lambda> returns tensor, tensor; its schema has 1 output$"),
        (writes, "writes to an input"),
        (lambda x: torch.full_like(x, 0.1), r"fills tensors with a byte, and 0\.1 in float32 has several"),
        (lambda x: launch(OUTSIDE, torch.empty_like(x)), "x of pointwise_kernel, .* is neither an input"),
        (lambda x: torch.empty(3, device="cpu"), "a tensor on the device cpu"),
        (lambda x: filled(x, (x.numel() / 16,)), "its grid is .SymFloat.; expected one to three ints"),
        (lambda x: pointwise_kernel[(1,)](x, x, BLOCK=16), "missing a required argument: 'n'"),
        (lambda x: filled(x, n="three"), "n is a str; a library can give a kernel tensors and numbers"),
        (
            lambda x: launch(TensorDescriptor(x, [x.numel()], [1], [16]), torch.empty_like(x)),
            "pointwise_kernel, launchers.py:.*: x is a TensorDescriptor; .*make_tensor_descriptor",
        ),
        (
            lambda x: torch.cuda.get_device_properties(x.device).multi_processor_count,
            "asks for multi_processor_count of the GPU, and a library serves several",
        ),
        (
            lambda x: matmul_kernel[(1,)](*[x] * 3, *range(5), ACTIVATION="none", BLOCK_M=3, num_warps=8),
            "matmul_kernel: BLOCK_M, num_warps: in a configuration and in the call",
        ),
        (processors_of_triton, "asks for utils of the GPU.*torch.cuda.get_device_capability"),
        (always, "refuses all calls; the first says: .*ValueError: never"),
        (lambda x: torch.empty_like(x, dtype=torch.complex64), "complex64, which no op has"),
        (
            lambda x: x.new_empty(triton.next_power_of_2(x.shape[0])),
            r'no expression was found for the shape of output y of f.*shapes="y = \[x\[0\]\]"',
        ),
    ],
    ids=range(26),
)
def test_a_launcher_is_refused_with_its_line(launcher: Callable[..., Any], message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        trace(record("f", "x"), launcher, [{"x": torch.empty(5)}])
    assert re.match(r"test_refused\.py:\d+: ", str(caught.value))


def test_a_kernel_with_launch_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernel, "pre_run_hooks", [print])

    def launcher(x):
        row_kernel[(1,)](x, torch.empty_like(x), 1, 2, 3, BLOCK=16)

    with pytest.raises(BuildError, match=r"row_kernel, launchers.py:\d+: it has launch hooks"):
        trace(record("f", "x"), launcher, [{"x": torch.empty(5)}])


def test_the_interpreter() -> None:
    interpreted = InterpretedFunction(pointwise_kernel.fn)

    def launcher(x):
        interpreted[(1,)](x, torch.empty_like(x), 3, BLOCK=16)

    message = r"test_refused.py:\d+: pointwise_kernel: .*interpreter mode.*Unset TRITON_INTERPRET"
    with pytest.raises(BuildError, match=message):
        trace(record("f", "x"), launcher, [{"x": torch.empty(5)}])


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0"])
def test_an_untested_triton(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)

    with pytest.raises(BuildError, match=rf"Triton {version} was not tested .* expected 3.6 to 3.9"):
        trace(record("f", "x"), filled, [{"x": torch.empty(5)}])


def test_texts_of_the_record_that_do_not_hold_are_refused() -> None:
    samples = [{"x": torch.empty(5)}]
    with pytest.raises(BuildError, match=r"output y of f has another shape than 'x\[1:\]'"):
        trace(record("f", "x", shapes="y = x[1:]"), filled, samples)
    with pytest.raises(BuildError, match="has the dtype float32; dtypes='float32 y=float16' says float16"):
        trace(record("f", "x", dtypes="float32 y=float16"), filled, samples)


def test_a_text_without_choices_is_refused() -> None:
    with pytest.raises(BuildError, match='name its values: choices="mode = a | b"'):
        trace(record("f", "x", attributes={"mode": ("str", None)}), lambda x, mode: x, [{"x": OUTSIDE}])
