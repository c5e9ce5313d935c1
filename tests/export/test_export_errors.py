"""Tests exports that must fail or warn: each has one message, and no incomplete file is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import op_bodies  # noqa: F401 (the test ops)
import pytest
import torch
from export_models import Numbers, plain
from optimizing import weights

from twinop import torch_op
from twinop.errors import ExportError, TwinopError
from twinop.model import bodies


def relu_args(**changes: Any) -> dict[str, Any]:
    return {"model": torch_op.CustomReLU(), "args": torch.randn(4, 3)} | changes


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_op.relu(x) if x.sum() > 0 else x


class ShapeAttribute(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_op.pad_affine(x, pads=[0, x.shape[0]])


class Fixed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_op.relu(x.reshape(4, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, r"device='tpu': expected one of: cuda, cpu"),
        ({"opset": 26}, r"opset 26 is not supported"),
        ({"dynamic": {"z": [0]}}, r"no input z; its inputs are: x"),
        ({"dynamic": {"x": "rows"}}, r"dynamic='x': 'rows' is not an axis; expected an axis, a list of axes"),
        ({"dynamic": {"x": 2}}, r"input x has no axis 2; its example has shape \(4, 3\)"),
        ({"dynamic": {"x": None}}, r"dynamic='x': None is not an axis"),
        ({"dynamic": {"x": [2]}}, r"input x has no axis 2; its example has shape \(4, 3\)"),
        ({"dynamic": {"x": [0]}, "args": torch.randn(1, 3)}, r"axis 0 of x has size 1 .* at least 2"),
        ({"args": torch.ones(3, dtype=torch.int64)}, r"fails on its example inputs.*no kernel.*float32"),
        ({"args": torch.ones(3, dtype=torch.complex64)}, r"fails on its example inputs"),
        ({"args": ()}, r"do not fit CustomReLU\.forward.*missing a required argument: 'x'"),
        ({"args": (torch.ones(3), torch.ones(3))}, r"do not fit CustomReLU\.forward.*too many"),
        ({"args": (None,)}, r"example inputs hold no tensor"),
        ({"model": Branching()}, r"torch's dynamo exporter cannot export the model"),
        ({"model": ShapeAttribute(), "dynamic": {"x": [0]}}, r"axis 0 of x was .*fixes it to 4.*attribute"),
        ({"model": Fixed(), "dynamic": {"x": [0]}}, r"axis 0 of x was to stay dynamic.*fixes it to 4"),
        (
            {
                "model": lambda x: torch_op.pad_affine(x, scale=1 / x.shape[0]),
                "dynamic": {"x": [0]}, "exporter": "torchscript",
            },
            r"differs from torch in output 0.*that Python took from them may be fixed.*out of dynamic=",
        ),
        (
            {"model": torch.nn.Conv1d(4, 4, 1).bfloat16(), "args": torch.ones(4, 3, dtype=torch.bfloat16)},
            r"checker refuses.*Conv.*unsupported type: tensor.bfloat16.*from opset 22 on: opset=22",
        ),
        (
            {
                "model": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
                "args": torch.ones(1, 2, 3, 4, dtype=torch.bfloat16), "exporter": "torchscript",
            },
            r"output 0: dtype float32, torch bfloat16",  # its mask is in fp32, and it cannot run
        ),
        ({"library": "/nowhere/libcustom_relu.so", "exporter": "torchscript"}, r"relu.so: no such file"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(TwinopError, match=message):
        plain(**relu_args(**changes), path=path)
    assert list(tmp_path.iterdir()) == []  # no incomplete file


def test_a_model_that_runs_at_one_size_only(tmp_path: Path) -> None:
    """Tracing does not notice; torch itself fails at another size, and the report says it."""
    given = Fixed(), torch.randn(4, 3), tmp_path / "m.onnx"
    report = plain(*given, exporter="torchscript", dynamic={"x": [0]})
    assert not report.resized and any("not compared at other sizes" in note for note in report.notes)


class TracedSize(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_op.relu(x) + torch.arange(int(x.shape[0])).unsqueeze(1)


def test_a_size_that_tracing_burnt_in(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"fails in ONNX Runtime for x \(5, 3\)"):
        given = TracedSize(), torch.randn(4, 3), tmp_path / "m.onnx"
        plain(*given, exporter="torchscript", dynamic={"x": [0]})
    assert list(tmp_path.iterdir()) == []


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    for path, message in (
        (tmp_path / "none" / "m.onnx", r"none/m\.onnx: cannot be written.*No such file"),
        (occupied / "m.onnx", r"cannot be written.*Not a directory"),
        (tmp_path, r"is a folder; expected a file name"),
        (Path("/proc/m.onnx"), r"/proc/m\.onnx: cannot be written"),
    ):
        with pytest.raises(ExportError, match=message):
            plain(torch_op.CustomReLU(), torch.randn(3), path, exporter="torchscript", external_data_bytes=0)


def test_a_wrong_result_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("the file of before")
    monkeypatch.setitem(bodies.BODIES, "relu", bodies.Body(lambda op, x: op.Neg(x)))
    with pytest.raises(ExportError, match=r"without the library, differs from torch in output 0"):
        plain(torch_op.CustomReLU(), torch.randn(3), path, exporter="torchscript")
    assert path.read_text() == "the file of before" and len(list(tmp_path.iterdir())) == 1


def test_a_wrong_result_is_refused_among_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.BODIES, "relu", bodies.Body(lambda op, x: op.Mul(x, 0.0)))
    with pytest.raises(ExportError, match=r"in output 0 .* error .* where the largest value is .*, acc"):
        model = Numbers(lambda x: torch_op.relu(x) * 1e-30)
        plain(model, torch.randn(3, 5), tmp_path / "m.onnx", exporter="torchscript")


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Numbers(lambda x: torch.layer_norm(x, (512,)).mean(-1)), torch.tensor(weights(4, 512))),
        (Numbers(lambda x: torch.softmax(x, -1).mean(0)), torch.randn(4, 30000)),
    ],
    ids=["mean of a normed row", "shares"],
)
def test_outputs_near_zero_where_numbers_cancel(model: Any, example: torch.Tensor, tmp_path: Path) -> None:
    assert plain(model, example, tmp_path / "m.onnx", exporter="torchscript").parity is not None


def test_a_missing_kernel_in_onnxruntime_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library runs the model. The body does not run: ONNX Runtime has no fp64 Erf on the CPU."""
    # 0 * erf(x) does not change the result.
    body = bodies.Body(lambda op, x: op.Where(op.Less(x, op.Mul(op.Erf(x), 0.0)), 0, x))
    monkeypatch.setitem(bodies.BODIES, "relu", body)
    x = torch.randn(3, dtype=torch.float64)
    report = plain(torch_op.CustomReLU(), x, tmp_path / "m.onnx", exporter="torchscript")
    assert report.parity is not None and report.parity.equal and report.without_library is None
    (cell,) = report.unsupported
    assert cell.startswith("CustomRelu float64: ONNX Runtime") and cell.endswith("has no CPU kernel for Erf")


