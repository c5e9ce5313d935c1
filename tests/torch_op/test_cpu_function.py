"""CPU tensors of an op whose library has no CPU kernel: a function from Python, or a refusal."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from body_library import BodyOp, body_library
from samples import RECORDS

import twinop
from twinop import torch_op
from twinop.errors import RecordError
from twinop.libraries.declare import CPU_FUNCTIONS
from twinop.record.body_registry import BODIES, body

DOMAIN = "test_cpu_function"


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> torch_op.Ops:
    names = ("pad_affine", "double_and_sum")
    records = [replace(RECORDS[name], domain=DOMAIN) for name in names]
    folder: Path = tmp_path_factory.mktemp("library")
    return torch_op.load(body_library(folder, [BodyOp(record, {}) for record in records]))


@pytest.fixture
def functions() -> Iterator[dict[str, Any]]:
    yield CPU_FUNCTIONS
    for key in [key for key in CPU_FUNCTIONS if key.startswith(DOMAIN)]:
        del CPU_FUNCTIONS[key]


def test_a_cpu_tensor_is_refused(ops: torch_op.Ops) -> None:
    said = f"{DOMAIN}::pad_affine: the tensors are on the CPU, and the op has no CPU kernel. Move them"
    with pytest.raises(RecordError, match=said):
        ops.pad_affine(torch.ones(3))


def test_the_function_gets_the_arguments(ops: torch_op.Ops, functions: dict[str, Any]) -> None:
    def pad_affine(x: torch.Tensor, weight: Any, bias: Any, **attributes: Any) -> torch.Tensor:
        assert x.dtype == torch.float32 and weight is None and bias.dtype == torch.float32
        assert attributes == {"scale": torch.tensor(0.1).item(), "sign": "minus", "pads": [1, 1]}
        return torch.nn.functional.pad(x - bias, (1, 1))

    functions[f"{DOMAIN}::pad_affine"] = pad_affine
    x, bias = torch.ones(2, 3, dtype=torch.bfloat16), torch.full((3,), 2.0, dtype=torch.bfloat16)
    y = ops.pad_affine(x, None, bias, sign="minus", pads=[1, 1])
    assert y.dtype == torch.bfloat16 and y.tolist() == [[0, -1, -1, -1, 0]] * 2
    with pytest.raises(RecordError, match="no kernel takes these dtypes"):
        ops.pad_affine(x.to(torch.int32))


def test_outputs_are_tensors_of_their_own(ops: torch_op.Ops, functions: dict[str, Any]) -> None:
    functions[f"{DOMAIN}::double_and_sum"] = lambda x: (x, x.sum(-1))
    x = torch.ones(2, 3).t()
    doubled, total = ops.double_and_sum(x)
    assert doubled.data_ptr() != x.data_ptr() and doubled.is_contiguous() and torch.equal(doubled, x)
    assert total.tolist() == [2, 2, 2]
    torch.library.opcheck(getattr(torch.ops, DOMAIN).double_and_sum.default, (x,))


def test_a_function_of_another_shape(ops: torch_op.Ops, functions: dict[str, Any]) -> None:
    functions[f"{DOMAIN}::double_and_sum"] = lambda x: (x, x)
    said = r"double_and_sum: the body of double_and_sum gives total the shape \[2, 3\], the op \[2\]"
    with pytest.raises(RecordError, match=said):
        ops.double_and_sum(torch.ones(2, 3))


def test_numbers_are_rounded_as_for_a_kernel() -> None:
    def tenth(x: torch.Tensor, *, by: float) -> torch.Tensor:
        return x * by

    schema = "tenth(Tensor x, float by=0.1) -> Tensor"
    op, one = twinop.triton_op(schema, body=tenth, domain="unbuilt_tenth")(tenth), torch.ones(1).double()
    for y in (op(one), torch.ops.unbuilt_tenth.tenth(one)):
        assert y.item() == torch.tensor(0.1).item()


def test_without_a_function_the_body_runs(ops: torch_op.Ops, functions: dict[str, Any]) -> None:
    """As of an op in C++, whose body is registered in Python: its library has no model of it."""

    def double_and_sum(op: Any, x: Any) -> Any:
        return op.Add(x, x), op.ReduceSum(x, [-1], keepdims=0)

    body(double_and_sum, domain=DOMAIN)
    try:
        x = torch.randn(2, 3)
        y, total = ops.double_and_sum(x)
        assert torch.equal(y, 2 * x) and torch.equal(total, x.sum(-1))
    finally:
        del BODIES[f"{DOMAIN}::double_and_sum"]
