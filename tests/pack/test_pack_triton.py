"""The packed config.pbtxt: complete for every model, as Triton needs it, and read by twinop serve."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import service_models as models
from models import node
from pack_fixtures import packed, saved

from twinop.deploy.errors import ModelError, RunError
from twinop.deploy.pack import contents
from twinop.deploy.service.folders import scan
from twinop.deploy.service.loaded_model import LoadedModel
from twinop.deploy.service.loading import load
from twinop.deploy.service.protocol import model_config_pb2
from twinop.deploy.service.settings import Policy, ServerSettings, read_settings
from twinop.errors import TwinopError
from twinop.library import checksum

Tensor = tuple[str, str, list[int]]


def plain(datatype: str, shape: Any, op: str = "Relu") -> onnx.ModelProto:
    """y = op(x) without a custom node. BF16 is one that ONNX Runtime has on the GPU only."""
    return models.make(
        [node(op, domain="")],
        [models.info("x", datatype, shape)],
        [models.info("y", datatype, shape)],
    )


def without_output_shape(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def with_default(model: onnx.ModelProto) -> onnx.ModelProto:
    """With one more input, which has a default."""
    weight = onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")
    model.graph.initializer.append(weight)
    model.graph.input.append(models.info("w", "FP32", (2,)))
    return model


def config_of(repo: Path) -> Any:
    from google.protobuf import text_format

    text = (repo / "models/custom_relu/config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def told(tensors: Any) -> list[Tensor]:
    kinds = model_config_pb2.DataType
    return [
        (each.name, kinds.Name(each.data_type).removeprefix("TYPE_"), list(each.dims)) for each in tensors
    ]


def autofills(config: Any) -> bool:
    """Whether Triton's ONNX Runtime backend completes this file from the model (AutoCompleteConfig)."""
    return not (config.input and config.output)


def served(repo: Path) -> LoadedModel:
    """As `twinop serve repo/models --provider cpu --allow-model-libraries` loads it."""
    folder = scan(repo / "models")["custom_relu"]
    settings = read_settings(None, {}).for_model("custom_relu", folder.own)
    settings = settings.model_copy(update={"provider": "cpu"})
    return load(folder.versions[1], settings, ServerSettings(), Policy(allow_model_libraries=True))


OPENED: dict[str, tuple[onnx.ModelProto, int, list[Tensor], list[Tensor]]] = {
    "rows": (models.centred(), 0, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])]),
    "rows, joined": (models.relu(), 8, [("x", "FP32", [4])], [("y", "FP32", [4])]),
    "vector": (models.relu(shape=("N",)), 0, [("x", "FP32", [-1])], [("y", "FP32", [-1])]),
    "vector, joined": (models.relu(shape=("N",)), 8, [("x", "FP32", [1])], [("y", "FP32", [1])]),
    "scalar": (models.identity("INT64", ()), 0, [("x", "INT64", [1])], [("y", "INT64", [1])]),
    "fixed": (models.fixed(2, 3), 0, [("x", "FP32", [2, 3])], [("y", "FP32", [2, 3])]),
    "strings": (
        models.strings(), 0, [("a", "STRING", [-1]), ("b", "STRING", [-1])], [("y", "STRING", [-1])],
    ),
    "bfloat16": (models.identity("BF16"), 0, [("x", "BF16", [-1, -1])], [("y", "BF16", [-1, -1])]),
    "output of unknown rank": (
        models.expand(), 0, [("x", "FP32", [1]), ("shape", "INT64", [-1])], [("y", "FP32", [1])],
    ),
    "default": (models.optional_scale(), 0, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])]),
}  # fmt: skip

