"""The real server, from its start to SIGTERM; servers that cannot start have one message."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import onnx
import pytest
import service_models as models
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from service_fixtures import Served, free_ports, receive, receive_all, serve, split, start, wait_until
from service_held import held
from service_loads import repository_of
from service_models import place, relu
from service_raw import REQUEST
from service_rows import QUICK, ROW, in_flight, message
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from twinop.deploy.service import repository
from twinop.deploy.service.grpc_server import GrpcServer
from twinop.deploy.service.instance import LoadedModel
from twinop.deploy.service.operations import Token
from twinop.deploy.service.repository import Repository
from twinop.deploy.service.request import Budget
from twinop.deploy.service.rest import AddressError, RestServer, bound
from twinop.deploy.service.settings import ModelSettings, ServerSettings, Settings, read_settings
from twinop.errors import TwinopError

READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n"


def test_nothing_slow_is_imported(tmp_path: Path) -> None:
    """On a machine with a GPU neither, which the script pretends to be."""
    onnx.save(relu(), tmp_path / "m.onnx")
    script = (
        "import sys, threading, os, signal, time\n"
        "import twinop.deploy.service.repository as r\n"
        "from twinop.cli import app\n"
        "from twinop.deploy import cuda\n"
        "cuda.driver_version, cuda.device_count = lambda: 13010, lambda: (1, '')\n"
        "load_all = r.Repository.load_all\n"
        "async def then(self):\n"
        "    await load_all(self)\n"
        "    print({'torch', 'kserve', 'pandas', 'fastapi'} & set(sys.modules), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "r.Repository.load_all = then\n"
        f"app(['serve', {str(tmp_path / 'm.onnx')!r}, '--http-port', '0', '--no-grpc'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.fixture
def starting(tmp_path: Path) -> Any:
    """A server whose runs and loads wait while the files `runs` and `loads` of its folder exist."""
    place(tmp_path / "models", "relu", relu())
    loads, runs = tmp_path / "loads", tmp_path / "runs"
    loads.touch()
    http_port, grpc_port = free_ports(2)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    program = held(loads=loads, runs=runs)
    process = start(tmp_path / "models", tmp_path / "log", *QUICK, *ports, program=program)
    yield Served(process, http_port, grpc_port, tmp_path / "log", tmp_path)
    process.kill()
    process.wait()


def test_ready_means_that_the_models_are_loaded_and_the_server_is_not_stopping(starting: Served) -> None:
    """A stopping server answers what has come, on connections of every kind."""

    def status(path: str) -> int:
        return starting.ask("GET", path).status

    def is_live() -> bool:
        try:
            return status("/v2/health/live") == 200
        except ConnectionError:
            return False

    def grpc_ready() -> bool:
        ready: bool = stub.ServerReady(pb.ServerReadyRequest(), wait_for_ready=True, timeout=60).ready
        return ready

    with grpc.insecure_channel(f"127.0.0.1:{starting.grpc_port}") as channel, ExitStack() as stack:
        stub: Any = GRPCInferenceServiceStub(channel)
        wait_until(is_live, 60)
        wait_until(lambda: starting.versions().get(("relu", 1), ("",))[0] == "LOADING")
        assert status("/v2/health/ready") == status("/v2/models/relu/ready") == 503
        assert not grpc_ready() and stub.ServerLive(pb.ServerLiveRequest()).live
        assert starting.infer("relu", ROW).status == 503
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(message("relu"))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE

        (starting.root / "loads").unlink()
        wait_until(lambda: status("/v2/health/ready") == 200, 60)
        assert grpc_ready() and starting.infer("relu", ROW).status == 200
        health, asked = HealthStub(channel), HealthCheckRequest()
        assert health.Check(asked).status == HealthCheckResponse.SERVING

        waiting, probe, kept, late, idle = (stack.enter_context(starting.connect(60)) for _ in range(5))
        for connection, request in ((probe, READY), (kept, REQUEST), (late, REQUEST)):
            connection.sendall(request)
            answer = receive(connection)
            assert answer.status == 200 and answer.headers.get("connection") != "close"
        (starting.root / "runs").touch()
        waiting.sendall(REQUEST)
        over_grpc = stub.ModelInfer.future(message("relu"))
        wait_until(partial(in_flight, starting, 2, "relu"))
        starting.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not grpc_ready())
        assert health.Check(asked).status == HealthCheckResponse.NOT_SERVING
        probe.sendall(READY)
        assert receive(probe).status == 503
        late.sendall(REQUEST)
        time.sleep(1.5)  # longer than what has been accepted takes otherwise
        (starting.root / "runs").unlink()
        answers = [split(receive_all(connection)) for connection in (late, waiting)]
        assert answers[0].status in (200, 503) and answers[1].status == 200
        assert [each.headers["connection"] for each in answers] == ["close", "close"]
        assert over_grpc.result(60).model_name == "relu"
        assert receive_all(kept) == receive_all(idle) == b""
        with pytest.raises(OSError):
            starting.connect()
        assert starting.process.wait(60) == 0


def test_what_takes_longer_than_the_grace_time_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "held"
    models.place(tmp_path / "models", "relu", models.relu())
    (tmp_path / "models" / "twinop.toml").write_text("[server]\ngrace_seconds = 1\n")
    with serve(tmp_path / "models", program=held(runs=file)) as served, ExitStack() as stack:
        file.touch()
        connections = [stack.enter_context(served.connect(60)) for _ in range(8)]
        for connection in connections:
            connection.sendall(REQUEST)
        wait_until(partial(in_flight, served, 8, "relu"))
        served.process.send_signal(signal.SIGTERM)
        answers = [receive(connection) for connection in connections]
        assert served.stop() == 1
        assert any("grace_seconds (1) were not enough" in line["message"] for line in served.log)
    said = 503, "the server stopped before it could answer"
    assert {(answer.status, answer.error) for answer in answers} == {said}


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_model_is_loading_does_not_wait_for_it(tmp_path: Path, sign: signal.Signals) -> None:
    file, log = tmp_path / "held", tmp_path / "log"
    file.touch()
    onnx.save(models.relu(), tmp_path / "m.onnx")
    process = start(tmp_path / "m.onnx", log, program=held(loads=file))
    wait_until(lambda: b"held" in log.read_bytes())
    process.send_signal(sign)
    assert process.wait(60) == 0


EXAMPLES = Path(__file__).resolve().parents[2] / "examples/serving"


def test_the_example_of_a_unit_starts_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.place(tmp_path, "m", models.relu())
    found = re.search(r"^ExecStart=(.*)$", (EXAMPLES / "twinop@.service").read_text(), re.MULTILINE)
    assert found is not None
    command = found[1].replace("%i", "1").split()
    assert command[0].endswith("twinop") and command[1] == "serve"
    server: Any = repository_of(monkeypatch, tmp_path, *command[3:]).settings.server
    assert (server.http_port, server.grpc_port) == (8001, 9001)


@pytest.fixture
def one_model(tmp_path: Path) -> Path:
    models.place(tmp_path / "models", "relu", models.relu())
    return tmp_path / "models"


def listen(models_folder: Path, **server: Any) -> None:
    """Start to listen, and end; AddressError."""
    settings = Settings(server=ServerSettings(**{"http_port": 0, "grpc_port": 0, **server}))
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


def test_a_port_in_use_ends_the_process(one_model: Path, tmp_path: Path) -> None:
    """However long a load would take."""
    (file := tmp_path / "held").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(one_model, tmp_path / "log", "--grpc-port", str(port), program=held(loads=file))
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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_port_in_use(one_model: Path, protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        said = refused(one_model, **{f"{protocol}_port": port})
    assert f"cannot listen on port {port} of 127.0.0.1" in said
    assert f"choose another with --{protocol}-port" in said


def test_a_port_is_taken_before_the_server_starts() -> None:
    with bound("127.0.0.1", 0) as first, pytest.raises(AddressError, match="in use"):
        bound("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "127..1"])
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


def test_a_broken_model_concerns_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others are served, the log names it; no models at all end the server."""
    for name, own in (("good", None), ("broken", "max_queue = -1")):
        models.place(tmp_path, name, models.relu(), settings=own)
    settings = Settings(model=ModelSettings(provider="cpu"))

    async def load() -> Repository:
        repository = Repository(tmp_path, settings)
        await repository.load_all()
        return repository

    repository = asyncio.run(load())
    assert not repository.why_not_ready() and repository.unavailable() == ["broken"]
    assert repository.find("good") and list(repository.models) == ["good"]
    assert any("served without broken, which cannot be loaded" in each.message for each in caplog.records)
    shutil.rmtree(tmp_path / "good")
    with pytest.raises(TwinopError, match="broken"):
        asyncio.run(load())


SETTINGS = Settings(server=ServerSettings(poll_seconds=0.01), model=ModelSettings(provider="cpu"))


def test_a_long_load_delays_no_other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
