"""jvp, jacfwd and hessian of elementwise ops, compared with torch's in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.nn import functional as F

from twinop import torch_op
from twinop.errors import RecordError

UNARY: dict[str, Callable[..., Any]] = {op: getattr(F, op) for op in ("relu", "gelu", "silu", "softplus")}
UNARY |= {op: getattr(torch, op) for op in ("sigmoid", "tanh", "exp", "log", "square")}
BINARY: dict[str, Callable[..., Any]] = {"add": torch.add, "mul": torch.mul, "pow": torch.pow}
BINARY["swiglu"] = lambda x, gate: F.silu(gate) * x


def _values(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(shape, dtype=dtype) + 0.1


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    mine, theirs, x, tangent = getattr(torch_op, name), UNARY[name], _values(4, 3), _values(4, 3)
    torch.testing.assert_close(func.jvp(mine, (x,), (tangent,)), func.jvp(theirs, (x,), (tangent,)))
    torch.testing.assert_close(func.jacfwd(mine)(x), func.jacfwd(theirs)(x))
    wanted = func.hessian(lambda x: theirs(x).sum())(x)
    for twice in (func.hessian, lambda f: func.jacrev(func.jacfwd(f)), lambda f: func.jacfwd(func.jacfwd(f))):
        torch.testing.assert_close(twice(lambda x: mine(x).sum())(x), wanted)


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, (4, 3)) for name in BINARY), ("add", (3,)), ("mul", (3,)), ("pow", (3,))]
)
def test_binary_and_broadcast(name: str, shape: tuple[int, ...]) -> None:
    mine, theirs = getattr(torch_op, name), BINARY[name]
    primals, tangents = (_values(4, 3), _values(*shape)), (_values(4, 3), _values(*shape))
    torch.testing.assert_close(func.jvp(mine, primals, tangents), func.jvp(theirs, primals, tangents))
    for i in (0, 1):
        torch.testing.assert_close(func.jacfwd(mine, i)(*primals), func.jacfwd(theirs, i)(*primals))
        wanted = func.hessian(lambda *x: theirs(*x).sum(), i)(*primals)
        torch.testing.assert_close(func.hessian(lambda *x: mine(*x).sum(), i)(*primals), wanted)


def test_an_operand_without_a_tangent_adds_nothing() -> None:
    x, infinite = torch.ones(2), torch.tensor([float("inf"), 2.0])
    assert torch.equal(func.jvp(lambda x: torch_op.mul(x, infinite), (x,), (x,))[1], infinite)
    assert torch.equal(func.jvp(lambda y: torch_op.mul(y, x), (infinite,), (x,))[1], x)


def test_16_bits() -> None:
    x, tangent = _values(64, dtype=torch.bfloat16), _values(64, dtype=torch.bfloat16)
    found = func.jvp(torch_op.gelu, (x,), (tangent,))[1]
    assert found.dtype == torch.bfloat16
    wanted = func.jvp(F.gelu, (x.double(),), (tangent.double(),))[1]
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-3)


def test_dual_tensors_and_forward_over_reverse() -> None:
    x, tangent = _values(4, 3), _values(4, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), tangent)
        for op in (torch_op.gelu, torch.ops.custom_domain.gelu):
            found, wanted = (forward_ad.unpack_dual(f(dual)).tangent for f in (op, F.gelu))
            torch.testing.assert_close(found, wanted)
        both = [
            torch.autograd.grad(f(dual).sum(), dual, create_graph=True)[0] for f in (torch_op.gelu, F.gelu)
        ]
        found, wanted = (forward_ad.unpack_dual(grad).tangent for grad in both)
        torch.testing.assert_close(found, wanted)


def test_other_ops_refuse() -> None:
    x = _values(4, 3)
    with pytest.raises(RecordError, match=r"softmax has no forward-mode derivative.*reverse mode"):
        func.jvp(torch_op.softmax, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(RecordError, match="no forward-mode derivative"):
        torch_op.softmax(forward_ad.make_dual(x, x))
