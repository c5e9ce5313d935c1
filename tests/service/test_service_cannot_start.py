"""Servers that cannot start: each has one message and an exit code other than 0. Loads that take long."""

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import service_models as models
from service_fixtures import start
from service_held import held
from service_models import place, relu

from twinop.deploy.service import repository
from twinop.deploy.service.grpc_server import GrpcServer
from twinop.deploy.service.instance import LoadedModel
from twinop.deploy.service.operations import Token
from twinop.deploy.service.repository import Repository
from twinop.deploy.service.request import Budget
from twinop.deploy.service.rest import AddressError, RestServer, bound
from twinop.deploy.service.settings import Settings, read_settings
from twinop.errors import TwinopError


@pytest.fixture
def one_model(tmp_path: Path) -> Path:
    models.place(tmp_path / "models", "relu", models.relu())
    return tmp_path / "models"


def listen(models_folder: Path, **server: Any) -> None:
    """Start to listen, and end; AddressError."""
    settings = Settings(server={"http_port": 0, "grpc_port": 0, **server})
    repository = Repository(models_folder, settings)

    async def start() -> None:
        token = Token(settings.server)
        RestServer(repository, Budget(1), token)
        server = GrpcServer(repository, Budget(1), token)
        await server.start()
        await server.drain(0)  # a server that listens would keep the test

    asyncio.run(start())


def refused(*arguments: Any, **server: Any) -> str:
    """Return the message with which a server cannot listen."""
    with pytest.raises(AddressError) as error:
        listen(*arguments, **server)
    return str(error.value)


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use_ends_the_process_with_one_message(
    one_model: Path, tmp_path: Path, option: str
) -> None:
    """However long a load would take."""
    (file := tmp_path / "held").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(one_model, tmp_path / "log", option, str(port), program=held(loads=file))
        try:
            assert process.wait(120) == 1
        finally:
            process.kill()
    said = " ".join((tmp_path / "log").read_text().split())
    assert f"cannot listen on port {port} of 127.0.0.1" in said and "Traceback" not in said


def test_a_current_folder_that_is_gone(one_model: Path, tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    program = f"rmdir '{gone}' && exec '{Path(sys.executable).with_name('twinop')}' serve '{one_model}'"
    done = subprocess.run(["sh", "-c", program], cwd=gone, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the current folder does not exist any more: change to another\n"


def test_a_crash_of_onnxruntime_is_said(tmp_path: Path) -> None:
    """ONNX Runtime 1.31.1 crashes while it opens this one."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x, float[4] w) => (float[N, 4] y) '
        '{ y = LayerNormalization (x, w, "") }'
    )
    place(tmp_path / "models", "fragile", model)
    process = start(tmp_path / "models", tmp_path / "log")
    try:
        assert process.wait(120) < 0
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    assert "model fragile version 1: loading" in said and "Segmentation fault" in said


@pytest.mark.parametrize(("other", "own"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_port_in_use(one_model: Path, protocol: str, other: bool, own: bool) -> None:
    """A port is shared only if both servers ask for it."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=other) as taken:
        port = taken.getsockname()[1]
        said = refused(one_model, reuse_port=own, **{f"{protocol}_port": port})
    assert f"cannot listen on port {port} of 127.0.0.1" in said
    assert f"choose another with --{protocol}-port" in said


def test_a_port_is_taken_before_the_server_starts() -> None:
    with bound("127.0.0.1", 0, "--http-port") as first, pytest.raises(AddressError, match="in use"):
        bound("127.0.0.1", first.getsockname()[1], "--admin-port")


def test_messages_larger_than_grpc_can_receive(one_model: Path) -> None:
    listen(one_model, max_request_bytes=3 << 30, max_bytes_in_flight=12 << 30)  # the limit is HTTP's


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "127..1"])
def test_host_of_another_machine(one_model: Path, host: str) -> None:
    assert f"cannot listen on port 0 of {host}" in refused(one_model, host=host)


@pytest.mark.parametrize(
    ("poll_seconds", "served", "models"), [(0, "", "relu"), (1, "", ""), (1, "relu/1/model.onnx", "model")]
)
def test_settings_of_a_model_that_is_not_there(
    one_model: Path, poll_seconds: int, served: str, models: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come later into a folder that is followed."""
    (file := one_model / "twinop.toml").write_text(
        f"[server]\npoll_seconds = {poll_seconds}\n[models.rellu]\nmax_queue = 1\n"
    )
    repository = Repository(one_model / served, read_settings(file, {}))
    said = "there are settings [models.rellu], but no model 'rellu'; models: "
    if models:
        with pytest.raises(TwinopError, match=re.escape(f"{said}{models}")):
            asyncio.run(repository.load_all())
    else:
        asyncio.run(repository.load_all())
        assert [each.message for each in caplog.records if "rellu" in each.message] == [f"{said}relu"]


def broken_and_good(folder: Path, how: str) -> None:
    """Places two models, one of which cannot be loaded."""
    good, broken = (models.place(folder, name, models.relu()) for name in ("good", "broken"))
    if how == "cut short":
        broken.write_bytes(broken.read_bytes()[:-20])
    elif how == "settings":
        (broken.parents[1] / "twinop.toml").write_text("max_queue = -1")
    else:
        model = onnx.load(good)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(9, np.float32), "w"))
        onnx.save(model, broken, save_as_external_data=True, location="w.data", size_threshold=0)
        broken.with_name("w.data").unlink()


@pytest.mark.parametrize("how", ["cut short", "settings", "missing data"])
def test_a_broken_model_is_an_error_of_that_model_alone(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are served, the log names it; no models at all end the server."""
    broken_and_good(tmp_path, how)
    model = {"provider": "cpu"}

    async def load() -> Repository:
        repository = Repository(tmp_path, Settings(model=model))
        await repository.load_all()
        return repository

    repository = asyncio.run(load())
    assert not repository.why_not_ready() and repository.unavailable() == ["broken"]
    assert repository.find("good") and list(repository.models) == ["good"]
    assert any("served without broken, which cannot be loaded" in each.message for each in caplog.records)
    shutil.rmtree(tmp_path / "good")
    with pytest.raises(TwinopError, match="broken"):
        asyncio.run(load())


SETTINGS = Settings(server={"poll_seconds": 0.01}, model={"provider": "cpu"})


def test_a_load_that_takes_long_delays_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, load = threading.Event(), repository.load

    def slow(where: Any, *arguments: Any) -> LoadedModel:
        assert where.model != "long" or held.wait(60)
        return load(where, *arguments)

    monkeypatch.setattr(repository, "load", slow)
    monkeypatch.setattr(repository, "PATIENCE_SECONDS", 0.01)

    async def test() -> None:
        models = Repository(tmp_path, SETTINGS)
        for name in ("long", "short"):
            place(tmp_path, name, relu())
        loading = asyncio.create_task(models.load_all())
        while "short" not in models.models:
            await asyncio.sleep(0.01)
        states = {each["name"]: each["state"] for each in models.index()}
        assert states == {"long": "LOADING", "short": "READY"} and models.why_not_ready()
        held.set()
        await loading
        await models.close()

    asyncio.run(asyncio.wait_for(test(), 120))
