"""Derivative formulas are evaluated once, and only if needed. They keep only the tensors that they need.

twinop/testing/matrix/test_gradients.py checks their values.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import ALL
from torch.profiler import ProfilerActivity, profile

from twinop import torch_op
from twinop.errors import LibraryError, RecordError
from twinop.libraries.declare import SECOND_DERIVATIVES
from twinop.libraries.library import find_library
from twinop.record.op_spec import Gradient
from twinop.record.record_checks import check_formulas
from twinop.record.schema_text import record_of
from twinop.torch_op import autograd
from twinop.torch_op.formulas import Formulas

ops = torch.ops.custom_domain


def calls_of(name: str, run: object) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()  # type: ignore[operator]
    return sum(event.count for event in found.key_averages() if event.key == name)


def test_a_formula_with_several_gradients_is_evaluated_once() -> None:
    x, residual, weight, bias = (torch.randn(*s, requires_grad=True) for s in ((3, 5), (3, 5), (5,), (5,)))
    y, total = torch_op.add_layer_norm(x, residual, weight, bias)
    loss = y.sum() + total.square().sum()
    assert calls_of("custom_domain::layer_norm_backward", loss.backward) == 1
    assert torch.equal(x.grad, residual.grad)  # type: ignore[arg-type]
    assert weight.grad is not None and bias.grad is not None
    # The formula behind it is reached alone as well, and needs the first one.
    y, total = torch_op.add_layer_norm(x.detach(), residual, weight.detach(), None)
    (grad,) = torch.autograd.grad(y.sum() + total.square().sum(), residual)
    torch.testing.assert_close(grad, residual.grad)


def test_formulas_that_nobody_wants_are_not_evaluated() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5)
    y = torch_op.mul(a, b)
    assert calls_of("aten::mul", lambda: y.sum().backward()) == 1
    b.requires_grad_()
    y = torch_op.mul(a, b)
    assert calls_of("aten::mul", lambda: y.sum().backward()) == 2


def test_only_what_the_formulas_need_is_kept() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    assert torch_op.add(a, b).grad_fn.saved_tensors == ()  # their shapes are enough
    assert [t.shape for t in torch_op.mul(a, b).grad_fn.saved_tensors] == [a.shape, b.shape]
    assert [t.shape for t in torch_op.relu(a).grad_fn.saved_tensors] == [a.shape]
    torch_op.add(a, b).sum().backward()
    assert torch.equal(a.grad, torch.ones(3, 5)) and torch.equal(b.grad, torch.full((5,), 3.0))  # type: ignore[arg-type]


def test_what_an_op_without_formulas_says() -> None:
    for name, hint in (("relu_backward", "differentiated once, not twice"), ("relu", "detach its inputs")):
        # In another domain, whose ops have no formulas but those of their records.
        formulas = Formulas(replace(ALL[name], gradients=(), domain="other"), {})
        with pytest.raises(RecordError, match=f"other::{name} has no derivative; .*{hint}"):
            formulas.evaluate({}, {"x"})


def test_float_attributes_beyond_fp32() -> None:
    """Kernels and formulas round float attributes to fp32: 1e39 becomes inf, 1e-50 becomes 0."""
    x = torch.ones(2, 3, requires_grad=True)
    for scale, expected in ((1e39, torch.inf), (1e-50, 0.0)):
        y = ops.pad_affine(x, scale=scale)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y[:, :3], torch.full((2, 3), expected)) and torch.equal(grad, y[:, :3])


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("x = relu_bakward(grad, y)", "`x = relu_bakward(grad, y)` uses relu_bakward, expected x, y, grad, "),
        ("x = relu_backward(grad, z)", " uses z, expected x, y, grad, torch, or an op by its name"),
        ("x = relu_backward(gard, q)", " uses gard, q, expected "),
        ("z = relu_backward(grad, y)", "`z = relu_backward(grad, y)` is of z, expected inputs of the op: x"),
        ("x = torch.wher(y > 0, 1)", "uses torch.wher, which this torch has not"),
        ("x = relu_backward(grad, y", " is not a Python expression: '(' was never closed"),
    ],
)
def test_a_typo_in_a_derivative_is_told_at_the_load(formula: str, message: str, tmp_path: Path) -> None:
    right, wrong = b'"x = relu_backward(grad, y)"', f'"{formula}"'.encode()
    # In a domain of its own: an op that is loaded already is not looked at again.
    data = find_library("custom_relu").read_bytes()
    data = data.replace(b'"domain":"custom_domain"', b'"domain":"typos__domain"')
    assert data.count(right) >= 1
    path = tmp_path / "libwrong.so"
    path.write_bytes(data.replace(right, wrong + b" " * (len(right) - len(wrong))))
    assert path.stat().st_size == len(data)
    with pytest.raises(LibraryError, match=re.escape(message)) as error:
        torch_op.load(path)
    assert str(error.value).startswith(f"{path}: typos__domain::relu: derivative ")


def test_formulas_may_have_names_of_their_own() -> None:
    formula = Gradient(("x",), "sum([part * grad for part in (lambda a: (a, y))(x)])")
    check_formulas(replace(torch_op.records()["relu"], gradients=(formula,)), [])


@pytest.mark.parametrize("name", ["silu", "tanh", "rms_norm"])
def test_third_derivatives(name: str) -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        loss = getattr(torch_op, name)(x).square().sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(first, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))


def test_caches_of_compiled_graphs_go_by_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graphs have it: after a build with another formula torch.compile took the old one."""
    config: Any = torch.compiler.config
    assert autograd._tag  # of twinop's own ops
    monkeypatch.setattr(autograd, "_tag", autograd._tag)
    tags = []
    with config.patch(cache_key_tag="mine" + config.cache_key_tag):
        for gradient in ("x = grad", "x = grad * 2", "x = grad", ""):
            if not gradient:
                del config.cache_key_tag
            monkeypatch.setattr(autograd, "_told", set[str]())
            monkeypatch.setitem(SECOND_DERIVATIVES, "tags::f_backward", lambda x: x)
            for name, text in (("f", gradient), ("f_backward", "")):
                autograd._tell_caches(record_of(f"{name}(Tensor x) -> Tensor", "tags", gradient=text))
            tags.append(config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]
    assert [bool(re.fullmatch("(mine)? twinop [0-9a-f]{16}", tag)) for tag in tags] == [True] * 4
    assert [tag.startswith("mine") for tag in tags] == [True] * 3 + [False]
