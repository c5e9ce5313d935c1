"""The modules behave like torch.nn's. replace_modules changes only the implementation."""

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from twinop import torch_op

# Two roundings of a 16-bit type at most: torch's own norms and activations round once as well.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
UNARY: list[tuple[Callable[[], nn.Module], type[nn.Module]]] = [
    (nn.ReLU, torch_op.CustomReLU),
    (nn.GELU, torch_op.CustomGELU),
    (lambda: nn.GELU("tanh"), torch_op.CustomGELU),
    (nn.SiLU, torch_op.CustomSiLU),
    (nn.Sigmoid, torch_op.CustomSigmoid),
    (nn.Tanh, torch_op.CustomTanh),
    (nn.Softplus, torch_op.CustomSoftplus),
    (lambda: nn.Softmax(dim=1), torch_op.CustomSoftmax),
    (lambda: nn.Softmax(-1), torch_op.CustomSoftmax),
]
EPS = 2.0**-17  # exact in float32, in which ops take their attributes; LayerNorm's 1e-5 is not
NORMS: list[tuple[Callable[[], nn.Module], type[nn.Module]]] = [
    (lambda: nn.LayerNorm(16, EPS), torch_op.CustomLayerNorm),
    (lambda: nn.LayerNorm((5, 16), eps=2 * EPS), torch_op.CustomLayerNorm),
    (lambda: nn.LayerNorm(16, EPS, bias=False), torch_op.CustomLayerNorm),
    (lambda: nn.LayerNorm((5, 16), EPS, elementwise_affine=False), torch_op.CustomLayerNorm),
    (lambda: nn.RMSNorm(16), torch_op.CustomRMSNorm),
    (lambda: nn.RMSNorm((5, 16), eps=2 * EPS), torch_op.CustomRMSNorm),
    (lambda: nn.RMSNorm(16, elementwise_affine=False), torch_op.CustomRMSNorm),
]
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def randomized(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    return module


@DTYPES
@pytest.mark.parametrize(("make", "twin"), UNARY + NORMS, ids=lambda entry: getattr(entry, "__name__", ""))
def test_a_replaced_module_computes_the_same(make: Any, twin: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = randomized(make()).to(dtype)
    x = torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
    state, parameters = list(module.state_dict()), list(module.parameters())

    def forward_and_backward() -> list[torch.Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], torch.cos(x.detach()))]

    expected = forward_and_backward()
    same = torch_op.replace_modules(module)
    assert same is module and type(module) is twin
    assert list(module.state_dict()) == state
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    for a, b in zip(forward_and_backward(), expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)
    assert torch_op.replace_modules(module) is module and type(module) is twin
    assert type(pickle.loads(pickle.dumps(module))) is twin
    assert repr(module).startswith(twin.__name__)


@pytest.mark.parametrize("eps", [None, EPS])
@DTYPES
def test_rms_norm_has_torchs_default_eps(dtype: torch.dtype, eps: float | None) -> None:
    x = torch.full((2, 16), 1e-4, dtype=dtype)  # a mean square of the size of eps
    expected = nn.RMSNorm(16, eps, dtype=dtype)(x)
    found = torch_op.CustomRMSNorm(16, eps, dtype=dtype)(x)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_take_float32_weights(dtype: torch.dtype) -> None:
    x = torch.randn(3, 16, dtype=dtype)
    for module in (torch_op.CustomLayerNorm(16), torch_op.CustomRMSNorm(16)):
        assert module(x).dtype == dtype and module.weight.dtype == torch.float32


def test_gemmas_offset() -> None:
    module = torch_op.CustomRMSNorm(16, 1e-6, offset=1)
    assert not module.weight.any() and repr(module).endswith("offset=1)")
    x = torch.randn(3, 16)
    torch.testing.assert_close(module(x), nn.RMSNorm(16, 1e-6)(x))


