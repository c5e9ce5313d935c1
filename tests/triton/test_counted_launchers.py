"""Launchers of ops whose outputs have sizes that come from the data: examples/triton/masked_compact.py."""

import re
from typing import Any

import pytest
import torch
from launchers import record, sized
from record_driver import ROOT

from twinop.errors import BuildError, RecordError
from twinop.libraries.declare import load_module
from twinop.triton.trace import trace

pytest.importorskip("triton", reason="kernels in Python need it")
import twinop

EXAMPLE = load_module(ROOT / "examples/triton/masked_compact.py")
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def calls(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [((3, 1000), 0.5), ((5,), 1.0), ((2, 3, 5), 0.0), ((70_001,), 0.3), ((4, 0), 0.5)]
    return [
        (torch.randn(size, generator=generator).to(device), (torch.rand(size) < share).to(device))
        for size, share in sizes
    ]


@ON_EACH_DEVICE
def test_in_torch_without_a_library(device: str) -> None:
    for x, mask in calls(device):
        y = EXAMPLE.masked_compact(x, mask)
        assert torch.equal(y, x[mask]) and y.untyped_storage().nbytes() == 4 * y.numel()
    x, mask = calls(device)[0]
    x.requires_grad_()
    (grad,) = torch.autograd.grad(EXAMPLE.masked_compact(x, mask).square().sum(), x)
    torch.testing.assert_close(grad, torch.where(mask, 2 * x, 0))
    torch.library.opcheck(torch.ops.masked_compact.masked_compact, (x, mask))


@ON_EACH_DEVICE
def test_compiled_in_one_graph(device: str) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.ops.masked_compact.masked_compact(x, mask) * 2

    EXAMPLE.masked_compact(*calls(device)[0])  # registers it
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for x, mask in calls(device)[:2]:
            assert torch.equal(compiled(x, mask), x[mask] * 2)


def without_sizes(x):
    return torch.empty_like(x)


def of_another_dtype(x):
    return torch.empty_like(x), x.new_empty(1)


def too_many(x):
    return torch.empty_like(x), x.new_empty(2, dtype=torch.int64)


def of_another_shape(x):
    return x.new_empty(x.shape[0] + 1), x.new_empty(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (without_sizes, "without_sizes returns tensor; its schema has 1 output and, behind them, an int64"),
        (of_another_dtype, "returns float32 in its last tensor.* an int64 tensor of 1 for: n <= x[0]"),
        (too_many, "returns int64 in its last tensor.* an int64 tensor of 1 for: n <= x[0]"),
        (of_another_shape, "output y of f has another shape than '[n]'"),
    ],
)
def test_launchers_that_do_not_fit(launcher: Any, said: str) -> None:
    wanted = record("f", "x", sizes="n <= x[0]", shapes="y = [n]")
    with pytest.raises(BuildError, match=re.escape(said).replace(r"\.\*", ".*")):
        trace(wanted, launcher, sized(x=(None,)))


@pytest.mark.parametrize(
    "texts",
    [
        {"sizes": "n", "shapes": "y = [n]"},
        {"sizes": "n <= x[0]"},
        {"sizes": "n <= x[0]", "shapes": "y = [3, n]"},
        {"sizes": "n <= x[0]", "shapes": "y = [n, n]"},
    ],
)
def test_declarations_that_say_too_little(texts: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=r'n in sizes of f.*Expected sizes="n <= numel\(x\)", shapes'):
        twinop.triton_op("f(Tensor x) -> Tensor", body=torch.relu, domain="counted_f", **texts)(without_sizes)


def test_an_op_does_not_write_inputs_too() -> None:
    declare = twinop.triton_op(
        "f(Tensor(a!) x) -> Tensor", body=torch.relu, domain="counted_f", sizes="n <= x[0]", shapes="y = [n]"
    )
    with pytest.raises(RecordError, match="f has data-dependent shapes, so it cannot write to an input"):
        declare(without_sizes)
