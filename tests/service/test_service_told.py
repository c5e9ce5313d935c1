"""What a server reports about its requests, good and bad: log lines with their ids, and every metric."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from service_fixtures import Answer, Served, serve, tensor, wait_until
from service_held import held
from service_models import log, place, relu, uneven
from service_rows import in_flight
from tritonclient.grpc import service_pb2 as pb

MISFIT = (tensor("a", "FP32", [1, 2], [1, 2]), tensor("b", "FP32", [1, 3], [1, 2, 3]))


@pytest.fixture(scope="module")
def held_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it exists, runs wait."""
    return tmp_path_factory.mktemp("held") / "file"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, held_file: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    place(folder, "uneven", uneven(), settings="max_batch_size = 2\nrun_timeout_seconds = 60")
    place(folder, "slow", relu(), settings="max_batch_size = 8")
    place(folder, "log", log())
    with serve(folder, "--provider", "cpu", program=held(runs=held_file)) as server:
        yield server


def ask(served: Served, path: str, body: Any, number: str = "") -> Answer:
    return served.ask("POST", path, body, {"x-request-id": number} if number else {})


# -------------------------------------------------------------------------------- the log


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
    lines = [line for line in served.log if line["message"].startswith("a run failed")]
    assert {(line["model"], line["version"], line["level"]) for line in lines} == {("uneven", 1, "error")}
    together, *alone = lines  # the joined run, then each request alone
    assert "request_id" not in together and not any("request_ids" in line for line in alone)
    assert sorted(together["request_ids"]) == ["over-grpc", "over-rest"]
    assert sorted(line["request_id"] for line in alone) == ["over-grpc", "over-rest"]


# -------------------------------------------------------------------------------- the metrics


def test_every_metric_after_good_and_bad_requests(served: Served, held_file: Path) -> None:
    def of(model: str, name: str, **labels: str) -> float:
        return served.metric(f"twinop_{name}", model=model, **labels)

    def infer(rows: int) -> None:
        assert served.infer("slow", tensor("x", "FP32", [rows, 4], [1.0] * 4 * rows)).status == 200

    held_file.touch()
    with ThreadPoolExecutor() as pool:
        waiting = []
        for number in (1, 2, 3):
            waiting.append(pool.submit(infer, number))
            wait_until(partial(in_flight, served, number, "slow"))
            assert of("slow", "queued") == number - 1
        held_file.unlink()  # the two waiting requests share the next run
    for each in waiting:
        each.result()

    assert of("slow", "batch_size_count") == of("slow", "compute_seconds_count") == 2
    assert of("slow", "batch_size_sum") == 1 + 5
    compute, queue = of("slow", "compute_seconds_sum"), of("slow", "queue_seconds_sum")
    whole = of("slow", "request_seconds_sum")
    assert 0 < compute < whole and 0 < queue < whole
    assert of("slow", "queue_seconds_count") == of("slow", "request_seconds_count") == 3
    assert of("slow", "requests_total") == 3 and of("slow", "failures_total") == 0

    path, brotli = "/v2/models/slow/infer", {"content-encoding": "br"}
    assert ask(served, path, b"{no JSON").status == 400
    assert served.ask("POST", path, {"inputs": []}, brotli).status == 415
    assert served.infer("slow", tensor("x", "FP32", [1, 5], [1] * 5)).status == 400
    assert served.infer("slow", tensor("x", "FP32", [1, 4], [1] * 5)).status == 400
    request = pb.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with served.stub() as stub:
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request)
        request.inputs[0].contents.fp32_contents.extend([1] * 4)
        stub.ModelInfer(request)
    assert of("slow", "failures_total", reason="invalid", version="1") == 4
    assert of("slow", "failures_total", reason="wrong_media", version="1") == 1
    assert of("slow", "failures_total") == 5 and of("slow", "requests_total") == 4 + 5
    assert of("slow", "request_seconds_count") == 4 and of("slow", "compute_seconds_count") == 3

    x = tensor("x", "FP32", [1, 4], [-1.0, 1.0, 1.0, 1.0])
    assert served.infer("log", x).status == 400  # NaN, which JSON cannot express
    assert of("log", "failures_total") == of("log", "requests_total") == 1
    assert of("log", "compute_seconds_count") == 1 and of("log", "request_seconds_count") == 0
    assert served.infer("log", x, parameters={"binary_data_output": True}).status == 200
    assert of("log", "failures_total") == 1 and of("log", "requests_total") == 2

    before = of("", "failures_total")
    assert served.infer("nobody", x).status == 404
    assert served.ask("POST", "/v2/models/log/versions/7/infer", {"inputs": [x]}).status == 404
    assert of("", "failures_total", reason="not_found") >= 2 and of("", "failures_total") == before + 2
    assert b"nobody" not in served.ask("GET", "/metrics").content  # no label comes from a client

    for model in ("slow", "log"):
        assert of(model, "provider", provider="cpu") == of(model, "provider") == 1
        assert of(model, "in_flight") == of(model, "queued") == 0
    assert served.metric("twinop_loads_total", result="ok") == 3
    assert served.metric("twinop_loads_total", result="failed") == 0
