"""`twinop pack --triton`: a complete config.pbtxt for every model, and no function bodies."""

import re
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import service_models as models
from google.protobuf import text_format
from models import node
from pack_fixtures import packed, saved
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from twinop.cli.console import program
from twinop.deploy import session
from twinop.deploy.errors import ModelError
from twinop.deploy.pack import command, packing
from twinop.deploy.pack.command import Options
from twinop.deploy.pack.triton_config import make_config, write_config
from twinop.deploy.service.settings import SettingsError

Tensor = tuple[str, str, list[int]]
APP = program(command.main)


def plain(datatype: str, shape: Any, op: str = "Relu") -> onnx.ModelProto:
    """y = op(x) without a custom node. BF16 is one that ONNX Runtime has on the GPU only."""
    return models.make([node(op, domain="")], *([models.info(name, datatype, shape)] for name in "xy"))


def without_output_shape(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def config_of(repo: Path) -> Any:
    text = (repo / "models/custom_relu/config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def told(tensors: Any) -> list[Tensor]:
    kinds = model_config_pb2.DataType
    return [(e.name, kinds.Name(e.data_type).removeprefix("TYPE_"), list(e.dims)) for e in tensors]


OPENED: dict[str, tuple[onnx.ModelProto, int, list[Tensor], list[Tensor]]] = {
    "rows": (models.centred(), 0, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])]),
    "rows, joined": (models.relu(), 8, [("x", "FP32", [4])], [("y", "FP32", [4])]),
    "vector": (models.relu(shape=("N",)), 0, [("x", "FP32", [-1])], [("y", "FP32", [-1])]),
    "vector, joined": (models.relu(shape=("N",)), 8, [("x", "FP32", [1])], [("y", "FP32", [1])]),
    "scalar": (models.identity("INT64", ()), 0, [("x", "INT64", [1])], [("y", "INT64", [1])]),
    "fixed": (models.fixed(2, 3), 0, [("x", "FP32", [2, 3])], [("y", "FP32", [2, 3])]),
    "strings": (models.strings(), 0, [("a", "STRING", [-1]), ("b", "STRING", [-1])], [("y", "STRING", [-1])]),
    "output of unknown rank": (
        models.expand(), 0, [("x", "FP32", [1]), ("shape", "INT64", [-1])], [("y", "FP32", [1])],
    ),
    "default": (models.optional_scale(), 0, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])]),
}  # fmt: skip

# Models that no session on a CPU opens: the inputs and outputs come from the graph.
GPU_ONLY: dict[str, tuple[onnx.ModelProto, int, list[Tensor], list[Tensor]]] = {
    "rows, joined": (plain("BF16", ("N", 4)), 8, [("x", "BF16", [4])], [("y", "BF16", [4])]),
    "scalar": (plain("BF16", ()), 0, [("x", "BF16", [1])], [("y", "BF16", [1])]),
    "unnamed sizes": (plain("BF16", (None, 4)), 0, [("x", "BF16", [-1, 4])], [("y", "BF16", [-1, 4])]),
    "inferred output": (
        without_output_shape(plain("BF16", ("N", 4))), 0, [("x", "BF16", [-1, 4])], [("y", "BF16", [-1, 4])],
    ),
}  # fmt: skip
CASES = [
    pytest.param(case, gpu, id=f"{name}, {'GPU only' if gpu else 'opened'}")
    for gpu, cases in ((False, OPENED), (True, GPU_ONLY))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("case", "gpu"), CASES)
def test_every_packed_file_has_inputs_and_outputs(case: Any, gpu: bool, tmp_path: Path) -> None:
    """Without them Triton switched batching on, and mixed the rows of several requests."""
    model, batch, inputs, outputs = case
    repo, said = packed(tmp_path, model, max_batch_size=batch, gpu=gpu, triton=True)
    config = config_of(repo)
    assert (config.name, config.backend) == ("custom_relu", "onnxruntime")
    assert list(config.model_operations.op_library_filename) == said.library_paths
    assert told(config.input) == inputs and told(config.output) == outputs
    assert config.max_batch_size == batch and config.HasField("dynamic_batching") == bool(batch)
    if not batch:
        assert "max_batch_size: 0\n" in (repo / "models/custom_relu/config.pbtxt").read_text()
    for each, (_, _, dims) in zip((*config.input, *config.output), (*inputs, *outputs), strict=True):
        # Triton: dims are never empty, a reshape is empty only where requests are joined.
        assert dims and all(size == -1 or size > 0 for size in dims)
        assert each.HasField("reshape") == (dims == [1] and bool(batch)) and not each.reshape.shape
    assert ("not opened here" in said.note) == gpu


