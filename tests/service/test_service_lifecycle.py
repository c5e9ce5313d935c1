"""The real server, from its start to SIGTERM: live at once, ready while it can answer."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import onnx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from service_fixtures import Served, free_ports, receive, receive_all, split, start, wait_until
from service_held import held
from service_models import place, relu
from service_raw import REQUEST
from service_rows import QUICK, ROW, in_flight, message
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

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
        watched = HealthStub(channel).Watch(HealthCheckRequest(), timeout=60)
        assert any(each.status == HealthCheckResponse.SERVING for each in watched)

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
        assert next(watched).status == HealthCheckResponse.NOT_SERVING
        watched.cancel()
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