# Models that no session on a CPU opens: the inputs and outputs come from the graph.
GPU_ONLY: dict[str, tuple[onnx.ModelProto, int, list[Tensor], list[Tensor]]] = {
    "rows": (plain("BF16", ("N", 4)), 0, [("x", "BF16", [-1, 4])], [("y", "BF16", [-1, 4])]),
    "rows, joined": (plain("BF16", ("N", 4)), 8, [("x", "BF16", [4])], [("y", "BF16", [4])]),
    "vector, joined": (plain("BF16", ("N",)), 8, [("x", "BF16", [1])], [("y", "BF16", [1])]),
    "scalar": (plain("BF16", ()), 0, [("x", "BF16", [1])], [("y", "BF16", [1])]),
    "unnamed sizes": (plain("BF16", (None, 4)), 0, [("x", "BF16", [-1, 4])], [("y", "BF16", [-1, 4])]),
    "inferred output": (
        without_output_shape(plain("BF16", ("N", 4))), 0, [("x", "BF16", [-1, 4])], [("y", "BF16", [-1, 4])],
    ),
    "default": (with_default(plain("BF16", ("N", 4))), 0, [("x", "BF16", [-1, 4])], [("y", "BF16", [-1, 4])]),
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
    repo, said = packed(tmp_path, model, max_batch_size=batch, gpu=gpu)
    config = config_of(repo)
    assert not autofills(config)
    assert told(config.input) == inputs and told(config.output) == outputs
    assert config.max_batch_size == batch and config.HasField("dynamic_batching") == bool(batch)
    if not batch:
        assert "max_batch_size: 0\n" in (repo / "models/custom_relu/config.pbtxt").read_text()
    for each, (_, _, dims) in zip((*config.input, *config.output), (*inputs, *outputs), strict=True):
        # Triton: dims are never empty, a reshape is empty only where requests are joined.
        assert dims and all(size == -1 or size > 0 for size in dims)
        assert each.HasField("reshape") == (dims == [1] and bool(batch)) and not each.reshape.shape
    assert any("not opened here" in note for note in said.contents.notes) == gpu


@pytest.mark.parametrize("case", OPENED.values(), ids=OPENED)
def test_twinop_serves_what_was_packed(case: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where Triton's shapes are not the model's: those of the model are served."""
    model, batch, _, _ = case
    loaded = served(packed(tmp_path, model, max_batch_size=batch, gpu=False)[0])
    assert "is not read" not in caplog.text  # config.pbtxt says no more than twinop.toml
    assert loaded.settings.max_batch_size == batch
    for each, spec in zip(model.graph.input, loaded.inputs.values(), strict=True):
        assert spec.shape is not None and len(spec.shape) == len(each.type.tensor_type.shape.dim)


@pytest.mark.parametrize(
    ("model", "batch", "ours", "theirs"),
    [(models.identity("FP32", ()), 0, "[]", "[1]"), (models.relu(shape=("N",)), 4, "[N]", "[N, 1]")],
)
def test_other_shapes_in_triton_are_said(
    model: onnx.ModelProto, batch: int, ours: str, theirs: str, tmp_path: Path
) -> None:
    repo, said = packed(tmp_path, model, max_batch_size=batch)
    expected = f"x has shape {ours} in twinop serve and {theirs} in Triton"
    assert any(note.startswith(expected) for note in said.contents.notes)
    assert expected in (repo / "README.md").read_text()


def test_bfloat16_needs_a_triton_that_takes_it(tmp_path: Path) -> None:
    repo, said = packed(tmp_path, models.identity("BF16"))
    expected = "x is bfloat16, which Triton's ONNX Runtime backend takes from 26.03 on"
    assert expected in said.contents.notes and expected in (repo / "README.md").read_text()


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (plain("BF16", None, "Identity"), "x is bfloat16 of any shape, and config.pbtxt needs a known rank"),
        (models.make(
            [node("Identity", ["w"], domain="")],
            [models.info("w", "FP32", ("N",))],
            [models.info("y", "FP32", ("N",))],
            weights={"w": np.ones(2, np.float32)},
        ), "the model has no inputs, without which Triton completes config.pbtxt itself"),
    ],
    ids=["unknown rank", "no input"],
)  # fmt: skip
def test_models_that_config_pbtxt_cannot_describe(
    model: onnx.ModelProto, message: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu:
        no_session(monkeypatch)
    with pytest.raises(TwinopError, match=message):
        packed(tmp_path, model, gpu=gpu)
    assert not (tmp_path / "repo").exists()


def test_what_no_graph_can_say(tmp_path: Path) -> None:
    """A sequence, in a model that only a GPU opens."""
    model = models.make(
        [node("Relu", ["x"], ["r"], "r", domain=""), node("SequenceConstruct", ["r"], ["y"], domain="")],
        [models.info("x", "BF16", (2,))],
        [onnx.helper.make_tensor_sequence_value_info("y", onnx.TensorProto.BFLOAT16, None)],
    )
    with pytest.raises(
        ModelError, match="y is sequence_type, which the Open Inference Protocol cannot carry"
    ):
        packed(tmp_path, model, gpu=True)


def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: Any) -> Any:
        raise RunError("no kernel here")

    monkeypatch.setattr(contents, "session", session)


def test_the_graph_and_the_session_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [models.mlp(8, 16, 4), models.optional_scale(), models.two_outputs(), models.slow()]
    made += [models.gather(), models.total(), models.fixed()]
    made += [models.identity(datatype) for datatype in models.ELEMENTS]
    for model in made:
        path = saved(tmp_path, model)
        opened = contents.read_contents(path, [], True, False)
        with monkeypatch.context() as patched:
            no_session(patched)
            read = contents.read_contents(path, [], True, False)
        assert (opened.inputs, opened.outputs) == (read.inputs, read.outputs)
        assert len(read.notes) == len(opened.notes) + 1


# -------------------------------------------------------------------------------- --triton


def triton_model(repo: Path) -> onnx.ModelProto:
    return onnx.load(repo / "models/custom_relu/1/model.onnx")


def test_triton_gets_a_repository_without_bodies(tmp_path: Path) -> None:
    model = models.relu()
    assert [each.name for each in model.functions] == ["CustomRelu"]
    repo, said = packed(tmp_path, model, triton=True)
    assert sorted(path.name for path in repo.iterdir()) == ["README.md", "models", "twinop-pack.json"]
    assert not triton_model(repo).functions and triton_model(repo).graph == model.graph
    assert not (repo / "models/custom_relu/twinop.toml").exists()
    manifest = json.loads((repo / "twinop-pack.json").read_text())
    assert manifest["model_sha256"] == checksum(repo / "models/custom_relu/1/model.onnx")
    assert said.libraries[0] in (repo / "models/custom_relu/config.pbtxt").read_text()


def test_triton_gets_the_bodies_if_asked(tmp_path: Path) -> None:
    repo, _ = packed(tmp_path, models.relu(), triton=True, bodies=True)
    assert triton_model(repo) == models.relu()
    assert "without a word" in (repo / "README.md").read_text()


def test_without_the_library_the_model_does_not_load(tmp_path: Path) -> None:
    """Triton's backend gives ONNX Runtime the library, or what lies there instead."""
    import onnxruntime

    repo, _ = packed(tmp_path, models.relu(), triton=True)
    path = repo / "models/custom_relu/1/model.onnx"
    with pytest.raises(Exception, match="CustomRelu"):
        onnxruntime.InferenceSession(path)
    kept, _ = packed(tmp_path, models.relu(), triton=True, bodies=True, force=True)
    onnxruntime.InferenceSession(kept / "models/custom_relu/1/model.onnx")


def test_other_functions_stay(tmp_path: Path) -> None:
    model = models.relu()
    model.functions.add().CopyFrom(model.functions[0])
    model.functions[1].domain, model.functions[1].name = "theirs", "Other"
    repo, _ = packed(tmp_path, model, triton=True)
    assert [each.name for each in triton_model(repo).functions] == ["Other"]


@pytest.mark.parametrize("gpu", [False, True])
def test_triton_readme(gpu: bool, tmp_path: Path) -> None:
    said = (packed(tmp_path, models.relu(), triton=True, gpu=gpu)[0] / "README.md").read_text()
    published = re.findall(r"-p (\S+)", said[: said.index("```", said.index("docker run"))])
    assert len(published) == 3 and all(each.startswith("127.0.0.1:") for each in published)
    assert '-v "$PWD/models:/mnt/models:ro"' in said and "--model-repository=/mnt/models" in said
    assert "/mnt/models/custom_relu/1/lib" in said and "KIND_GPU but no GPUs" in said
    assert ("docker run --rm --gpus all -e ORT_DISABLE_TELEMETRY=1 -p" in said) == gpu
    assert "-e ORT_DISABLE_TELEMETRY=1" in said


def test_packs_share_a_repository(tmp_path: Path) -> None:
    """Nothing in models/ but the folders of models, so that one pack does not overwrite another's files."""
    for options in ({}, {"triton": True}):
        repo, _ = packed(tmp_path, models.relu(), force=True, **options)
        assert [path.name for path in (repo / "models").iterdir()] == ["custom_relu"]
