"""Servers that cannot start: one message, exit code not 0."""

import socket
import time
from pathlib import Path

import pytest
import service_models as models
from service_fixtures import start


def ended(models_folder: Path, log: Path, *options: str) -> str:
    """What a server says that does not start."""
    process = start(models_folder, log, *options)
    try:
        assert process.wait(120) != 0
    finally:
        process.kill()
    said = log.read_text()
    assert "Traceback" not in said
    return " ".join(said.split())


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