def test_what_no_graph_can_say(tmp_path: Path) -> None:
    """A sequence, in a model that only a GPU opens."""
    model = models.make(
        [node("Relu", ["x"], ["r"], "r", domain=""), node("SequenceConstruct", ["r"], ["y"], domain="")],
        [models.info("x", "BF16", (2,))],
        [onnx.helper.make_tensor_sequence_value_info("y", onnx.TensorProto.BFLOAT16, None)],
    )
    with pytest.raises(ModelError, match="y is sequence_type, which the Open Inference Protocol"):
        packed(tmp_path, model, gpu=True)


def test_the_graph_and_the_session_say_the_same(tmp_path: Path) -> None:
    made = [models.mlp(8, 16, 4), models.optional_scale(), models.two_outputs()]
    made += [models.gather(), models.total(), models.fixed()]
    made += [models.identity(datatype) for datatype in models.ELEMENTS]
    for model in made:
        read = packing.read_contents(Options(saved(tmp_path, model), tmp_path / "repo", gpu=True))
        opened = session(model, ["CPUExecutionProvider"])
        assert (tuple(opened.required), tuple(opened.outputs.values())) == (read.inputs, read.outputs)
        assert not read.note


def test_a_repository_without_bodies(tmp_path: Path) -> None:
    """Nothing in models/ but folders of models, so that one pack does not overwrite another's files."""
    model = models.relu()
    model.functions.add().CopyFrom(model.functions[0])
    model.functions[1].domain, model.functions[1].name = "theirs", "Other"
    repo, _ = packed(tmp_path, model, triton=True)
    assert sorted(path.name for path in repo.iterdir()) == ["models", "twinop-pack.json"]
    assert [path.name for path in (repo / "models").iterdir()] == ["custom_relu"]
    assert {path.name for path in (repo / "models/custom_relu").iterdir()} == {"config.pbtxt", "1"}
    written = onnx.load(repo / "models/custom_relu/1/model.onnx")
    assert [each.name for each in written.functions] == ["Other"] and written.graph == model.graph


def test_without_the_library_the_model_does_not_load(tmp_path: Path) -> None:
    """Triton's backend gives ONNX Runtime the library, or what lies there instead."""
    repo, _ = packed(tmp_path, models.relu(), triton=True)
    with pytest.raises(Exception, match="CustomRelu"):
        onnxruntime.InferenceSession(repo / "models/custom_relu/1/model.onnx")


@pytest.mark.parametrize("gpu", [False, True])
def test_the_command_for_triton(gpu: bool, tmp_path: Path) -> None:
    arguments = [str(saved(tmp_path)), "-o", str(tmp_path / "repo"), "--triton", "--gpu" if gpu else "--cpu"]
    said = CliRunner().invoke(APP, arguments, env={"COLUMNS": "160", "TERM": "dumb"}).output
    published = re.findall(r"-p (\S+)", said)
    assert len(published) == 3 and all(each.startswith("127.0.0.1:") for each in published)
    assert f"-v {tmp_path}/repo/models:/mnt/models:ro" in said and "--model-repository=/mnt/models" in said
    assert "/mnt/models/custom_relu/1/lib" in said and ("--gpus all" in said) == gpu


def test_what_cannot_be_written() -> None:
    def specs(model: onnx.ModelProto) -> tuple[Any, Any]:
        opened = session(model, ["CPUExecutionProvider"])
        return list(opened.inputs.values()), list(opened.outputs.values())

    with pytest.raises(SettingsError, match="and config.pbtxt needs a known rank"):
        write_config(make_config("relu", *specs(models.relu(shape=None))))
    inputs, outputs = specs(models.relu())
    for given, lacking in (([], outputs), "inputs"), ((inputs, []), "outputs"):
        with pytest.raises(SettingsError, match=f"no {lacking}, without which Triton completes config.pbtxt"):
            write_config(make_config("relu", *given))
    with pytest.raises(SettingsError, match=r"x is float32\[\]: config.pbtxt needs .* rows if batched"):
        write_config(make_config("relu", *specs(models.identity("FP32", ())), max_batch_size=4))
