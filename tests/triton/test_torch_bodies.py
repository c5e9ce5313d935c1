"""Function bodies that are torch functions: attributes as references, branches, and what is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from models import model as model_of
from models import node, value

import twinop
from twinop.errors import ExportError
from twinop.export import attach_bodies
from twinop.export.body_in_torch import evaluate_body
from twinop.libraries.kernel_op import KernelOp


def norm_body(x: torch.Tensor, *, eps: float, kind: str) -> torch.Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return {"none": y, "relu": torch.relu(y)}[kind]


@twinop.triton_op(
    'norm(Tensor x, float eps=1e-5, str kind="none") -> Tensor',
    body=norm_body,
    choices="kind = none | relu",
    samples=lambda dtype, size: [(torch.randn(3, size).to(dtype),)],
    domain="bodies",
)
def norm(x: torch.Tensor, *, eps: float, kind: str) -> torch.Tensor:
    return x


@twinop.triton_op(
    "centred(Tensor x) -> Tensor",
    body=lambda x: centred_body(x),
    samples=lambda dtype, size: [(torch.randn(3, size).to(dtype),)],
    domain="bodies",
)
def centred(x: torch.Tensor) -> torch.Tensor:
    return x


def centred_body(x: torch.Tensor) -> torch.Tensor:
    """Its graph depends on the rank: axes, and a permutation."""
    return (x - x[..., :1] + x.var(-1, keepdim=True, correction=0)).transpose(-1, -2)


def gated_body(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    (a, b), (c, d), (e, f) = x.chunk(2, -1), x.split(half, -1), x.tensor_split(2, -1)
    (g, h), (i, j) = torch.split(x, dim=-1, split_size_or_sections=half), torch.unsafe_chunk(x, 2, dim=-1)
    (k, m), (n, o) = torch.unsafe_split(x, half, -1), x.split([half, x.shape[-1] - half], -1)
    p, q = x.unflatten(-1, (2, -1)).unbind(-2)
    r, s = x[..., :half] + x.narrow(-1, 0, half), x[..., half:] + x.narrow(-1, half, half)
    return (a + c + e + g + i + k + n + p + r) * torch.sigmoid(b + d + f + h + j + m + o + q + s)


@twinop.triton_op(
    "gated(Tensor x) -> Tensor",
    body=gated_body,
    samples=lambda dtype, size: [(torch.randn(3, 2 * size).to(dtype),)],
    shapes="y = x[:-1] + [x[-1] // 2]",
    domain="bodies",
)
def gated(x: torch.Tensor) -> torch.Tensor:
    return x


def model(
    op: KernelOp, calls: Sequence[Mapping[str, Any]], *shapes: Sequence[int | str] | None
) -> onnx.ModelProto:
    """Makes a model with a node for each call; its inputs are x0, x1 and so on, in turn."""
    record = op.record
    nodes = [
        node(record.onnx_name, [f"x{i % len(shapes)}"], [f"y{i}"], f"n{i}", record.domain, **call)
        for i, call in enumerate(calls)
    ]
    values = [value(f"x{i}", shape=shape) for i, shape in enumerate(shapes)]
    outputs = [value(f"y{i}", shape=None) for i in range(len(calls))]
    made = model_of(nodes, values, outputs, domains=[record.domain])
    return attach_bodies(made, {record.key: record})


@twinop.triton_op(
    "plus(Tensor x, Tensor? z=None, int times=1) -> Tensor",
    body=lambda x, z, *, times: times * (x if z is None else x + z),
    domain="bodies",
)
def plus(x: torch.Tensor, z: torch.Tensor | None, *, times: int) -> torch.Tensor:
    return x


def test_a_scalar_and_an_absent_input_of_an_op_without_samples() -> None:
    made = model(plus, [{}, {"times": 5}], [])
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x0": np.array(3, np.float32)}) == [3, 15]


def test_an_int_in_a_library_has_the_values_that_the_record_names() -> None:
    build = pytest.importorskip("twinop.triton.build", reason="it traces launchers")
    named = replace(plus.record, limits=(("times", "in", 2), ("times", "in", 3)))
    assert b"then_branch" in build._model(named, 0, [(1, None)])
    with pytest.raises(ExportError, match=r'takes times\.value.*limits="times in 1'):
        build._model(plus.record, 0, [(1, None)])


def test_halves_of_open_sizes() -> None:
    """torch's exporter splits into a sequence for `chunk` and `split`, and fails."""
    made = model(gated, [{}], ["m", "n"])
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for x in (torch.randn(3, 8), torch.randn(1, 2)):
        [found] = session.run(None, {"x0": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), gated_body(x))


def test_one_function_serves_all_attributes() -> None:
    calls: list[dict[str, Any]] = [{}, {"eps": 0.5}, {"kind": "relu", "eps": 0.1}]
    made = model(norm, calls, ["a", "b", "c"])
    assert [each.name for each in made.functions] == ["CustomNorm"]
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(2, 5, 7)
    for call, found in zip(calls, session.run(None, {"x0": x.numpy()}), strict=True):
        expected = norm_body(x, eps=call.get("eps", 1e-5), kind=call.get("kind", "none"))
        torch.testing.assert_close(torch.from_numpy(found), expected)
        torch.testing.assert_close(evaluate_body(norm.record, [x], call)[0], expected)


def test_one_function_serves_several_ranks() -> None:
    tensors = [torch.randn(shape) for shape in ((4, 6), (2, 4, 6))]
    made = model(centred, [{}, {}], *([f"d{i}" for i in range(x.dim())] for x in tensors))
    assert [each.name for each in made.functions] == ["CustomCentred"]
    onnx.shape_inference.infer_shapes(made, strict_mode=True)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for given in (tensors, [x[:0] for x in tensors]):
        found = session.run(None, {f"x{i}": x.numpy() for i, x in enumerate(given)})
        for x, result in zip(given, found, strict=True):
            torch.testing.assert_close(torch.from_numpy(result), centred_body(x))


def test_several_ranks_that_are_unknown_are_refused() -> None:
    with pytest.raises(ExportError, match="differs between inputs of .*Give the model's inputs shapes.*bod"):
        model(centred, [{}, {}], None, ["a", "b", "c"])


BODIES = {
    "its function mode": lambda x: x.mode(-1, keepdim=True).values + x,
    "not the same for all sizes, as a": lambda x: x if x.shape[-1] > 10 else -x,
    "not the same for all sizes": lambda x: torch.cat(x.split(4, -1)[::-1], -1),
    "data-dependent": lambda x: x if x.sum() > 0 else -x,
}


@pytest.mark.parametrize("reason", BODIES)
def test_what_has_no_translation(reason: str) -> None:
    name = f"odd{len(reason)}"
    op = twinop.triton_op(f"{name}(Tensor x) -> Tensor", body=BODIES[reason], domain="bodies")(lambda x: x)
    message = rf"the body of bodies::{name} \(test_torch_bodies.py:\d+\) cannot be .*{reason}.* Write it with"
    with pytest.raises(ExportError, match=message):
        model(op, [{}], [8])
