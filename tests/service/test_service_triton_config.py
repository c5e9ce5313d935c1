"""config.pbtxt: reading it with Triton's meaning, refusing unsupported features, and writing it."""

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tritonclient", reason="its protocol buffers judge what we write and read")

import service_models

from twinop.deploy import session
from twinop.deploy.service.model_settings import Provider
from twinop.deploy.service.read_triton_config import TritonConfig, read_config
from twinop.deploy.service.settings import Settings, SettingsError
from twinop.deploy.service.triton_config import make_config, write_config
from twinop.deploy.service.warm_up import make_trial


def read(folder: Path, text: str) -> TritonConfig:
    path = folder / "config.pbtxt"
    path.write_text(text)
    return read_config(path, "relu")


def test_all_that_has_an_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(
        tmp_path,
        """
        name: "relu"  # a comment
        backend: "onnxruntime"
        max_batch_size: 32
        input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
        output [ { name: "y" data_type: TYPE_STRING dims: [ 4 ] } ]
        dynamic_batching {
          preferred_batch_size: [ 8, 16 ]
          max_queue_delay_microseconds: 250
          default_queue_policy { max_queue_size: 99 }
        }
        instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] }, { kind: KIND_GPU } ]
        version_policy { specific { versions: [ 1, 3 ] } }
        model_operations { op_library_filename: "/models/relu/1/librelu.so" }
        model_warmup [ { name: "w" batch_size: 4 inputs { key: "x" value {
          data_type: TYPE_FP32 dims: [ 7, 4 ] zero_data: true } } } ]
        parameters { key: "intra_op_thread_count" value { string_value: "3" } }
        """,
    )
    assert config.settings == {
        "max_batch_size": 32,
        "preferred_batch_sizes": (8, 16),
        "max_queue_delay_us": 250,
        "max_queue": 99,
        "instances": 3,
        "provider": Provider.CUDA,
        "versions": (1, 3),
        "library": (Path("librelu.so"),),  # it is not at that path here
        "warm_up": {"x": (4, 7, 4)},
        "intra_op_threads": "3",
    }
    monkeypatch.setattr("twinop.deploy.service.settings.quota", lambda: 4)
    assert Settings().for_model("relu", dict(config.settings)).intra_op_threads == 3


def test_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, "").settings == {}
    assert read(tmp_path, "version_policy { latest { } }").settings["versions"] == "latest"
    assert read(tmp_path, "version_policy { latest { num_versions: 2 } }").settings["versions"] == "latest:2"
    assert read(tmp_path, "version_policy { all { } }").settings["versions"] == "all"
    assert read(tmp_path, "instance_group { kind: KIND_CPU }").settings["provider"] is Provider.CPU
    assert "provider" not in read(tmp_path, "instance_group { count: 4 }").settings


def test_fixed_sizes_are_tried_at(tmp_path: Path) -> None:
    text = 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    assert read(tmp_path, text).settings["warm_up"] == {"x": (1, 4)}