def test_another_operator_without_a_kernel_stops_the_comparison_only(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch_op.CustomReLU()).bfloat16()
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    report = plain(model, x, tmp_path / "m.onnx", exporter="torchscript")
    assert report.parity is None and "has no CPU kernel for" in report.parity_reason


WRONG = {  # a body that is right for ordinary numbers
    "inputs of zeros": lambda op, x: op.Div(op.Mul(op.Relu(x), x), x),
    "inputs of ones": lambda op, x: op.Where(op.Equal(x, 1), 0.5, op.Relu(x)),
    "large inputs": lambda op, x: op.Clip(x, 0.0, 99.0),
}


@pytest.mark.parametrize("special", WRONG)
def test_wrong_for_special_inputs_only(special: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.BODIES, "relu", bodies.Body(WRONG[special]))
    with pytest.raises(ExportError, match=f"without the library, differs from torch for {special} in output"):
        plain(torch_op.CustomReLU(), torch.randn(3, 5), tmp_path / "m.onnx", exporter="torchscript")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x / x.abs(),  # NaN in both
        lambda x: x.topk(3).indices,  # a choice among equals
        lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),  # of ones: noise
        lambda x: x.half() * x.half() * 1e-3,  # too large for fp16
        lambda x: torch.softmax(x @ x.T, -1),
    ],
)
def test_special_inputs_of_no_certain_result(compute: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    report = plain(Numbers(compute), torch.randn(4, 16), tmp_path / "m.onnx", exporter="torchscript")
    assert report.parity is not None and report.parity.error < 1e-3 and not report.notes


@pytest.mark.parametrize("compute", [lambda x: x[x > 1e5], lambda x: torch.sqrt(-1 - x.abs())])
def test_an_output_never_compared(compute: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    given = Numbers(compute), torch.randn(4, 16), tmp_path / "m.onnx"
    with pytest.raises(ExportError, match="output y has no .*cannot be compared. Give example inputs"):
        plain(*given, exporter="torchscript")
    assert not list(tmp_path.iterdir())
    report = plain(*given, exporter="torchscript", allow_uncompared=True)
    assert any("it was not compared" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_modules_quantized_by_torch_ao(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch_op.CustomReLU())
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    said = r"torch's torchscript exporter cannot.*quantized modules of torch\.ao, as 0 \(Linear\)\. "
    said += r"Export the model before it is quantized, .*onnxruntime\.quantization$"
    with pytest.raises(ExportError, match=said):
        plain(quantized, (torch.ones(2, 4),), tmp_path / "m.onnx", exporter="torchscript")


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "training dropout": lambda x: torch.nn.functional.dropout(x, training=True),
    "randn_like": lambda x: x + 1e-3 * torch.randn_like(x),
    "integers": lambda x: torch.multinomial(x.softmax(-1), 1),
    "a constant of the trace": lambda x: x + torch.randint(0, 1000, (16,)),
}


@pytest.mark.parametrize(("kind", "exporter"), [*zip(DRAWS, ["dynamo", "torchscript"] * 2, strict=True)])
def test_a_model_that_draws_random_numbers(exporter: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="^the model draws random numbers: output 0 differs from call to c"):
        plain(Numbers(DRAWS[kind]), torch.randn(4, 16), tmp_path / "m.onnx", exporter=exporter)
