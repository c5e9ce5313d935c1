"""deploy/run_onnx.py: lists, runs, compares with torch; one message and exit code 1 where it cannot."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import warm_python
from models import make_model, model, node, refused, relu_body, value
from onnx import TensorProto, helper
from run_command import run_command

from twinop.deploy import node_parity, run_onnx
from twinop.export import attach_bodies

ROOT = Path(__file__).parents[2]


def several() -> onnx.ModelProto:
    """Neg -> pad_affine (weight a constant, bias an input) -> double_and_sum, without names."""
    nodes = [
        node("Neg", ["x"], ["n"], "", ""),
        node("CustomPadAffine", ["n", "w", "b"], ["p"], "", scale=0.3, sign="minus", pads=[1, 2]),
        node("CustomDoubleAndSum", ["p"], ["d", "s"], ""),
    ]
    inputs = [value("x", "float16"), value("b", "float32", (4,))]
    outputs = [value("d", "float16", ("N", 7)), value("s", "float16", ("N",))]
    return model(nodes, inputs, outputs, initializers={"w": np.arange(4, dtype=np.float32)})


def test_relu(libraries: dict[str, Path], tmp_path: Path) -> None:
    result = run_command(make_model("CustomRelu", "bfloat16"), tmp_path, "--provider", "cpu")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    # The console breaks lines at spaces, and the library's path may have some.
    assert "".join(f"registered {libraries['custom_relu']}".split()) in "".join(result.output.split())
    said = "node", "CustomRelu", "custom_domain", "CPU"
    assert any(all(each in line for each in said) for line in lines)
    assert any("y" in line and "bfloat16[4, 4]" in line and "CPU" in line and "yes" in line for line in lines)


def test_a_difference_is_shown_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = node_parity.compare

    def tampered(proto: onnx.ModelProto, values: Any, records: Any) -> Any:
        values["y"][0, 0] += 1
        return compare(proto, values, records)

    monkeypatch.setattr(run_onnx, "compare", tampered)
    result = run_command(make_model("CustomRelu"), tmp_path)
    assert result.exit_code == 1 and "NO, 1 of 16 elements differ, by up to 1" in result.output


def test_an_op_without_a_cpu_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runtime computes it with its own operators: last bits may differ, not more."""
    from twinop.libraries.declare import CPU_FUNCTIONS

    linear = CPU_FUNCTIONS["linear"]
    inputs, outputs = [value("x", shape=(3, 4))], [value("y", shape=(3, 4))]
    weights = {"w": np.eye(4, dtype=np.float32)}
    product = model([node("CustomLinear", ["x", "w"])], inputs, outputs, initializers=weights)
    for scale, code, verdict in (1, 0, "yes"), (1 + 1e-6, 0, "- (no CPU kernel"), (1.01, 1, "NO, no CPU"):
        monkeypatch.setitem(CPU_FUNCTIONS, "linear", lambda *args, by=scale, **kw: by * linear(*args, **kw))
        result = run_command(product, tmp_path, "--provider", "cpu")
        assert result.exit_code == code and f"CPU    │ {verdict}" in result.output, result.output


def test_bits_are_compared_not_values() -> None:
    import torch

    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    for each in (zero, nan):
        assert node_parity.compare_bits(each, each.clone()) == (True, "")
    assert node_parity.compare_bits(zero, -zero) == (False, "3 of 3 elements differ, by up to 0")
    other = (nan.view(torch.int32) ^ 1).view(torch.float32)
    assert node_parity.compare_bits(nan, other)[0] is False
    assert node_parity.compare_bits(zero, zero.double()) == (False, "torch gives float64[3]")
    assert node_parity.compare_bits(zero, zero[:2]) == (False, "torch gives float32[2]")


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-30])
def test_what_both_runtimes_compute_is_compared_at_its_own_scale(scale: float) -> None:
    import torch

    from twinop.testing.messages import _far
    from twinop.testing.references import as_close_as_torch_asks

    expected = torch.tensor([1.0, -0.5]) * scale
    near = expected * (1 + 1e-6)
    assert node_parity._compare_bodies(near, expected)[0] is None
    assert node_parity._compare_bodies(torch.zeros(2), expected)[0] is False
    assert node_parity._compare_bodies(expected, torch.zeros(2))[0] is False
    assert not _far(near, expected).any() and _far(torch.zeros(2), expected).all()
    assert as_close_as_torch_asks(near, expected.double()).all()
    assert not as_close_as_torch_asks(torch.zeros(2), expected.double()).any()


def test_nodes_in_subgraphs_and_bodies(tmp_path: Path) -> None:
    then = helper.make_graph([node("CustomRelu", ["x"], ["t"], "inside")], "then", [], [value("t")])
    other = helper.make_graph([node("CustomRelu", ["x"], ["e"], "inside")], "else", [], [value("e")])
    choice = node("If", ["c"], ["y"], "if", "", then_branch=then, else_branch=other)
    result = run_command(model([choice], [value("x"), value("c", "bool", ())], [value("y")]), tmp_path)
    assert result.exit_code == 0
    assert any("inside" in line and "CPU" in line for line in result.output.splitlines())


