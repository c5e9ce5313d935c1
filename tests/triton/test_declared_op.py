"""Ops declared with kernels in Python, before a library is built: in torch, and their errors."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_ops import mish_file

import twinop
from twinop.errors import ExportError, RecordError, TwinopError
from twinop.export import export
from twinop.libraries.declare import load_module
from twinop.libraries.kernel_op import KernelOp
from twinop.record.schema_text import record_of

pytest.importorskip("triton", reason="kernels in Python need it")


def scaled_body(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    return x * factor


@twinop.triton_op("unbuilt_scaled(Tensor x, float factor=2.0) -> Tensor", body=scaled_body, domain="unbuilt")
def unbuilt_scaled(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@twinop.triton_op(
    "doubled_backward(Tensor grad_y, Tensor x) -> Tensor", body=lambda grad_y, x: 2 * grad_y, domain="unbuilt"
)
def doubled_backward(grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@twinop.triton_op(
    "doubled(Tensor x) -> Tensor",
    body=lambda op, x: op.Add(x, x),
    backward=doubled_backward,
    domain="unbuilt",
)
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@twinop.triton_op(
    "centered_backward(Tensor grad_y, Tensor mean) -> (Tensor grad_x, Tensor unused)",
    body=lambda grad_y, mean: (grad_y - grad_y.mean(), mean * grad_y.sum()),
    domain="unbuilt",
    samples=lambda dtype, size: [],
)
def centered_backward(grad_y: torch.Tensor, mean: torch.Tensor) -> Any:
    return torch.empty_like(grad_y), torch.empty_like(mean)


@twinop.triton_op(
    "centered(Tensor x) -> (Tensor y, Tensor mean)",
    body=lambda x: (x - x.mean(), x.mean()),
    backward=lambda grad_y, mean: torch.ops.unbuilt.centered_backward(grad_y, mean)[0],
    domain="unbuilt",
)
def centered(x: torch.Tensor) -> Any:
    return torch.empty_like(x), x.new_empty(())


@twinop.triton_op(
    "scaled_to_one_backward(Tensor grad_y, Tensor x, Tensor norm) -> Tensor",
    body=lambda grad_y, x, norm: grad_y / norm - x * (grad_y * x).sum() / norm**3,
    domain="unbuilt",
    samples=lambda dtype, size: [],
)
def scaled_to_one_backward(grad_y: torch.Tensor, x: torch.Tensor, norm: torch.Tensor) -> Any:
    return torch.empty_like(grad_y)


@twinop.triton_op(
    "scaled_to_one(Tensor x) -> (Tensor y, Tensor norm)",
    body=lambda x: (x / x.norm(), x.norm()),
    backward=scaled_to_one_backward,
    domain="unbuilt",
)
def scaled_to_one(x: torch.Tensor) -> Any:
    return torch.empty_like(x), x.new_empty(())


@pytest.fixture(scope="session")  # as the module is imported once
def mish(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mish_file(tmp_path_factory.mktemp("unbuilt"), "unbuilt_mish")
    return load_module(path).unbuilt_mish


def test_cpu_tensors_run_the_body(mish: KernelOp) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.linspace(-4, 4, 35).to(dtype).view(5, 7)
        expected = torch.nn.functional.mish(x.float()).to(dtype)
        assert torch.equal(mish(x), expected)
        assert torch.equal(mish(x.t()), expected.t())
    assert torch.equal(unbuilt_scaled(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(unbuilt_scaled(torch.ones(3), factor=0.5), torch.full((3,), 0.5))
    assert torch.ops.unbuilt_mish.unbuilt_mish(torch.zeros(2)).tolist() == [0, 0]


def test_a_launch_gets_contiguous_tensors_and_the_defaults_of_the_schema() -> None:
    @twinop.triton_op("noted(Tensor x, Tensor? y=None, float factor=2.0) -> Tensor", body=scaled_body)
    def noted(x: Any, y: Any, *, factor: float) -> Any:
        return x.stride(), y, factor

    assert noted.launch([torch.ones(2, 3).t(), None], {}) == ((2, 1), None, 2.0)
    assert noted.launch([torch.ones(1), None], {"factor": 0.5}) == ((1,), None, 0.5)
    assert noted.record.outputs == ("out",)  # y is an input


def test_derivatives(mish: KernelOp) -> None:
    """By a torch function, and by another op; twice."""
    for op in (mish, doubled):
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(op, (x,))
        assert torch.autograd.gradgradcheck(op, (x,))


def test_an_output_without_a_gradient_is_not_differentiable() -> None:
    """Its gradient would be left out silently. The second derivative has outputs of its own."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    centered_backward(x.detach(), x.detach().mean())  # registers it
    y, mean = centered(x)
    assert y.requires_grad and not mean.requires_grad
    assert torch.autograd.gradcheck(centered, (x,))
    assert torch.autograd.gradgradcheck(lambda x: centered(x)[0], (x,))


