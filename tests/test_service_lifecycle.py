"""Start, swap, load, unload, stop: the real server, and nothing lost on the way."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from service_fixtures import Served, receive, serve, start, tensor, wait_until
from service_models import gather, mlp, place, relu, slow

from twinop.bench.serving import soak
from twinop.bench.serving.servers import free_ports
from twinop.deploy.service._kserve import pb, pb_grpc

ROW = tensor("x", "FP32", [1, 4], [-1.0, 2.0, -3.0, 4.0])
QUICK = ("--provider", "cpu")


def y_of(served: Served, model: str) -> list[float]:
    answer = served.infer(model, ROW)
    assert answer.status == 200, answer
    data: list[float] = answer.json["outputs"][0]["data"]
    return data


def call(served: Served, model: str, seconds: float = 60) -> Any:
    """ROW over gRPC."""
    request = pb.ModelInferRequest(
        model_name=model, raw_input_contents=[np.array(ROW["data"], "f4").tobytes()]
    )
    request.inputs.add(name="x", datatype="FP32", shape=ROW["shape"])
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        return pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=seconds)


def scaled(factor: float) -> onnx.ModelProto:
    """A model whose answers tell which version it is."""
    model = mlp(4, 4, custom=False)
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * np.float32(factor), "w0")
    model.graph.initializer[0].CopyFrom(weight)
    return model


def _in_flight(served: Served, number: int) -> bool:
    return served.metric("twinop_in_flight", model="slow") == number


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
            wait_until(partial(_in_flight, served, 4))
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


# -------------------------------------------------------------------------------- versions come and go


def test_a_new_version_takes_over_and_a_broken_one_does_not(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        assert y_of(served, "m") == [-1, 2, -3, 4]
        place(tmp_path, "m", scaled(2), version=2)
        wait_until(lambda: y_of(served, "m") == [-2, 4, -6, 8])
        (tmp_path / "m" / "3").mkdir()
        (tmp_path / "m" / "3" / "model.onnx").write_bytes(b"half of a model")
        wait_until(lambda: served.versions().get(("m", 3), ("",))[0] == "unavailable")
        time.sleep(2.5)  # more scans of the same files
        assert y_of(served, "m") == [-2, 4, -6, 8]
        assert served.versions()["m", 2] == ("ready", "")
        (tmp_path / "m" / "3" / "model.onnx").write_bytes(scaled(3).SerializeToString())  # mended
        wait_until(lambda: y_of(served, "m") == [-3, 6, -9, 12])
        shutil.rmtree(tmp_path / "m" / "3")  # taken back
        wait_until(lambda: y_of(served, "m") == [-2, 4, -6, 8])


def test_changed_files_are_loaded_again(tmp_path: Path) -> None:
    path = place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        path.write_bytes(scaled(5).SerializeToString())
        wait_until(lambda: y_of(served, "m") == [-5, 10, -15, 20])


def test_models_come_and_go(tmp_path: Path) -> None:
    place(tmp_path, "a", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        place(tmp_path, "b", scaled(2))
        wait_until(lambda: served.ask("GET", "/v2/models/b/ready").status == 200)
        shutil.rmtree(tmp_path / "a")
        wait_until(lambda: served.ask("GET", "/v2/models/a").status == 404)
        assert y_of(served, "b") == [-2, 4, -6, 8]


def test_all_versions_are_served_where_the_settings_say_so(tmp_path: Path) -> None:
    for version in (1, 2):
        place(tmp_path, "m", scaled(version), version, settings='versions = "all"')
    with serve(tmp_path, *QUICK) as served:
        for version in (1, 2):
            path = f"/v2/models/m/versions/{version}/infer"
            answer = served.ask("POST", path, {"inputs": [ROW]})
            assert answer.json["outputs"][0]["data"] == [-version, 2 * version, -3 * version, 4 * version]
            assert answer.json["model_version"] == str(version)
        assert "it has: 1, 2" in served.ask("POST", "/v2/models/m/versions/3/infer", {"inputs": [ROW]}).error


def test_load_and_unload_by_request(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK, "--control", "explicit") as served:
        place(tmp_path, "m", scaled(2), version=2)
        time.sleep(2.5)
        assert y_of(served, "m") == [-1, 2, -3, 4]  # nobody follows the folder
        assert served.ask("POST", "/v2/repository/models/m/load").status == 200
        assert y_of(served, "m") == [-2, 4, -6, 8]
        assert served.ask("POST", "/v2/repository/models/m/unload").status == 200
        assert served.infer("m", ROW).status == 404
        assert served.ask("POST", "/v2/repository/models/m/unload").status == 404
        assert served.ask("POST", "/v2/repository/models/none/load").status == 404
        assert served.ask("POST", "/v2/repository/models/m/load").status == 200
        assert y_of(served, "m") == [-2, 4, -6, 8]
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "model.onnx").write_bytes(b"no")
        answer = served.ask("POST", "/v2/repository/models/broken/load")
        assert answer.status == 503 and "could not be loaded" in answer.error
        assert str(tmp_path) not in answer.error


def test_an_older_version_serves_where_the_newest_is_broken_at_the_start(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "model.onnx").write_bytes(b"half of a model")
    with serve(tmp_path, *QUICK) as served:
        assert {key: found[0] for key, found in served.versions().items()} == {
            ("m", 1): "ready",
            ("m", 2): "unavailable",
        }
        time.sleep(2.5)
        assert y_of(served, "m") == [-1, 2, -3, 4]


def test_a_folder_that_is_away_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    models = tmp_path / "models"
    place(models, "m", scaled(1))
    with serve(models, *QUICK) as served:
        models.rename(tmp_path / "away")
        time.sleep(2.5)
        assert y_of(served, "m") == [-1, 2, -3, 4]
        (tmp_path / "away").rename(models)
        place(models, "n", scaled(2))
        wait_until(lambda: served.infer("n", ROW).status == 200)


def test_settings_that_do_not_fit_are_said_and_the_folder_is_followed_on(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        (tmp_path / "m" / "twinop.toml").write_text("max_batchsize = 8")
        place(tmp_path, "bad", scaled(1), config='input { name: "x" data_type: 99 dims: 4 }')
        wait_until(lambda: served.versions().get(("bad", 1), ("",))[0] == "unavailable")
        wait_until(lambda: any("max_batchsize" in line["message"] for line in served.log))
        assert y_of(served, "m") == [-1, 2, -3, 4]
        place(tmp_path, "good", scaled(3))
        wait_until(lambda: served.infer("good", ROW).status == 200)
        (tmp_path / "bad" / "config.pbtxt").unlink()
        wait_until(lambda: served.infer("bad", ROW).status == 200)


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


# -------------------------------------------------------------------------------- under load


def test_no_request_is_lost_or_wrong_while_versions_are_swapped(tmp_path: Path) -> None:
    """A small soak; `python -m twinop.bench soak` is the long one."""
    soak.write_version(tmp_path / "models", 1)
    (tmp_path / "models" / "twinop.toml").write_text("[server]\npoll_seconds = 0.05")
    with soak.service(tmp_path / "models", tmp_path / "log") as (server, running):
        run = soak.soak(server, running.pid, tmp_path / "models", 8000, 1.5, seconds=10)
        outcome = asyncio.run(run)
    assert outcome.lost == outcome.wrong == [] and outcome.refused == 0
    assert outcome.requests >= 8000
    assert {protocol for protocol, _ in outcome.answered} == {"REST", "gRPC"}
    assert len(outcome.swapped) >= 2 and set(outcome.swapped) <= outcome.versions.keys()
    assert outcome.broken and set(outcome.broken.values()) == {"unavailable"}
    assert not set(outcome.broken) & outcome.versions.keys()


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


# -------------------------------------------------------------------------------- a request alone


def test_a_poisoned_request_in_a_batch_fails_alone(tmp_path: Path) -> None:
    place(tmp_path, "gather", gather(), settings="max_batch_size = 32")
    with serve(tmp_path, *QUICK) as served:
        statuses: dict[int, int] = {}

        def ask(number: int) -> None:
            index = 99 if number % 8 == 3 else number % 10
            statuses[number] = served.infer("gather", tensor("index", "INT64", [1], [index])).status

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {number for number, status in statuses.items() if status != 200} == set(range(3, 64, 8))


def test_a_full_queue_says_when_to_come_back_and_a_deadline_is_kept(tmp_path: Path) -> None:
    place(tmp_path, "slow", slow(rounds=5000), settings="max_queue = 1")
    with serve(tmp_path, *QUICK) as served:
        background = [threading.Thread(target=served.infer, args=("slow", ROW)) for _ in range(2)]
        for number, thread in enumerate(background, 1):
            thread.start()
            wait_until(partial(_in_flight, served, number))
        full = served.infer("slow", ROW)
        assert full.status == 429 and "requests waiting" in full.error
        assert int(full.headers["retry-after"]) >= 1
        with pytest.raises(grpc.RpcError) as error:
            call(served, "slow")
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == full.error
        assert int(dict(error.value.trailing_metadata())["retry-after"]) >= 1
        assert served.metric("twinop_failures_total", model="slow", reason="overloaded") == 2
        for thread in background:
            thread.join()
        late = served.infer("slow", ROW, parameters={"timeout": 10_000})  # microseconds
        assert late.status == 504
        assert served.metric("twinop_failures_total", model="slow", reason="deadline") == 1
        with pytest.raises(grpc.RpcError) as error:
            call(served, "slow", 0.05)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_service_survives_the_end_of_a_client(tmp_path: Path) -> None:
    """Its request leaves the queue, and is counted as cancelled."""
    place(tmp_path, "slow", slow(rounds=5000))
    with serve(tmp_path, *QUICK) as served:
        first = threading.Thread(target=served.infer, args=("slow", ROW))
        first.start()
        wait_until(lambda: served.metric("twinop_in_flight", model="slow") == 1)
        script = (
            "import http.client, sys\n"
            f"c = http.client.HTTPConnection('127.0.0.1', {served.http_port})\n"
            f"body = {json.dumps({'inputs': [ROW]})!r}\n"
            "c.request('POST', '/v2/models/slow/infer', body)\n"
            "print('sent', flush=True)\n"
            "c.getresponse()\n"
        )
        client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert client.stdout is not None and client.stdout.readline() == b"sent\n"
        wait_until(lambda: served.metric("twinop_queued", model="slow") == 1)
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        wait_until(lambda: served.metric("twinop_queued", model="slow") == 0)
        first.join()
        assert served.metric("twinop_failures_total", model="slow", reason="cancelled") == 1
