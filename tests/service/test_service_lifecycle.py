"""Start of the real server: live at once, ready when it can answer, and no longer once it stops."""

import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import onnx
import pytest
from service_fixtures import Served, free_ports, receive, start, wait_until
from service_held import held
from service_models import place, relu
from service_rows import QUICK, ROW, call, in_flight
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub


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


def test_ready_means_that_the_models_are_loaded_and_the_server_is_not_stopping(tmp_path: Path) -> None:
    place(tmp_path / "models", "slow", relu())
    loads, runs = tmp_path / "loads", tmp_path / "runs"
    loads.touch()
    http_port, grpc_port = free_ports(2)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    program = held(loads=loads, runs=runs)
    process = start(tmp_path / "models", tmp_path / "log", *QUICK, *ports, program=program)
    served = Served(process, http_port, grpc_port, tmp_path / "log", tmp_path / "models")

    def status(path: str) -> int:
        return served.ask("GET", path).status

    def is_live() -> bool:
        try:
            return status("/v2/health/live") == 200
        except ConnectionError:
            return False

    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub: Any = GRPCInferenceServiceStub(channel)

        def grpc_ready() -> bool:
            ready: bool = stub.ServerReady(pb.ServerReadyRequest(), wait_for_ready=True, timeout=60).ready
            return ready

        try:
            wait_until(is_live, 60)
            wait_until(lambda: served.versions().get(("slow", 1), ("",))[0] == "LOADING")
            assert status("/v2/health/ready") == status("/v2/models/slow/ready") == 503
            assert not grpc_ready() and stub.ServerLive(pb.ServerLiveRequest()).live
            assert served.infer("slow", ROW).status == 503
            with pytest.raises(grpc.RpcError) as error:
                call(served, "slow")
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE

            loads.unlink()
            wait_until(lambda: status("/v2/health/ready") == 200, 60)
            assert grpc_ready() and served.infer("slow", ROW).status == 200

            runs.touch()
            waiting = [threading.Thread(target=call, args=(served, "slow")) for _ in range(4)]
            for thread in waiting:
                thread.start()
            wait_until(partial(in_flight, served, 4))
            with served.connect() as connection:  # new connections will be refused
                ask = b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n"
                connection.sendall(ask)
                assert receive(connection).status == 200
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: not grpc_ready())
                connection.sendall(ask)
                assert receive(connection).status == 503
            runs.unlink()
            for thread in waiting:
                thread.join(60)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
