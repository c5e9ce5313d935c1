"""What a real server tells of its requests, good and bad: log lines with their ids, and every metric."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from service_fixtures import Answer, Served, serve, tensor
from service_models import place, uneven

from twinop.deploy.service._kserve import pb, pb_grpc

MISFIT = (tensor("a", "FP32", [1, 2], [1, 2]), tensor("b", "FP32", [1, 3], [1, 2, 3]))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    # A lone request waits half a second for another.
    place(tmp_path, "uneven", uneven(), settings="max_batch_size = 2\nmax_queue_delay_us = 500_000")
    with serve(tmp_path, "--provider", "cpu", "--access-log") as server:
        yield server


def ask(served: Served, path: str, body: Any, number: str = "") -> Answer:
    return served.ask("POST", path, body, {"x-request-id": number} if number else {})


# -------------------------------------------------------------------------------- the log


def test_the_line_of_a_failed_run_says_whose_it_was(served: Served) -> None:
    def over_rest() -> None:
        assert ask(served, "/v2/models/uneven/infer", {"inputs": MISFIT}, "over-rest").status == 500

    other = threading.Thread(target=over_rest)
    other.start()
    request = pb.ModelInferRequest(model_name="uneven")
    for each in MISFIT:
        request.inputs.add(name=each["name"], datatype="FP32", shape=each["shape"])
        request.inputs[-1].contents.fp32_contents.extend(each["data"])
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as error:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(request, metadata=(("x-request-id", "over-grpc"),))
        assert error.value.code() is grpc.StatusCode.INTERNAL
    other.join()
    lines = [line for line in served.log if line["message"].startswith("a run failed")]
    assert {(line["model"], line["version"], line["level"]) for line in lines} == {("uneven", 1, "error")}
    together, *alone = lines  # first joined, then each alone
    assert "request_id" not in together and not any("request_ids" in line for line in alone)
    assert sorted(together["request_ids"]) == ["over-grpc", "over-rest"]
    assert sorted(line["request_id"] for line in alone) == ["over-grpc", "over-rest"]


@pytest.mark.parametrize("number", ["", "mine"])
def test_access_lines_have_the_id_of_the_answer(served: Served, number: str) -> None:
    good = {"id": "in-body", "inputs": [tensor(name, "FP32", [1, 1], [1]) for name in "ab"]}
    for path, body, status in (
        ("/v2/models/uneven/infer", b"{no JSON", 400),
        ("/v2/models/nobody/infer", good, 404),
        ("/nowhere", b"", 404),
        ("/v2/models/uneven/infer", good, 200),
    ):
        answer = ask(served, path, body, number)
        assert answer.status == status
        line = [line for line in served.log if line["logger"] == "uvicorn.access"][-1]
        assert (line["path"], line["status"]) == (path, status)
        assert line["request_id"] == answer.headers["x-request-id"]
        assert line["request_id"] == number or not number
        assert line.get("model") == ("uneven" if "uneven" in path else None)
    assert line["request_id"] == (number or "in-body")


def test_a_request_behind_another_on_its_connection_has_nothing_of_it(served: Served) -> None:
    body = b"{no JSON"
    first = b"POST /v2/models/uneven/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    served.exchange(first + body + b"GET /v2 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    one, two = (line for line in served.log[-9:] if line.get("path") in ("/v2/models/uneven/infer", "/v2"))
    assert one["model"] == "uneven" and "model" not in two
    assert one["request_id"] != two["request_id"]
