"""Servers that cannot start: one message, exit code not 0."""

import asyncio
import re
import socket
import time
from pathlib import Path

import pytest
import service_models as models
from service_fixtures import start

from twinop.deploy.service.repository import Repository
from twinop.deploy.service.settings import read_settings
from twinop.errors import TwinopError


def lines(models_folder: Path, log: Path, *options: str) -> list[str]:
    """What a server says that does not start."""
    process = start(models_folder, log, *options)
    try:
        assert process.wait(120) != 0
    finally:
        process.kill()
    said = log.read_text()
    assert "Traceback" not in said
    return said.splitlines()


def ended(models_folder: Path, log: Path, *options: str) -> str:
    return " ".join(" ".join(lines(models_folder, log, *options)).split())


@pytest.fixture
def one_model(tmp_path: Path) -> Path:
    models.place(tmp_path / "models", "relu", models.relu())
    return tmp_path / "models"


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_port_in_use(one_model: Path, tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        said = ended(one_model, tmp_path / "log", option, str(port))
        assert (
            f"cannot listen on port {port} of 127.0.0.1" in said and f"choose another with {option}" in said
        )
        assert time.monotonic() - began < 60 and "Traceback" not in said


def test_host_of_another_machine(one_model: Path, tmp_path: Path) -> None:
    assert "cannot listen on port 0 of 192.0.2.1" in ended(one_model, tmp_path / "log", "--host", "192.0.2.1")
    said = ended(one_model, tmp_path / "log", "--host", "no.such.host.invalid")
    assert "cannot listen on port 0 of no.such.host.invalid" in said


def test_tls_files_that_are_none(one_model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for path in (bad, tmp_path / "missing.pem"):
        options = ("--tls-certificate", str(path), "--tls-key", str(path))
        assert "TLS cannot be set up with certificate" in ended(one_model, tmp_path / "log", *options)
    assert "TLS needs both" in ended(one_model, tmp_path / "log", "--tls-key", str(bad))


@pytest.mark.parametrize(
    ("name", "said"), [("nope.onnx", "no such file or folder"), ("", "no model in this folder")]
)
def test_no_model(tmp_path: Path, name: str, said: str) -> None:
    """One line: it was preceded by those of a server that starts and stops, "for up to 30 s"."""
    folder = tmp_path / "models"
    folder.mkdir()
    [line] = lines(folder / name, tmp_path / "log")
    assert line.startswith(f"error: {folder / name}: {said}. Expected ")


@pytest.mark.parametrize("control, may_come_later", [("none", False), ("poll", True), ("explicit", True)])
def test_settings_of_a_model_that_is_not_there(
    one_model: Path, control: str, may_come_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (one_model / "twinop.toml").write_text(
        f'[server]\ncontrol = "{control}"\n[models.rellu]\nmax_queue = 1\n'
    )
    repository = Repository(one_model, read_settings(one_model / "twinop.toml", {}))
    said = "there are settings [models.rellu], but no model 'rellu'; models: relu"
    if may_come_later:
        asyncio.run(repository.load_all())
        assert [each.message for each in caplog.records if "rellu" in each.message] == [said]
    else:
        with pytest.raises(TwinopError, match=re.escape(said)):
            asyncio.run(repository.load_all())


def test_settings_of_another_model_than_the_file(one_model: Path) -> None:
    (one_model / "twinop.toml").write_text("[models.rellu]\nmax_queue = 1\n")
    settings = read_settings(one_model / "twinop.toml", {})
    with pytest.raises(TwinopError, match="no model 'rellu'; models: model"):
        asyncio.run(Repository(one_model / "relu" / "1" / "model.onnx", settings).load_all())
