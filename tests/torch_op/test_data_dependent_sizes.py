"""Sizes that depend on data (`x[mask]`: detections, valid tokens) go through every op, as through torch's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import ALL, Sample, call, has_derivative, make_sample, samples
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from twinop import deploy, export, torch_op
from twinop.errors import RecordError
from twinop.record.op_spec import OpSpec
from twinop.testing.samples import is_given

FLOAT = {
    name: next((each for each in record.combinations if "float32" in each.values()), None)
    for name, record in ALL.items()
}


def sample_of(record: OpSpec) -> Sample:
    """A call whose first dimension has a size that no other one has, where the op leaves the choice."""
    dtypes = FLOAT[record.name]
    assert dtypes is not None
    if is_given(record):
        return next(s for s in samples(record, dtypes) if min(t.numel() for t in s.tensors().values()) > 1)
    return make_sample(record, dtypes, (5, 12), tame=True)


@pytest.mark.parametrize(
    "name", [name for name, found in FLOAT.items() if found and not ALL[name].is_backward]
)
def test_every_op_and_its_derivative(name: str) -> None:
    """No rule asks for a size that is not known: a fake tensor with one raises an error then."""
    record = ALL[name]
    sample = sample_of(record)
    rows = next(iter(sample.tensors().values())).shape[0]
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        chosen = torch.ones(rows, dtype=torch.bool).nonzero()[:, 0]

        def choose(tensor: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            tensor = tensor.index_select(0, chosen) if tensor.shape[:1] == (rows,) else tensor
            return tensor.requires_grad_(tensor.is_floating_point() and has_derivative(record))

        given = sample.map(choose)
        outputs = call(record, given)
        assert any(not isinstance(n, int) for tensor in given.tensors().values() for n in tensor.shape)
        if has_derivative(record):
            inputs = [tensor for tensor in given.tensors().values() if tensor.requires_grad]
            wanted = [output for output in outputs if output.requires_grad]
            incoming = [torch.empty_like(output) for output in wanted]
            grads = torch.autograd.grad(wanted, inputs, incoming, allow_unused=True)
            for grad, tensor in zip(grads, inputs, strict=True):
                assert grad is None or grad.shape == tensor.shape


def broadcasts(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each way to broadcast, with sizes that depend on data in either dimension or in both."""
    a, b = x[rows], x[:, columns.nonzero()[:, 0]]
    both = a[:, columns.nonzero()[:, 0]]
    return (
        torch_op.add(a, x[0]),
        torch_op.mul(a, a[:, :1]),
        torch_op.add(b, x[:, :1]),
        torch_op.mul(both, both.sum(0, keepdim=True)),
        torch_op.add(both.narrow(1, 0, 1), both.sum(0, keepdim=True)),
        torch_op.pow(both.abs() + 0.5, both[:, 0].unsqueeze(1)),
        torch_op.addcmul(both, b[:1], a[:, :1]),
        torch_op.add(both.t(), both.t().narrow(1, 0, 1)),
        torch_op.mul(a, a.shape[0]),
        torch_op.swiglu(a[:, :4], a[:, 4:]),
        torch_op.gelu(b.t()),
    )


class Broadcasts(torch.nn.Module):
    def forward(self, x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> Any:
        return broadcasts(x, rows, columns)


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
MASKS = [
    (torch.tensor(rows).bool(), torch.tensor(columns).bool())
    for rows, columns in (
        ([1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 0, 0, 1]),
        ([0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]),  # one row, one column
        ([1] * 6, [1] * 8),
    )
]


def test_export_to_onnx(tmp_path: Path) -> None:
    """The nodes are in the file, and it runs at other sizes, with the library and with the bodies alone."""
    path = tmp_path / "m.onnx"
    report = export.export(Broadcasts(), (X, *MASKS[0]), path, optimize=False)
    assert report.nodes["custom_domain.CustomAdd"] == 4 and report.without_library is not None
    for library in (None, False):
        session = deploy.session(path, ["CPUExecutionProvider"], library)
        for masks in MASKS:
            feeds = zip(("x", "rows", "columns"), (X, *masks), strict=True)
            found = session.run({name: tensor.numpy() for name, tensor in feeds}).values()
            for array, expected in zip(found, broadcasts(X, *masks), strict=True):
                np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_sizes_that_cannot_be_equal_are_refused() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        a = torch.empty(6, 3)[torch.ones(6, dtype=torch.bool)]
        n: Any = torch.ones((), dtype=torch.int64).item()
        torch._check(n >= 4)
        with pytest.raises(RecordError, match=r"a has \[u0, 3\], b has \[u1\]; from the last"):
            torch_op.add(a, torch.empty(5).new_empty(n))


W, KN = torch.randn(16), torch.randn(4, 16)
ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: torch_op.softmax(x),  # a library may lack the op
    "softmax, dim 0": lambda x: torch_op.softmax(x, 0),
    "rms_norm": lambda x: torch_op.rms_norm(x, W),
    "layer_norm": lambda x: torch_op.layer_norm(x, W, W),
    "a residual for all": lambda x: torch_op.add_rms_norm(x, KN[:3], W)[0],
    "ada_layer_norm": lambda x: torch_op.ada_layer_norm(x, 2 * x, KN[:3]),
    "swiglu_packed": lambda x: torch_op.swiglu_packed(x),
    "linear": lambda x: torch_op.linear(x, KN),
}


class Mapped(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return torch.vmap(self.function)(x[mask])


@pytest.mark.parametrize("name", ROWS)
def test_vmap_of_rows_is_one_call(name: str) -> None:
    """Also for a batch whose size depends on data; the results are those of an example at a time."""
    x, mask = torch.randn(5, 3, 16), torch.tensor([True, False, True, True, False])
    program = torch.export.export(Mapped(ROWS[name]), (x, mask))
    calls = [node for node in program.graph.nodes if "custom_domain" in str(node.target)]
    assert len(calls) == 1
    expected = torch.stack([ROWS[name](each) for each in x[mask]])
    torch.testing.assert_close(program.module()(x, mask), expected)


def test_vmap_of_a_call_that_takes_no_batch() -> None:
    x, mask = torch.randn(5, 3, 16), torch.tensor([True, False, True, True, False])

    def call(example: torch.Tensor) -> torch.Tensor:  # a weight for each example
        return torch_op.rms_norm(example, example[0])

    torch.testing.assert_close(torch.vmap(call)(x), torch.stack([call(each) for each in x]))
    with pytest.raises(RecordError, match=r"runs once for each example under torch\.vmap.*without vmap"):
        torch.export.export(Mapped(call), (x, mask))
