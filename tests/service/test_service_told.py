"""What a server reports about its requests, good and bad: log lines with their ids, and every metric."""

import json
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY
from service_fixtures import Answer, Served, tensor, wait_until
from service_rows import in_flight
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service.metrics import ModelMetrics, counting
from twinop.deploy.service.request import Result

MISFIT = (tensor("a", "FP32", [1, 2], [1, 2]), tensor("b", "FP32", [1, 3], [1, 2, 3]))


def ask(served: Served, path: str, body: Any, number: str = "") -> Answer:
    return served.ask("POST", path, body, {"x-request-id": number} if number else {})


def test_the_line_of_a_failed_run_says_whose_it_was(served: Served, held_file: Path) -> None:
    fits = [tensor(name, "FP32", [1, 2], [1, 2]) for name in "ab"]
    request = pb.ModelInferRequest(model_name="uneven")
    for each in MISFIT:
        request.inputs.add(name=each["name"], datatype="FP32", shape=each["shape"])
        request.inputs[-1].contents.fp32_contents.extend(each["data"])
    held_file.touch()
    path = "/v2/models/uneven/infer"
    with ThreadPoolExecutor() as pool, served.stub() as stub:
        first = pool.submit(ask, served, path, {"inputs": fits}, "first")
        wait_until(partial(in_flight, served, 1, "uneven"))
        other = pool.submit(ask, served, path, {"inputs": MISFIT}, "over-rest")
        call = stub.ModelInfer.future(request, metadata=(("x-request-id", "over-grpc"),))
        wait_until(partial(in_flight, served, 3, "uneven"))
        held_file.unlink()
        assert (first.result().status, other.result().status) == (200, 500)
        assert call.exception().code() is grpc.StatusCode.INTERNAL
    failed = [line for line in served.log if line["message"].startswith("a run failed")]
    lines = [line for line in failed if line["model"] == "uneven"]
    assert {(line["version"], line["level"]) for line in lines} == {(1, "error")}
    together, *alone = lines  # the joined run, then each request alone
    assert "request_id" not in together and not any("request_ids" in line for line in alone)
    assert sorted(together["request_ids"]) == ["over-grpc", "over-rest"]
    assert sorted(line["request_id"] for line in alone) == ["over-grpc", "over-rest"]


def test_every_metric_after_good_and_bad_requests(served: Served, held_file: Path) -> None:
    def of(model: str, name: str, **labels: str) -> float:
        return served.metric(f"twinop_{name}", model=model, **labels)

    def infer(rows: int) -> None:
        assert served.infer("counted", tensor("x", "FP32", [rows, 4], [1.0] * 4 * rows)).status == 200

    held_file.touch()
    with ThreadPoolExecutor() as pool:
        waiting = []
        for number in (1, 2, 3):
            waiting.append(pool.submit(infer, number))
            wait_until(partial(in_flight, served, number, "counted"))
            assert of("counted", "queued") == number - 1
        held_file.unlink()  # the two waiting requests share the next run
    for each in waiting:
        each.result()

    assert of("counted", "batch_size_count") == of("counted", "compute_seconds_count") == 2
    assert of("counted", "batch_size_sum") == 1 + 5
    compute, queue = of("counted", "compute_seconds_sum"), of("counted", "queue_seconds_sum")
    whole = of("counted", "request_seconds_sum")
    assert 0 < compute < whole and 0 < queue < whole
    assert of("counted", "queue_seconds_count") == of("counted", "request_seconds_count") == 3
    assert of("counted", "requests_total") == 3 and of("counted", "failures_total") == 0

    path, brotli = "/v2/models/counted/infer", {"content-encoding": "br"}
    assert ask(served, path, b"{no JSON").status == 400
    assert served.ask("POST", path, {"inputs": []}, brotli).status == 415
    assert served.infer("counted", tensor("x", "FP32", [1, 5], [1] * 5)).status == 400
    assert served.infer("counted", tensor("x", "FP32", [1, 4], [1] * 5)).status == 400
    request = pb.ModelInferRequest(model_name="counted")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with served.stub() as stub:
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request)
        request.inputs[0].contents.fp32_contents.extend([1] * 4)
        stub.ModelInfer(request)
    assert of("counted", "failures_total", reason="invalid", version="1") == 4
    assert of("counted", "failures_total", reason="wrong_media", version="1") == 1
    assert of("counted", "failures_total") == 5 and of("counted", "requests_total") == 4 + 5
    assert of("counted", "request_seconds_count") == 4 and of("counted", "compute_seconds_count") == 3

    before, x = of("", "failures_total"), tensor("x", "FP32", [1, 4], [1.0] * 4)
    assert served.infer("nobody", x).status == 404
    assert served.ask("POST", "/v2/models/counted/versions/7/infer", {"inputs": [x]}).status == 404
    assert of("", "failures_total", reason="not_found") >= 2 and of("", "failures_total") == before + 2
    assert b"nobody" not in served.ask("GET", "/metrics").content  # no label comes from a client

    assert of("counted", "provider", provider="cpu") == of("counted", "provider") == 1
    assert of("counted", "in_flight") == of("counted", "queued") == 0
    loaded = sum(state == "READY" for state, _ in served.versions().values())
    assert served.metric("twinop_loads_total", result="ok") == loaded
    assert served.metric("twinop_loads_total", result="failed") == 1


def metrics(model: str, version: int) -> ModelMetrics:
    return ModelMetrics(model, version, SimpleNamespace(queued=0, on_run=None), "cpu")


def answer(model: ModelMetrics) -> None:
    with counting() as count:
        count.accept(model, time.monotonic())
        count.result = Result("m", 1, {}, 0.002)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"twinop_{name}", labels)


def test_a_version_that_is_loaded_again_keeps_its_series() -> None:
    old = metrics("again", 1)
    answer(old)
    new = metrics("again", 1)
    answer(old)  # while it drains
    old.drop()
    answer(new)
    assert value("requests_total", model="again", version="1") == 3
    assert value("provider", model="again", version="1", provider="cpu") == 1
    new.drop()
    assert value("requests_total", model="again", version="1") is None


def logged(script: str) -> list[dict[str, Any]]:
    """Run a script that logs, and return its log, which must consist of JSON lines only."""
    program = f"""
import logging, warnings
from twinop.deploy.service import logs
logs.configure("info")
log = logging.getLogger("twinop.deploy.service.test")
{textwrap.dedent(script)}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_closed_stderr_gets_no_logs() -> None:
    program = "import sys; sys.stderr = None; from twinop.deploy.service import logs; logs.configure('info')"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_line_of_json_for_each_record() -> None:
    """Nothing ends a line early, and a traceback is a field."""
    hostile = "a\nb\r\n\x1b[31m{}\u2028\x85\ud800"
    line, odd, failed = logged(f"""
        log.info("ready on %s", "cpu", extra={{"http_port": 8080, "where": [1, 2]}})
        log.warning("%s", {hostile!r}, extra={{"path": {hostile!r}, "other": object}})
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("failed")
    """)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    named = {"level": "info", "logger": "twinop.deploy.service.test", "message": "ready on cpu"}
    assert line == named | {"http_port": 8080, "where": [1, 2]}
    assert odd["message"] == odd["path"] == hostile and odd["other"] == "<class 'object'>"
    assert failed["message"] == "failed" and failed["level"] == "error"
    assert failed["traceback"].startswith("Traceback (most recent call last):\n")
    assert failed["traceback"].endswith("ZeroDivisionError: division by zero")
