"""What an export takes as a model, and that it leaves the model and torch as they were."""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import each_by_one_exporter, plain
from torch import nn

from twinop import torch_op
from twinop.errors import ExportError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Writes to all that an export may leave behind, then fails if it is told to."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.norm, self.drop, self.act = nn.BatchNorm1d(8), nn.Dropout(0.5), torch_op.CustomGELU()
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.error = 0, error
        self.drop.eval()  # one part in another mode than the rest
        self.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.count.add_(1)  # type: ignore[operator]
            self.norm.weight.requires_grad_(True)
            self.register_forward_hook(lambda *_: None)
            torch.set_grad_enabled(False)
            random.random(), np.random.rand(), torch.rand(1)
            if self.error is not None:
                torch.set_default_dtype(torch.float64)
                raise self.error("stop")
        return self.drop(self.norm(self.act(x)))


def state_of(net: Net) -> dict[str, Any]:
    return {
        "modes": [module.training for module in net.modules()],
        "buffers": [(name, id(buffer), buffer.tolist()) for name, buffer in net.named_buffers()],
        "parameters": [(id(each), each.requires_grad, each.grad) for each in net.parameters()],
        "attributes": (net.calls, len(net._forward_hooks), sorted(vars(net))),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "torch": (torch.is_grad_enabled(), torch.get_default_dtype()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


@each_by_one_exporter("error", [ValueError, KeyboardInterrupt, None])
def test_all_is_as_before(error: type[BaseException] | None, exporter: str, tmp_path: Path) -> None:
    net = Net(error).train()
    net.drop.eval()
    before = state_of(net)
    try:
        report = plain(net, (X,), tmp_path / "m.onnx", exporter=exporter, dynamic={"x": [0]})
        assert error is None and report.parity is not None and report.resized
    except (ExportError, KeyboardInterrupt):
        assert error is not None
    assert state_of(net) == before


def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return torch_op.gelu(x) * factor


@each_by_one_exporter(
    "kind",
    ["function", "partial", "method", "closure", "compiled", "data parallel"],
    left_out=["function", "method", "data parallel"],
)
def test_what_is_taken_as_a_model(kind: str, exporter: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), torch_op.CustomGELU()).train()
    models: dict[str, Any] = {
        "function": scale,
        "partial": functools.partial(scale, factor=3.0),
        "method": net.forward,
        "closure": lambda x: net(x) + 1,  # with dropout off, or the outputs would differ
        "compiled": torch.compile(net),
        "data parallel": nn.DataParallel(net),
    }
    report = plain(models[kind], (X,), tmp_path / "m.onnx", exporter=exporter)
    assert report.nodes["custom_domain.CustomGelu"] == 1 and report.parity is not None and net.training


def test_what_is_refused_as_a_model(tmp_path: Path) -> None:
    program = torch.export.export(nn.ReLU(), (X,))
    scripted = torch.jit.script(nn.ReLU())
    for model, said in (
        (program, "the model is an ExportedProgram, which cannot be exported again"),
        (program.module(), "the model is an ExportedProgram, which cannot be exported again"),
        (scripted, "the model is a ScriptModule"),
        (torch.jit.trace(nn.ReLU(), X), "the model is a ScriptModule"),
        (nn.Sequential(scripted), "0 is a ScriptModule"),
        ({"weight": X}, "the model is dict; expected a torch.nn.Module or a function"),
        (nn.LazyLinear(3), "the model has uninitialized parameters"),
        (nn.ReLU, "the model is ReLU; expected a torch.nn.Module or a function"),
        (torch.relu, "the signature of .* is not known: wrap it in a def"),
    ):
        with pytest.raises(ExportError, match=said) as raised:
            plain(model, (X,), tmp_path / "m.onnx")  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)


class Stateful(nn.Module):
    """Keeps state by assignment: in a buffer, an attribute, a submodule, a dict, a list, an object."""

    state: torch.Tensor
    part: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.linear, self.part = kind, nn.Linear(8, 8), nn.Identity()
        self.register_buffer("state", torch.zeros(4, 8))
        self.past: torch.Tensor | None = None
        self.part.past = None
        self.list, self.dict = [1], {"inner": {"state": torch.zeros(4, 8)}}
        self.box = Box()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "buffer":
            self.state = self.state + y
            return self.state.relu()
        if self.kind == "buffer in place":
            self.state.add_(1)
            return self.state + y
        if self.kind == "attribute":
            self.past = y if self.past is None else self.past + y
            return self.past.relu()
        if self.kind == "submodule":
            self.part.past = y if self.part.past is None else self.part.past + y
            return self.part.past.relu()
        if self.kind == "dict":
            self.dict["inner"]["state"] = self.dict["inner"]["state"] + y
            return self.dict["inner"]["state"].relu()
        self.list.append(1)
        self.box.count += 1
        return y * len(self.list) * self.box.count


class Box:
    count = 0


KINDS = {
    "buffer": "writes into its buffer state", "buffer in place": "writes into its buffer state",
    "attribute": "left in past", "submodule": "left in part.past", "dict": "left in dict",
    "list and object": "left in box, list",
}  # fmt: skip


@each_by_one_exporter("kind", KINDS, left_out=["attribute", "dict"])
def test_each_run_starts_from_the_same_state(kind: str, exporter: str, tmp_path: Path) -> None:
    model = Stateful(kind)
    old = [model.state, model.list, model.dict["inner"]["state"], model.box]
    report = plain(model, (X,), tmp_path / "m.onnx", exporter=exporter)
    assert report.parity is not None and report.parity.error < 1e-5
    assert any(KINDS[kind] in note for note in report.notes), report.notes
    now = [model.state, model.list, model.dict["inner"]["state"], model.box]
    assert all(a is b for a, b in zip(now, old, strict=True)) and not model.state.any()
    assert model.past is model.part.past is None and (model.list, model.box.count) == ([1], 0)


def test_buffers_that_are_no_plain_tensors(tmp_path: Path) -> None:
    """Without numbers, sparse, or a view that negates what is stored, which the model reads."""
    model = nn.Linear(8, 8)
    model.register_buffer("empty", torch.empty(4, device="meta"), persistent=False)
    model.register_buffer("eye", torch.eye(8).to_sparse())
    model.register_buffer("negated", torch._neg_view(X[0]))
    model.register_forward_hook(lambda module, given, result: result + module.negated)
    plain(model, (X,), tmp_path / "m.onnx")
    buffers = dict(model.named_buffers())
    assert torch.equal(buffers["negated"], -X[0]) and buffers["empty"].is_meta
