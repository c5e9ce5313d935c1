"""A request that fails, is refused, expires or loses its client does not affect any other request."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import grpc
import pytest
from service_fixtures import Served, serve, tensor, wait_until
from service_models import gather, place, slow
from service_rows import QUICK, ROW, call, in_flight, scaled

from twinop.deploy.service.protocol import SERVICE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    place(folder, "gather", gather(), settings="max_batch_size = 32")
    place(folder, "full", slow(rounds=3000), settings="max_queue = 1")
    place(folder, "slow", slow(rounds=3000))
    place(folder, "quick", scaled(1))
    with serve(folder, *QUICK) as found:
        yield found


def test_a_poisoned_request_in_a_batch_fails_alone(served: Served) -> None:
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


def test_a_full_queue_says_when_to_come_back_and_a_deadline_is_kept(served: Served) -> None:
    background = [threading.Thread(target=served.infer, args=("full", ROW)) for _ in range(2)]
    for number, thread in enumerate(background, 1):
        thread.start()
        wait_until(partial(in_flight, served, number, "full"))
    full = served.infer("full", ROW)
    assert full.status == 429 and "requests waiting" in full.error
    assert int(full.headers["retry-after"]) >= 1
    with pytest.raises(grpc.RpcError) as error:
        call(served, "full")
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.value.details() == full.error
    assert int(dict(error.value.trailing_metadata())["retry-after"]) >= 1
    assert served.metric("twinop_failures_total", model="full", reason="overloaded") == 2
    for thread in background:
        thread.join()
    late = served.infer("full", ROW, parameters={"timeout": 10_000})  # microseconds
    assert late.status == 504
    assert served.metric("twinop_failures_total", model="full", reason="deadline") == 1
    with pytest.raises(grpc.RpcError) as error:
        call(served, "full", 0.05)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_service_survives_the_end_of_a_client(served: Served) -> None:
    """The client's request leaves the queue and is counted as cancelled."""
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
    time.sleep(0.5)  # a connection that is closed at once may be half closed
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    wait_until(lambda: served.metric("twinop_queued", model="slow") == 0)
    first.join()
    assert served.metric("twinop_failures_total", model="slow", reason="cancelled") == 1


def test_calls_that_send_nothing_do_not_delay_another_one(served: Served) -> None:
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait(60)
        return
        yield b""

    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        infer = channel.stream_unary(f"/{SERVICE}/ModelInfer")
        silent = [infer.future(nothing()) for _ in range(40)]
        call(served, "quick")
        refused = [each for each in silent if each.done()]
        end.set()
        assert refused == []
