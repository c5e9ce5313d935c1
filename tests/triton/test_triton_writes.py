"""Triton ops that write into an input, `Tensor(a!)`: examples/triton/put_rows.py, without a library."""

import re
from typing import Any

import pytest
import torch
from record_driver import ROOT
from torch.library import opcheck

import twinop
from twinop.errors import BuildError, RecordError
from twinop.libraries.declare import load_module
from twinop.libraries.kernel_op import DECLARED, KernelOp

pytest.importorskip("triton", reason="kernels in Python need it")

POSITION = torch.tensor([4, 1])


@pytest.fixture(scope="module")
def put_rows() -> KernelOp:
    load_module(ROOT / "examples/triton/put_rows.py")
    return DECLARED["put_rows::put_rows"]


def test_in_torch_without_a_library(put_rows: KernelOp) -> None:
    cache, rows = torch.randn(6, 3), torch.randn(2, 3)
    wanted, address = cache.index_copy(0, POSITION, rows), cache.data_ptr()
    assert put_rows(cache.clone(), rows, POSITION) is None  # registers the ops
    ops = torch.ops.put_rows
    assert torch.equal(ops.put_rows_functional(cache, rows, POSITION), wanted)
    assert not torch.equal(cache, wanted)
    put_rows(cache, rows, POSITION)
    assert torch.equal(cache, wanted) and cache.data_ptr() == address
    opcheck(ops.put_rows.default, (cache, rows, POSITION))
    opcheck(ops.put_rows_functional.default, (cache.requires_grad_(), rows.requires_grad_(), POSITION))
    with pytest.raises(RecordError, match="Call torch.ops.put_rows.put_rows_functional, which returns"):
        put_rows(cache, rows, POSITION)
    both, shares = torch.zeros(6, 2, 3), "cache is written, and shares its memory with rows"
    for written, read, message in (
        (cache, cache[:2], shares),
        (cache, cache[3:5], shares),
        (both[:, 0], both.view(12, 3)[1:3], shares),
        (cache[:1].expand(6, 3), rows, "elements of it share their memory"),
        (cache.as_strided((6, 3), (2, 1)), rows, "elements of it share their memory"),
    ):
        with torch.no_grad(), pytest.raises(RecordError, match=message):
            put_rows(written, read, POSITION)
    put_rows(both[:, 0], both[:2, 1], POSITION)  # in one range of memory, without an element in common
    with torch.inference_mode():
        given = wanted.clone()  # has no version
        put_rows(given, rows + 1, POSITION)
    assert torch.equal(given, wanted.index_copy(0, POSITION, rows.detach() + 1))


@pytest.mark.cuda
def test_on_cuda_without_a_library(put_rows: KernelOp) -> None:
    position = POSITION.cuda()
    for cache in (torch.randn(6, 3, device="cuda"), torch.randn(6, 6, device="cuda")[:, ::2]):
        rows = torch.randn(2, 3, device="cuda")
        wanted, address = cache.index_copy(0, position, rows), cache.data_ptr()
        compiled = torch.compile(lambda cache, rows: put_rows(cache, rows, position))
        put_rows(cache.clone(), rows, position)  # the first call registers the twin, too
        assert torch.equal(torch.ops.put_rows.put_rows_functional(cache, rows, position), wanted)
        put_rows(cache, rows, position)
        assert torch.equal(cache, wanted) and cache.data_ptr() == address
        compiled(cache, rows + 1)
        assert torch.equal(cache, wanted.index_copy(0, position, rows + 1))


def launcher(change: Any) -> Any:
    def act(cache: torch.Tensor, x: torch.Tensor) -> Any:
        cache.zero_()  # the op writes it
        return change(cache, x)

    return act


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache, x: x.zero_(), "writes to an input. Its schema says which it writes: Tensor(a!) x"),
        (lambda cache, x: cache, "its schema has 0 outputs"),
    ],
)
def test_what_a_launcher_may_not_do(change: Any, message: str) -> None:
    from twinop.record.schema_text import record_of
    from twinop.triton.trace import trace

    record = record_of(
        "act(Tensor(a!) cache, Tensor x) -> ()", "d", dtypes="float32", input_shapes="x = cache"
    )
    with pytest.raises(BuildError, match=re.escape(message)):
        trace(record, launcher(change))
    trace(record, launcher(lambda cache, x: None))


def test_a_body_is_functional() -> None:
    def writes(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cache.add_(x)

    @twinop.triton_op("adds(Tensor(a!) cache, Tensor x) -> ()", body=writes, domain="not_functional")
    def adds(cache: torch.Tensor, x: torch.Tensor) -> None:
        return None

    message = "the body of not_functional::adds writes into cache. A body is functional: return cache_out"
    with pytest.raises(RecordError, match=message):
        adds(torch.ones(3), torch.ones(3))