def test_a_library_that_is_there(tmp_path: Path) -> None:
    library = tmp_path / "librelu.so"
    library.touch()
    names = f'op_library_filename: "{library}" op_library_filename: "/in/the/container/libmish.so"'
    config = read(tmp_path, f"model_operations {{ {names} }}")
    assert config.settings["library"] == (library, Path("libmish.so"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: x", "does not parse as Triton's model configuration: 1:17"),
        ("no_such_field: 1", "does not parse .*no_such_field"),
        ("sequence_batching { }", "asks for what .*\n  - sequence_batching: sequences"),
        ("ensemble_scheduling { }", "ensemble_scheduling: ensembles"),
        ('backend: "tensorrt"', "backend: 'tensorrt', expected onnxruntime"),
        ('platform: "pytorch_libtorch"', "platform: 'pytorch_libtorch'"),
        ('name: "other"', "the model is called 'other', its folder 'relu'"),
        ("model_transaction_policy { decoupled: true }", "decoupled answers"),
        ('input { name: "x" dims: 4 reshape { shape: [ 2, 2 ] } }', "reshape of x"),
        ('input { name: "x" dims: 1 reshape { } }', "reshape of x"),  # empty although not batched
        ('max_batch_size: 4 input { name: "x" dims: [ 1, 1 ] reshape { } }', "reshape of x"),
        ('input { name: "x" allow_ragged_batch: true }', "allow_ragged_batch of x"),
        ("batch_input { }", "batch_input"),
        ("optimization { graph { level: 3 } }", "optimization.graph.level: 3 is not one of -1, 0, 1, 2"),
        (
            'parameters { key: "execution_mode" value { string_value: "2" } }',
            "execution_mode: '2' is not one of 0, 1",
        ),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator { name: "x" } } }',
            "gpu_execution_accelerator 'x': there are cuda, tensorrt",
        ),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" '
            'parameters { key: "precision_mode" value: "FP8" } } } }',
            "precision_mode: 'FP8' is not one of FP16, BF16, INT8",
        ),
        ("instance_group { kind: KIND_CPU } instance_group { kind: KIND_GPU }", "CPU and on GPUs at once"),
        ("instance_group { kind: KIND_GPU gpus: 1 }", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "config.pbtxt"))


def test_all_problems_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        read(tmp_path, "sequence_batching { } batch_input { } instance_group { gpus: 3 }")
    assert str(error.value).count("\n  - ") == 3


PASSED_OVER = {
    'response_cache { enable: true } metric_tags { key: "a" value: "b" }': "metric_tags, response_cache",
    "optimization { graph { level: 1 } cuda { graphs: true } }": "optimization.cuda",
    'parameters { key: "intra_op_thread_count" value { string_value: "2" } } '
    'parameters { key: "share_session" value { string_value: "0" } }': "parameters.share_session",
    "dynamic_batching { preserve_ordering: true priority_levels: 2 "
    "default_queue_policy { timeout_action: DELAY max_queue_size: 3 } }": (
        "dynamic_batching.default_queue_policy.timeout_action, dynamic_batching.preserve_ordering, "
        "dynamic_batching.priority_levels"
    ),
    'instance_group { count: 2 name: "a" host_policy: "b" }': (
        "instance_group.host_policy, instance_group.name"
    ),
    'output { name: "y" label_filename: "labels.txt" }': "output.label_filename",
    'model_warmup { name: "a" count: 3 } model_warmup { name: "b" }': (
        "model_warmup but its first sample, model_warmup.count"
    ),
}


@pytest.mark.parametrize(("text", "names"), PASSED_OVER.items(), ids=PASSED_OVER.values())
def test_what_changes_no_result_is_passed_over_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, names: str
) -> None:
    with caplog.at_level(logging.INFO):
        read(tmp_path, text)
    [line] = caplog.messages
    assert line.endswith(f"without effect here: {names}")


def test_of_what_is_read_there_is_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = session(service_models.relu(), ["CPUExecutionProvider"])
    everything = {
        "max_batch_size": 16,
        "preferred_batch_sizes": (4, 8),
        "max_queue_delay_us": 100,
        "max_queue": 7,
        "instances": 3,
        "provider": "cuda",
        "versions": "latest:2",
        "intra_op_threads": 2,
        "warm_up": {"x": (8, 4)},
    }
    settings = Settings(model=everything).model
    text = write_config(
        make_config("relu", settings, opened.inputs, opened.outputs, libraries=["/a/lib.so"], optional=("x",))
    )
    with caplog.at_level(logging.INFO):
        read(tmp_path, text)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('input { name: "z" }', "input 'z': the model has x"),
        (
            'input { name: "x" data_type: TYPE_FP16 dims: [ -1, 4 ] }',
            "data_type of input x: TYPE_FP16, .* TYPE_FP32",
        ),
        ('input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }', r"dims of input x: \[4\].*\[-1, 4\]"),
        (
            'max_batch_size: 2 input { name: "x" dims: [ 5 ] }',
            r"dims of input x: \[5\].*\[4\] without the batch axis",
        ),
        ('output { name: "y" dims: [ -1, -1 ] }', r"dims of output y: \[-1, -1\]"),
    ],
)
def test_a_model_that_is_another(tmp_path: Path, text: str, message: str) -> None:
    opened = session(service_models.relu(), ["CPUExecutionProvider"])
    with pytest.raises(SettingsError, match=message):
        read(tmp_path, text).require_fit(opened.inputs, opened.outputs)