def test_without_torch_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run_command(make_model("CustomRelu", "float16"), tmp_path)
    assert result.exit_code == 0 and "torch is not installed: nothing to compare with" in result.output


def test_a_body_instead_of_a_library(tmp_path: Path) -> None:
    (body := relu_body()).domain = "in.no.library"
    nodes = [node("CustomRelu", domain=body.domain)]
    graph = model(nodes, [value("x")], [value("y")], domains=[body.domain], functions=[body])
    result = run_command(graph, tmp_path)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "note: " in said and "function bodies run instead, which is slower: name the library" in said
    assert "runs without a custom-op library" in said and "ran as its function body" in said


def test_an_op_that_torch_has_on_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an op of Triton, whose body runs in ONNX Runtime on the CPU: its module is not imported."""
    monkeypatch.setattr("twinop.torch_op.registry.runs_on_cpu", lambda record: False)
    result = run_command(make_model("CustomRelu"), tmp_path, "--provider", "cpu")
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "custom_domain::relu needs a GPU in torch, and was not compared" in said


def typed(inputs: str, outputs: str, nodes: str) -> onnx.ModelProto:
    opsets = '["": 20, "ai.onnx.ml": 3, "custom_domain": 1]'
    text = f"g ({inputs}) => ({outputs}) {{ {nodes} }}"
    return onnx.parser.parse_model(f"<ir_version: 9, opset_import: {opsets}> {text}")


def of_maps() -> onnx.ModelProto:
    nodes = "z = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (x)"
    made = typed("float[N, 2] x", "map(int64, float) z", nodes)
    of_map = helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, []))
    made.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(of_map))
    return made


RELU, ANY_RANK = make_model("CustomRelu"), make_model("CustomRelu", shape=None)
KINDS = "int64[N, A] a, bool[N, B] b, double[N, C] c", "int64[N, A] d, bool[N, B] e"
COPIES = typed(*KINDS, "d = Identity (a) e = Identity (b)")
SPLIT = "r = custom_domain.CustomRelu (x) y = SplitToSequence (r)"
SEQUENCE = typed("seq(float[N, 2]) s", "int64 n", "n = SequenceLength (s)")
NORM = "y = custom_domain.CustomAddLayerNorm (x, x, w)"
RUNS: list[tuple[onnx.ModelProto, str, int, str]] = [
    # the model, options, the exit code, and what is said
    (COPIES, "--shape a=2,5", 0, "d: int64[2, 5]"),
    (COPIES, "--shape a=2,5", 0, "e: bool[2, 4]"),  # N has one size
    (typed("string[N] x", "string[N] y", "y = Identity (x)"), "", 0, "output y: str[4]"),
    (typed("string[N] x", "string[N] y", "y = Identity (x)"), "", 0, "not compared with torch, which has no"),
    (of_maps(), "", 0, "output z: list of 4 (dict of 2 (float, ...), ...)"),
    (typed("float[N, 2] x", "seq(float[1, 2]) y", SPLIT), "", 0, "output y: list of 4 (float32[1, 2], ...)"),
    (typed("float[N, 2] x", "seq(float[1, 2]) y", SPLIT), "", 0, " yes "),  # custom nodes are compared
    (typed("float[N, 2] x", "optional(float[N, 2]) y", "y = Optional (x)"), "", 0, "output y: float32[4, 2]"),
    (typed("float[N, 4] x, float[4] w", "float[N, 4] y", NORM), "", 0, " yes "),  # with outputs left out
    (ANY_RANK, "--shape x=2,3,1", 0, "output y: float32[2, 3, 1]"),
    (ANY_RANK, "--shape x=", 0, "output y: float32[]"),
    (ANY_RANK, "", 1, "x has no declared rank: give its sizes with --shape x=2,3"),
    (SEQUENCE, "", 1, "random inputs for tensors only"),
    (RELU, "--shape x=a", 1, "--shape x=a: expected NAME=SIZE,SIZE such as x=2,3"),
    (RELU, "--shape z=1", 1, "--shape z=1: the model has no input 'z'; it has: x"),
    (RELU, "--shape x=-1,4", 1, "--shape x=-1,4: a size is negative"),
    (RELU, "--shape x=2,5", 1, "dimension 1 must be 4, not 5"),
    (RELU, "--library none.so", 1, "none.so: no such file"),
    (make_model("CustomGelu", aproximate="tanh"), "", 1, "did you mean approximate?"),
]


@pytest.mark.parametrize(("graph", "options", "code", "said"), RUNS)
def test_what_is_said(graph: onnx.ModelProto, options: str, code: int, said: str, tmp_path: Path) -> None:
    result = run_command(graph, tmp_path, "--provider", "cpu", *options.split())
    assert result.exit_code == code and said in " ".join(result.output.split()) + " ", result.output
    assert result.output.count("error:") == code


def test_sizes_of_4_that_the_model_refuses(tmp_path: Path) -> None:
    """Others are found as `twinop optimize` finds them, unless sizes are asked for."""
    inputs = "float[B, P, 8] p, float[B, S, 8] x, float[B, T, 8] m"
    nodes = "c = Concat <axis = 1> (p, x) y = Add (c, m)"
    graph = typed(inputs, "float[B, T, 8] y", nodes)
    for each in (*graph.graph.input, *graph.graph.output):
        for dim in each.type.tensor_type.shape.dim:
            dim.dim_param = "P + S" if dim.dim_param == "T" else dim.dim_param
    result = run_command(graph, tmp_path)
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "output y: float32[" in said, said
    assert "dynamic sizes of 4 do not fit (" in said and "): the model ran with other sizes" in said
    result = run_command(graph, tmp_path, "--shape", "x=2,3,8")
    assert result.exit_code == 1 and "do not fit" not in result.output


def test_a_model_that_onnx_runtime_breaks(tmp_path: Path) -> None:
    result = run_command(refused("to open"), tmp_path)
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "output y: float32[4, " in said, said
    assert "fails when it optimizes this model, so it ran without these" in said


def script(*arguments: object, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"} | {"COLUMNS": "200"}
    return warm_python.run([ROOT / "deploy/run_onnx.py", *map(str, arguments)], cwd=cwd, env=environment)


def test_as_a_script_from_anywhere(tmp_path: Path, libraries: dict[str, Path]) -> None:
    """In a fresh process, whose torch knows twinop's own ops only: the library is loaded into it, too."""
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "my model.onnx").write_bytes(several().SerializeToString())
    result = script("my model.onnx", "--library", libraries["test_ops"], "--shape", "x=3,4", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "same bits as torch" in result.stdout and "torch has no" not in result.stdout
    assert f"registered {libraries['test_ops']}" in " ".join(result.stdout.split())
    verdicts = [line.split() for line in result.stdout.splitlines() if " yes " in line]
    assert [words[1] for words in verdicts] == ["CustomPadAffine_1"] + 2 * ["CustomDoubleAndSum_2"]
    assert "float16[3, 7]" in result.stdout and "Neg" in result.stdout
    assert [each.name for each in folder.iterdir()] == ["my model.onnx"]


def in_functions(levels: int) -> onnx.ModelProto:
    """CustomRelu in a local function without types, called by functions of `levels` - 1 levels."""
    opsets = [helper.make_opsetid(*each) for each in (("", 20), ("mine", 1), ("custom_domain", 1))]
    relu = node("CustomRelu", ["a"], ["b"], "")
    functions = [helper.make_function("mine", "F1", ["a"], ["b"], [relu], opsets)]
    for level in range(2, levels + 1):
        inner = node(f"F{level - 1}", ["a"], ["c"], "", "mine")
        again = node("CustomRelu", ["c"], ["b"], "")
        functions.append(helper.make_function("mine", f"F{level}", ["a"], ["b"], [inner, again], opsets))
    top = node(f"F{levels}", ["x"], ["y"], "", "mine")
    return model([top], [value("x")], [value("y")], domains=["custom_domain", "mine"], functions=functions)


def test_ops_in_local_functions(tmp_path: Path, libraries: dict[str, Path]) -> None:
    """They are found; what is not compared is named, and so is what helps where ONNX Runtime lacks a type."""
    result = run_command(in_functions(1), tmp_path, "--provider", "cpu")
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "registered " in said, said
    assert "not compared, since not in the main graph: node 0 (CustomRelu) in function mine::F1" in said
    nested = in_functions(2)
    refused = " ".join(run_command(nested, tmp_path).output.split())
    assert "(CustomRelu) in function mine::F1 is in one: twinop.export.attach_bodies puts" in refused
    assert "tensor(int64)" not in refused
    whole = attach_bodies(nested)
    assert [each.op_type for each in whole.graph.node] == ["CustomRelu", "CustomRelu"]
    assert run_command(whole, tmp_path, "--provider", "cpu").exit_code == 0


@pytest.mark.parametrize("length", [{}, {"length": "8"}])
def test_a_comparison_with_torch_reads_data_behind_links(length: dict[str, str], tmp_path: Path) -> None:
    """ONNX Runtime takes a data file with a second name, which onnx takes for an attack."""
    (tmp_path / "m.data").write_bytes(b"skip" + np.array([1, 2], np.float32).tobytes())
    (tmp_path / "other.data").hardlink_to(tmp_path / "m.data")
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, text in ({"location": "m.data", "offset": "4"} | length).items():
        weight.external_data.add(key=key, value=text)
    graph = onnx.ModelProto(graph=onnx.GraphProto(initializer=[weight]))
    values = run_onnx._Values({}, graph, tmp_path, "cpu")
    assert values["w"].tolist() == [1, 2]