def test_no_second_derivative_through_an_output_without_a_gradient() -> None:
    """The backward's body would take the norm for a constant."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scaled_to_one, (x,))
    with pytest.raises(RecordError, match="it can be differentiated once, not twice"):
        torch.autograd.gradgradcheck(lambda x: scaled_to_one(x)[0], (x,))


def test_torch_checks_compiles_and_batches_it(mish: KernelOp) -> None:
    x = torch.randn(5, 6)
    mish(x)
    op = torch.ops.unbuilt_mish.unbuilt_mish.default
    torch.library.opcheck(op, (x.clone().requires_grad_(),))
    compiled = torch.compile(lambda x: mish(x) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mish(x) + 1)
    torch.testing.assert_close(torch.vmap(mish)(x), mish(x))  # some CPUs round single rows otherwise


@pytest.mark.cuda
def test_cuda_tensors_run_the_kernels(mish: KernelOp) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1000, dtype=dtype, device="cuda", requires_grad=True)
        torch.testing.assert_close(mish(x), torch.nn.functional.mish(x))
        compiled = torch.compile(lambda x: mish(x) + 1, fullgraph=True)
        torch.testing.assert_close(compiled(x), mish(x) + 1)
        mish(x).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()


def declare(schema: str = "act(Tensor x) -> Tensor", **options: Any) -> Callable[[Any], KernelOp]:
    given: dict[str, Any] = {"body": torch.relu, "domain": "mistakes"} | options
    return twinop.triton_op(schema, **given)


def test_mistakes_of_a_declaration() -> None:
    with pytest.raises(RecordError, match=r"act\(z\) does not fit the op .*; expected def act\(x\)"):
        declare()(_named("z"))
    with pytest.raises(RecordError, match=r"expected def act\(x, \*, eps\)"):
        declare("act(Tensor x, float eps=1e-5) -> Tensor")(_named("x, eps"))
    with pytest.raises(TwinopError, match="its backward takes gard; expected some of x, y, grad_y, grad"):
        declare(backward=lambda gard, x: gard)(_named("x"))
    with pytest.raises(TwinopError, match="its backward is in the domain unbuilt; expected one domain"):
        declare(backward=doubled_backward)(_named("x"))
    with pytest.raises(TwinopError, match=r"its backward is a function of C\+\+; expected one whose param"):
        declare(backward=torch.relu)(_named("x"))
    for dtypes in ("float32", (), (torch.float32,)):
        with pytest.raises(RecordError, match=r"dtypes is .*; expected a tuple of texts, such as"):
            declare(dtypes=dtypes)(_named("x"))
    with pytest.raises(TwinopError, match="domain 'my-ops': expected a name of letters"):
        declare(domain="my-ops")(_named("x"))


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        ("fp32", "'fp32' in dtypes of act: fp32 is not supported; expected one of float32, "),
        ("float32 y=float8_e5m2fnuz", "float8_e5m2fnuz is not supported"),
        ("float32 z=float16", "z is not a tensor of act(Tensor x) -> Tensor"),
        ("", "nothing is not supported"),
    ],
)
def test_dtypes_that_no_op_has(dtypes: str, said: str) -> None:
    with pytest.raises(RecordError) as raised:
        declare(dtypes=("float16", dtypes))(_named("x"))
    assert re.match(r"<string>:1: ", str(raised.value)) and said in str(raised.value)


def _named(parameters: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def act({parameters}): ...", scope)
    return scope["act"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("act", "expected name(arguments) -> results"),
        ("act(Tensor x) > Tensor", "expected name(arguments) -> results"),
        ("act(x) -> Tensor", "'x' is not an argument; expected one of Tensor"),
        ("act(Tensor x, flot a=1) -> Tensor", "'flot a=1' is not an argument"),
        ("act(float a, Tensor x) -> Tensor", "tensors come before attributes"),
        ("act(Tensor x, int n=1.5) -> Tensor", "its default is not of type int"),
        ("act(Tensor x) -> int", "it returns Tensor"),
        ("act(Tensor x) -> (Tensor, Tensor)", "several results have names"),
        ("act(Tensor x, float x=1) -> Tensor", "x names two things"),
        ("act(Tensor x,\n    flot a) -> Tensor", "'flot a' is not an argument"),
        ("act(Tensor(a!) x) -> Tensor(a!)", "it does not return its Tensor(a!)"),
        ("act(Tensor x) -> ()", "an op that returns nothing writes an input"),
        ("act(Tensor(a) x) -> ()", "'Tensor(a) x' is not an argument"),
        ("act(Tensor(a!) x, Tensor x_out) -> ()", "x_out names two things"),
    ],
)
def test_schemas_that_do_not_parse(schema: str, said: str) -> None:
    """The message has the schema, on one line."""
    with pytest.raises(RecordError) as raised:
        record_of(schema, "mistakes")
    message = str(raised.value)
    assert message.startswith("op schema: ") and said in message and "\n" not in message
    assert message.endswith(f", in `{' '.join(schema.split())}`")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"shapes": "y = x[0"}, "shape `x[0`: '[' was never closed"),
        ({"shapes": "y = x + [k]"}, "shape `x + [k]`: k is not an input or an attribute"),
        ({"shapes": "y = x[:-1] + [é]"}, "shape `x[:-1] + [é]`: `é` is not in the language of shapes"),
        ({"input_shapes": "x = x; w"}, "record: `w`; expected entries `name = value`"),
        ({"choices": "mode = a | b; mode = c"}, "record: `mode = c`; expected entries `name = value`"),
        ({"limits": "n > 0.5"}, "limits: `n > 0.5`: expected"),
        ({"limits": "mode in 0 | 1"}, "`mode in 0 | 1`: expected `axis of x` or `n in 0 | 1` for an int"),
    ],
)
def test_texts_that_do_not_parse(texts: dict[str, str], said: str) -> None:
    with pytest.raises(RecordError) as raised:
        record_of("act(Tensor x, str mode='a', int n=1) -> Tensor", "mistakes", **texts)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_what_a_call_gets_wrong() -> None:
    narrow = declare("narrow(Tensor x) -> Tensor", body=lambda x: x[:1])(lambda x: torch.empty_like(x))
    with pytest.raises(RecordError, match=r"the body of narrow gives y the shape \[1\], the op \[3\]"):
        narrow(torch.ones(3))
    two = declare("two(Tensor a, Tensor b) -> Tensor", body=torch.add, backward=lambda grad: grad)
    with pytest.raises(RecordError, match="its backward returned 1 gradients; expected one for each of a, b"):
        two(lambda a, b: torch.empty_like(a))(torch.ones(2).requires_grad_(), torch.ones(2)).sum().backward()


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (lambda dtype, size: [(1, 2, 3)], "gave 3 values; expected tensors in the order of given(Tensor a"),
        (lambda dtype, size: [(1,)], "gave a int for a of given(Tensor a, int n=1) -> Tensor"),
        (lambda dtype, size: [{"a": torch.ones(1), "n": 1.5}], "gave a float for n of given("),
        (lambda dtype, size: None, "failed: TypeError: 'NoneType' object is not iterable"),
        (lambda dtype: [], "failed: TypeError: <lambda>() takes 1 positional argument but 2 were given"),
    ],
)
def test_samples_that_do_not_fit(samples: Any, said: str) -> None:
    given = declare("given(Tensor a, int n=1) -> Tensor", samples=samples)(_named("a, *, n"))
    with pytest.raises(TwinopError, match=re.escape(f"samples(float32, 4) of given {said}")):
        given.calls("float32", 4)


@pytest.mark.parametrize(("module", "install"), [("triton", r"'twinop\[triton\]'"), ("helion", "helion$")])
def test_absent_modules(module: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's file imports them itself."""
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "lonely.py").write_text(f"import {module}\n")
    with pytest.raises(TwinopError, match=f"lonely.py cannot be imported: .*pip install {install}"):
        load_module(tmp_path / "lonely.py")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_an_export_asks_for_the_library(exporter: str, mish: Any, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mish(x)

    with pytest.raises(ExportError, match=r"unbuilt_mish \(.*\) has no library yet, .*: twinop build"):
        export(Model(), (torch.randn(3, 4),), tmp_path / "m.onnx", exporter=exporter, optimize=False)
