"""config.pbtxt: what is written for Triton, and what a file says that the service does not read."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tritonclient", reason="its protocol buffers judge what we write")

import service_models
from google.protobuf import text_format
from service_loads import loaded

from twinop.deploy import session
from twinop.deploy.service.protocol import model_config_pb2
from twinop.deploy.service.settings import Settings, SettingsError
from twinop.deploy.service.triton_config import make_config, write_config

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_batch_size": 16, "max_queue_delay_us": 100, "max_queue": 7},
    {"instances": 3, "versions": "all", "intra_op_threads": 2},
    {"versions": (1, 2)},
    {"max_batch_size": 16, "versions": "latest:2"},
]


def unread(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the warning names; nothing without one."""
    pattern = "config.pbtxt is not read, and says what the settings do not: (.*)[.] Write in"
    said = [re.search(pattern, each) for each in caplog.messages]
    return [name for each in said if each is not None for name in each[1].split(", ")]


@pytest.mark.parametrize("given", SETTINGS)
def test_what_is_written_says_nothing_new(
    tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    opened = session(service_models.relu(), ["CPUExecutionProvider"])
    settings = Settings(model={"provider": "cpu", **given}).model
    text = write_config(make_config("m", settings, opened.inputs, opened.outputs))
    assert text_format.Parse(text, model_config_pb2.ModelConfig()).name == "m"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    loaded(tmp_path, service_models.relu(), **given)
    assert unread(caplog) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 }",
            ["max_batch_size", "dynamic_"],
        ),
        ("instance_group { count: 2 kind: KIND_CPU }", ["instance_group"]),
        ("sequence_batching { }", ["sequence_batching"]),
        ("max_batch_size: many", ["it cannot be read"]),
    ],
)
def test_what_the_settings_do_not_say_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, names: list[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    assert loaded(tmp_path, service_models.relu()).settings.max_batch_size == 0
    found = unread(caplog)
    assert found and all(any(each.startswith(name) for each in found) for name in names)


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