@pytest.mark.parametrize("text", ["", 'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 4 }',
                                  'input { name: "x" dims: [ 8, 4 ] }'])  # fmt: skip
def test_a_model_that_fits(tmp_path: Path, text: str) -> None:
    opened = session(service_models.relu(), ["CPUExecutionProvider"])
    read(tmp_path, text).require_fit(opened.inputs, opened.outputs)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_batch_size": 16, "preferred_batch_sizes": (4, 8), "max_queue_delay_us": 100, "max_queue": 7},
        {"instances": 3, "provider": "cuda", "versions": "all", "intra_op_threads": 2},
        {"provider": "cpu", "versions": (1, 2), "warm_up": {"x": (2, 4)}},
        {"max_batch_size": 16, "versions": "latest:2", "warm_up": {"x": (8, 4)}},
    ],
)
def test_what_is_written_reads_the_same(tmp_path: Path, given: dict[str, Any]) -> None:
    opened = session(service_models.relu(), ["CPUExecutionProvider"])
    settings = Settings(model=given).model
    text = write_config(
        make_config("relu", settings, opened.inputs, opened.outputs, libraries=["/models/relu/1/lib.so"])
    )
    config = read(tmp_path, text)
    again = Settings().for_model("relu", dict(config.settings))
    wanted = settings.model_copy(update={"library": (Path("lib.so"),)})
    if settings.max_batch_size and not settings.warm_up:  # the file then fixes all sizes
        wanted = wanted.model_copy(update={"warm_up": {"x": (1, 4)}})
    assert again == wanted
    config.require_fit(opened.inputs, opened.outputs)


def test_what_cannot_be_written() -> None:
    opened = session(service_models.relu(shape=None), ["CPUExecutionProvider"])
    with pytest.raises(SettingsError, match="and config.pbtxt needs a known rank"):
        write_config(make_config("relu", Settings().model, opened.inputs, opened.outputs))
    for inputs, outputs, lacking in (({}, opened.outputs, "inputs"), (opened.inputs, {}, "outputs")):
        if inputs:
            inputs = session(service_models.relu(), ["CPUExecutionProvider"]).inputs
        with pytest.raises(SettingsError, match=f"no {lacking}, without which Triton completes config.pbtxt"):
            write_config(make_config("relu", Settings().model, inputs, outputs))
    scalar = session(service_models.identity("FP32", ()), ["CPUExecutionProvider"])
    batched = Settings(model={"max_batch_size": 4}).model
    with pytest.raises(SettingsError, match=r"x is float32\[\]: config.pbtxt needs .* rows if batched"):
        write_config(make_config("relu", batched, scalar.inputs, scalar.outputs))


def test_triton_has_no_empty_dims(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """[1] stands for a scalar; with an empty reshape it stands for a batched vector."""
    scalar = session(service_models.identity("FP32", ()), ["CPUExecutionProvider"])
    config = read(tmp_path, 'input { name: "x" data_type: TYPE_FP32 dims: 1 }')
    config.require_fit(scalar.inputs, scalar.outputs)
    assert config.settings["warm_up"] == {"x": (1,)}
    trial = make_trial(scalar.inputs, scalar.required, Settings().for_model("relu", dict(config.settings)))
    assert trial is not None and trial.feeds["x"].shape == ()

    vector = session(service_models.relu(shape=("N",)), ["CPUExecutionProvider"])
    with caplog.at_level(logging.INFO):
        config = read(
            tmp_path, 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { } }'
        )
    config.require_fit(vector.inputs, vector.outputs)
    assert config.settings["warm_up"] == {"x": (1,)}
    assert caplog.messages[0].endswith("without effect here: input.reshape")
    with pytest.raises(SettingsError, match="x is .* rows if batched"):
        config.require_fit(scalar.inputs, scalar.outputs)
