"""Ops on DTensors: values and gradients of two gloo processes are those of one process."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion
from user_ops import output_of

import twinop
from twinop import torch_op
from twinop.libraries.library import find_library

WHOLE = Replicate()
SPLITS = [Replicate(), Shard(0), Shard(1), Shard(2)]
ROWS = Shard(1) if TorchVersion(torch.__version__) >= "2.13" else Shard(0)
"""DTensor of older torch does not view a tensor that is split along its second dimension as a matrix."""

Call = tuple[str, Callable[..., Any], list[torch.Tensor], list[Placement], list[Placement]]


def _calls() -> list[Call]:
    """Name, function, arguments, their placements, and the placements expected of the outputs."""
    x, row, wide = torch.randn(4, 6, 8), torch.randn(8), torch.randn(16)
    up, down = torch.randn(16, 8), torch.randn(8, 16)
    calls: list[Call] = []
    for split in SPLITS:
        kept = WHOLE if split == Shard(2) else split  # the last dimension is reduced
        calls += [
            ("gelu", torch_op.gelu, [x], [split], [split]),
            ("mul", torch_op.mul, [x, torch.randn(1, 8)], [split, WHOLE], [split]),
            ("swiglu", torch_op.swiglu, [x, x + 1], [split, split], [split]),
            ("softmax", torch_op.softmax, [x], [split], [kept]),
            ("rms_norm", torch_op.rms_norm, [x, row], [split, WHOLE], [kept]),
            ("layer_norm", torch_op.layer_norm, [x, row, row + 1], [split, WHOLE, WHOLE], [kept]),
            ("add_rms_norm", torch_op.add_rms_norm, [x, x + 1, row], [split, split, WHOLE], [kept, kept]),
            ("swiglu_packed", torch_op.swiglu_packed, [x], [split], [kept]),
            ("ada_layer_norm", torch_op.ada_layer_norm, [x, x[:, 0], x[:, 1]], [split, WHOLE, WHOLE], [kept]),
        ]
    calls += [
        ("rows", torch_op.linear, [x, up, wide], [Shard(0), WHOLE, WHOLE], [Shard(0)]),
        ("columns", torch_op.linear, [x, up, wide], [WHOLE, Shard(0), Shard(0)], [Shard(2)]),
        ("sum", lambda x, w: torch_op.linear(x, w), [x, up], [Shard(2), Shard(1)], [Partial()]),
        ("norm", lambda x, w: torch_op.linear(x, w, rms_eps=0.1), [x, up], [Shard(2), Shard(1)], [WHOLE]),
        ("gates", torch_op.linear_swiglu, [x, up], [ROWS, WHOLE], [ROWS]),
        (
            "mlp",
            lambda x, up, bias, down: torch_op.linear(torch_op.linear(x, up, bias, activation="gelu"), down),
            [x, up, wide, down],
            [WHOLE, Shard(0), Shard(0), Shard(1)],
            [Partial()],
        ),
    ]
    return calls


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _compare(mesh: Any, call: Call) -> None:
    name, function, tensors, placements, expected = call
    alone: list[Any] = [tensor.clone().requires_grad_() for tensor in tensors]
    spread: list[Any] = [
        distribute_tensor(tensor, mesh, [placement]).requires_grad_()
        for tensor, placement in zip(tensors, placements, strict=True)
    ]
    wanted, found = _as_list(function(*alone)), _as_list(function(*spread))
    assert [output.placements[0] for output in found] == expected, name
    if name == "ada_layer_norm":  # it has no derivative
        torch.testing.assert_close([y.full_tensor() for y in found], wanted)
        return
    grads = [torch.randn_like(y) for y in wanted]
    torch.autograd.backward(wanted, grads)
    backward = [WHOLE if place.is_partial() else place for place in expected]
    torch.autograd.backward(
        found, [distribute_tensor(grad, mesh, [place]) for grad, place in zip(grads, backward, strict=True)]
    )
    torch.testing.assert_close([y.full_tensor() for y in found], wanted, rtol=1e-5, atol=1e-5, msg=name)
    for one, other in zip(alone, spread, strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-5, atol=1e-4)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch_op.CustomRMSNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch_op.gelu(self.up(self.norm(x))))


@twinop.triton_op("twice(Tensor x) -> Tensor", body=lambda op, x: op.Add(x, x), domain="unbuilt_sharding")
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _rank(rank: int, file: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        for call in _calls():
            _compare(mesh, call)
        with torch.inference_mode():
            spread: Any = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
            assert torch_op.exp(spread).placements == (Shard(0),)
        packed = torch.randn(2, 4, 24)
        whole = torch_op.attention_packed(distribute_tensor(packed, mesh, [WHOLE]), heads=2)
        assert isinstance(whole, DTensor)
        with pytest.raises(RuntimeError, match=r"attention_packed has no sharding rule.*Redistribute"):
            torch_op.attention_packed(distribute_tensor(packed, mesh, [Shard(0)]), heads=2)
        if importlib.util.find_spec("triton"):
            spread = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
            with pytest.raises(RuntimeError, match=r"unbuilt_sharding::twice has no sharding rule.*Redist"):
                twice(spread)
        ops = torch_op.load(find_library("test_written"))
        cache: Any = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
        bumped = ops.bump_functional(cache, cache + 1)
        assert bumped.placements == (Shard(0),) and bumped.full_tensor().eq(1).all()
        message = "bump mutates, and takes no DTensors. Call torch.ops.test_written.bump_functional"
        for context in (torch.enable_grad(), torch.inference_mode()):
            with context, pytest.raises(RuntimeError, match=message):
                ops.bump(cache, cache + 1)
        assert not cache.full_tensor().any()
        block, x = _Block(), torch.randn(2, 3, 8)
        y = block(x)
        y.sum().backward()
        wanted = [parameter.grad.clone() for parameter in block.parameters()]  # type: ignore[union-attr]
        block.zero_grad()
        parallelize_module(
            block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        )
        spread = block(x)
        spread.sum().backward()
        torch.testing.assert_close(spread, y)
        for parameter, grad in zip(block.parameters(), wanted, strict=True):
            given: Any = parameter.grad
            torch.testing.assert_close(given.full_tensor() if isinstance(given, DTensor) else given, grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_two_processes_compute_what_one_computes(tmp_path: Path) -> None:
    """Two processes that need not import torch: a process forks them, which has run nothing yet."""
    rank = f"test_sharding._rank, ({str(tmp_path / 'store')!r},), 2"
    code = f"import torch, test_sharding\ntorch.multiprocessing.start_processes({rank}, start_method='fork')"
    here = Path(__file__).parent
    output_of(code, tmp_path, here, here.parent / "helpers")