def test_swiglu() -> None:
    x, gate = torch.randn(2, 3, 8).unbind()
    expected = nn.functional.silu(gate) * x
    swiglu = torch_op.CustomSwiGLU()
    torch.testing.assert_close(swiglu(x, gate), expected)
    torch.testing.assert_close(swiglu(torch.cat([gate, x], -1)), expected)
    mlp = torch_op.CustomGatedMLP(8, 12)
    assert list(mlp.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    torch.testing.assert_close(mlp(x), mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


@pytest.mark.parametrize(
    ("make", "twin"), NORMS + UNARY[1:7], ids=lambda entry: getattr(entry, "__name__", "")
)
def test_constructors_are_torchs(make: Callable[[], nn.Module], twin: type[nn.Module]) -> None:
    base = twin.__mro__[1]
    theirs, own = inspect.signature(base).parameters, inspect.signature(twin).parameters
    assert [*own][: len(theirs)] == [*theirs]
    assert all(own[name].default == theirs[name].default for name in theirs)
    assert issubclass(twin, type(make()))


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "beta": (lambda: torch_op.CustomSoftplus(2.0), ValueError, r"beta is 2\.0, expected 1; write softplus"),
    "offset": (lambda: torch_op.CustomRMSNorm(8, offset=2), ValueError, r"offset is 2, expected 0 .* or 1"),
    "width without a weight": (
        lambda: torch_op.CustomLayerNorm(8, elementwise_affine=False)(torch.ones(2, 7)),
        RuntimeError,
        r"CustomLayerNorm: the input has shape \[2, 7\], expected one that ends in normalized_shape = \[8\]",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=list(ERRORS))
def test_errors(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_replace_modules_in_a_model() -> None:
    shared = nn.ReLU(inplace=True)

    class Subclass(nn.ReLU):
        pass

    model: Any = nn.Sequential(nn.Linear(3, 3), shared, nn.Sequential(shared, Subclass(), nn.GELU())).eval()
    called = []
    model[2][2].register_forward_hook(lambda *_: called.append(True))
    x = torch.randn(2, 3)
    expected = model(x)
    report: list[torch_op.Replacement] = []
    same: Any = torch_op.replace_modules(model, report.append)
    assert same is model
    kinds = [type(module) for module in (same[1], *same[2])]
    assert kinds == [torch_op.CustomReLU, torch_op.CustomReLU, Subclass, torch_op.CustomGELU]
    assert same[1] is same[2][0] and not same[1].training
    torch.testing.assert_close(same(x), expected)
    assert len(called) == 2
    assert [str(entry) for entry in report] == [
        "1: ReLU -> CustomReLU",
        "2.1: Subclass stays: a subclass of ReLU may compute something else",
        "2.2: GELU -> CustomGELU",
    ]
    again: list[torch_op.Replacement] = []
    torch_op.replace_modules(model, again.append)
    assert [entry.path for entry in again] == ["2.1"]


def with_a_forward_of_its_own() -> nn.Module:
    module = nn.ReLU()
    module.forward = lambda x: x * 2  # type: ignore[method-assign, assignment]
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Softplus(beta=2), r"beta 2.*, threshold 20.*; the op has beta"),
        (nn.Softplus(threshold=5), r"beta 1.*, threshold 5"),
        (nn.Softmax(), r"it has no dim: .* Give it a dim"),
        (with_a_forward_of_its_own(), "it has a forward of its own, as hooks set one"),
    ],
)
def test_what_stays_and_why(module: nn.Module, message: str) -> None:
    kind, report = type(module), list[torch_op.Replacement]()
    torch_op.replace_modules(nn.Sequential(module, nn.LeakyReLU()), report.append)
    [entry] = report
    assert type(module) is kind and entry.twin is None
    assert re.match(f"0: {kind.__name__} stays: {message}", str(entry)), entry


def test_an_op_that_no_library_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinop.torch_op import registry

    monkeypatch.delitem(registry.functions, "silu")
    report: list[torch_op.Replacement] = []
    torch_op.replace_modules(nn.SiLU(), report.append)
    assert str(report[0]) == "the model itself: SiLU stays: the loaded libraries have no op silu"


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("affine", [True, False])
def test_fx_traces_the_norms(eps: float | None, affine: bool) -> None:
    x = torch.randn(3, 16)
    for norm in (torch_op.CustomRMSNorm(16, eps, affine), torch_op.CustomLayerNorm(16, 1e-5, affine)):
        traced = torch.fx.symbolic_trace(norm)
        assert torch.equal(traced(x), norm(x))
        with pytest.raises(RuntimeError, match="has shape"):
            traced(x[:, :8])
