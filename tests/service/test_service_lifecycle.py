"""Start and stop of the real server: ready when it can answer, and at the end nothing lost."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import grpc
import onnx
import pytest
from service_fixtures import Served, receive, serve, start, wait_until
from service_models import place, relu, slow
from service_rows import QUICK, ROW, call, in_flight, y_of

from twinop.bench.serving import soak
from twinop.bench.serving.servers import free_ports
from twinop.deploy.service.protocol import pb, pb_grpc

# -------------------------------------------------------------------------------- start


def test_a_file_is_served_under_its_stem(tmp_path: Path) -> None:
    onnx.save(relu(), tmp_path / "my_relu.onnx")
    with serve(tmp_path / "my_relu.onnx", *QUICK) as served:
        assert y_of(served, "my_relu") == [0, 2, 0, 4]
        assert served.ask("GET", "/v2/health/ready").status == 200


def test_a_small_model_is_ready_within_seconds(tmp_path: Path) -> None:
    """The bar is 3 s (bench serve measures it); here only that nothing heavy is imported on the way."""
    onnx.save(relu(), tmp_path / "m.onnx")
    script = (
        "import sys, threading, os, signal, time\n"
        "import twinop.deploy.service.repository as r\n"
        "from twinop.cli import app\n"
        "load_all = r.Repository.load_all\n"
        "async def then(self):\n"
        "    await load_all(self)\n"
        "    print('torch' in sys.modules, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "r.Repository.load_all = then\n"
        f"app(['serve', {str(tmp_path / 'm.onnx')!r}, '--http-port', '0', '--no-grpc'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no model in this folder"),
        (b"not a model", "not a complete ONNX model"),
    ],
)
def test_what_cannot_be_served_ends_the_start_with_one_message(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    (models / "m" / "1").mkdir(parents=True)
    if content is not None:
        (models / "m" / "1" / "model.onnx").write_bytes(content)
    process = start(models, tmp_path / "log", *QUICK)
    assert process.wait(60) == 1
    log = (tmp_path / "log").read_text()
    assert words in log and "Traceback" not in log


def test_ready_means_that_the_models_are_loaded_and_the_server_is_not_stopping(tmp_path: Path) -> None:
    place(tmp_path / "models", "slow", slow(rounds=3000))
    gate = tmp_path / "gate"
    patched = (
        "import os, sys, time\n"
        "import twinop.deploy.service.repository as r\n"
        "from twinop.cli import app\n"
        "load = r.load\n"
        "def held(*arguments):\n"
        f"    while not os.path.exists({str(gate)!r}):\n"
        "        time.sleep(0.02)\n"
        "    return load(*arguments)\n"
        "r.load = held\n"
        "app(sys.argv[1:])\n"
    )
    http_port, grpc_port = free_ports(2)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    process = start(tmp_path / "models", tmp_path / "log", *QUICK, *ports, program=("-c", patched))
    served = Served(process, http_port, grpc_port, tmp_path / "log", tmp_path / "models")

    def status(path: str) -> int:
        return served.ask("GET", path).status

    def is_live() -> bool:
        try:
            return status("/v2/health/live") == 200
        except ConnectionError:
            return False

    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)

        def grpc_ready() -> bool:
            ready: bool = stub.ServerReady(pb.ServerReadyRequest(), wait_for_ready=True, timeout=60).ready
            return ready

        try:
            wait_until(is_live, 60)
            wait_until(lambda: served.versions().get(("slow", 1), ("",))[0] == "loading")
            assert status("/v2/health/ready") == status("/v2/models/slow/ready") == 503
            assert not grpc_ready() and stub.ServerLive(pb.ServerLiveRequest()).live
            assert served.infer("slow", ROW).status == 503
            with pytest.raises(grpc.RpcError) as error:
                call(served, "slow")
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE

            gate.touch()
            wait_until(lambda: status("/v2/health/ready") == 200, 60)
            assert grpc_ready() and served.infer("slow", ROW).status == 200

            waiting = [threading.Thread(target=call, args=(served, "slow")) for _ in range(4)]
            for thread in waiting:
                thread.start()
            wait_until(partial(in_flight, served, 4))
            with served.connect() as connection:  # a new one would be refused
                ask = b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n"
                connection.sendall(ask)
                assert receive(connection).status == 200
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: not grpc_ready())
                connection.sendall(ask)
                assert receive(connection).status == 503
            for thread in waiting:
                thread.join(60)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


# -------------------------------------------------------------------------------- stop


def test_sigterm_while_a_model_is_loading_does_not_wait_for_it(tmp_path: Path) -> None:
    onnx.save(relu(), tmp_path / "m.onnx")
    script = (
        "import time, sys\n"
        "import twinop.deploy.service.repository as r\n"
        "from twinop.cli import app\n"
        "def load(*arguments):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(60)\n"
        "r.load = load\n"
        f"app(['serve', {str(tmp_path / 'm.onnx')!r}, '--http-port', '0', '--no-grpc'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_sigterm_under_load_answers_all_that_was_accepted(tmp_path: Path) -> None:
    soak.write_version(tmp_path / "models", 1)
    for _ in range(2):
        log = tmp_path / "log"
        with soak.service(tmp_path / "models", log, "--log-level", "debug") as (server, running):
            outcome = asyncio.run(soak.ended_under_load(server, running, log, 0.3))
            assert running.returncode == 0
        assert outcome.lost == outcome.wrong == []
        assert {protocol for protocol, _ in outcome.answered} == {"REST", "gRPC"}


def test_what_waits_when_the_signal_comes_is_answered(tmp_path: Path) -> None:
    place(tmp_path, "slow", slow(rounds=2000))
    with serve(tmp_path, *QUICK) as served:
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(served.infer("slow", ROW).status)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: served.metric("twinop_in_flight", model="slow") == 4)
        assert served.stop() == 0
        for thread in threads:
            thread.join(60)
        assert found == [200] * 4
        assert any(line["message"] == "stopped" for line in served.log)


def test_the_grace_time_ends_the_wait(tmp_path: Path) -> None:
    place(tmp_path, "slow", slow(rounds=40_000))
    with serve(tmp_path, *QUICK, "--grace-seconds", "1") as served:
        connection = served.connect()
        body = json.dumps({"inputs": [ROW]}).encode()
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: served.metric("twinop_in_flight", model="slow") == 1)
        started = time.monotonic()
        assert served.stop() == 1
        assert time.monotonic() - started < 15
        assert any("grace_seconds (1) were not enough" in line["message"] for line in served.log)
        connection.close()


def test_threads_that_still_decode_do_not_keep_the_process(tmp_path: Path) -> None:
    """More of them than asyncio's default executor has: nothing else of the end may need one."""
    place(tmp_path, "m", relu())
    patched = (
        "import sys, time\n"
        "from twinop.deploy.service import endpoints, codec_grpc, codec_rest\n"
        "from twinop.cli import app\n"
        "def decode(*arguments):\n"
        "    time.sleep(60)\n"
        "endpoints.LARGE = 0\n"
        "codec_grpc.decode = codec_rest.decode = decode\n"
        "app(sys.argv[1:])\n"
    )
    with serve(tmp_path, *QUICK, "--grace-seconds", "2", program=("-c", patched)) as served:
        outcomes: list[object] = []

        def over_grpc() -> None:
            with pytest.raises(grpc.RpcError) as error:
                call(served, "m")
            outcomes.append(error.value.code())

        threads = [threading.Thread(target=over_grpc) for _ in range(40)]
        threads.append(threading.Thread(target=lambda: outcomes.append(served.infer("m", ROW).status)))
        for thread in threads:
            thread.start()
        time.sleep(1)
        started = time.monotonic()
        assert served.stop() == 1
        assert time.monotonic() - started < 2 + 2
        for thread in threads:
            thread.join(10)
        assert 503 in outcomes and len(outcomes) == 41
        assert any("grace_seconds (2) were not enough" in line["message"] for line in served.log)
