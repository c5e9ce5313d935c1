"""Clients that misbehave below the protocol: the service goes on answering, and its files come back."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import service_models as models
from service_fixtures import Served, receive, receive_all, serve, split, tensor, wait_until

from twinop.deploy.service.protocol import pb

X = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
BODY = json.dumps({"inputs": [X]}).encode()
REQUEST = b"POST /v2/models/relu/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
SLOW = REQUEST.replace(b"/relu/", b"/slow/")
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With short patience: 1 s for headers, 2 s for a body."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu())
    models.place(folder, "slow", models.slow(3000))
    (folder / "twinop.toml").write_text("[server]\nheader_seconds = 1.0\nbody_seconds = 2.0\n")
    with serve(folder) as served:
        answers_well(served)
        with served.stub() as stub:
            stub.ServerLive(pb.ServerLiveRequest())
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """The server; after the test it answers, holds no more files than before, and has logged no bug."""
    settled(server)
    before, logged = server.files, len(server.log)
    yield server
    answers_well(server)
    wait_until(lambda: server.files <= before + 2)
    assert [line for line in server.log[logged:] if "traceback" in line] == []


def settled(server: Served) -> None:
    """Waits until what another test left behind has timed out."""
    last, since = server.files, time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.05)
        if server.files != last:
            last, since = server.files, time.monotonic()


def answers_well(server: Served, most: float = 1.0) -> None:
    """Over HTTP and gRPC, 20 times, at usual speed: `most` is for the slowest but two."""
    seconds = []
    with server.connect() as connection, server.stub() as stub:
        for _ in range(20):
            start = time.perf_counter()
            connection.sendall(REQUEST)
            answer = receive(connection)
            assert answer.status == 200 and answer.json["outputs"][0]["data"] == [0, 0, 1, 2]
            request = pb.ModelInferRequest(model_name="relu")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend(
                [-1, 0, 1, 2]
            )
            assert list(stub.ModelInfer(request, timeout=30).outputs[0].contents.fp32_contents) == [
                0,
                0,
                1,
                2,
            ]
            seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[-3] < most


# -------------------------------------------------------------------------------- slow and endless


def test_headers_that_come_too_slowly(served: Served) -> None:
    with served.connect() as connection:
        start = time.monotonic()
        with suppress(OSError):
            for byte in LIVE[:-2] + b"X-Header: " + b"a" * 1000:
                connection.send(bytes([byte]))
                time.sleep(0.02)
        answer = split(receive_all(connection))
    assert answer.status == 408 and "header_seconds" in answer.error
    assert 0.9 < time.monotonic() - start < 10


def test_a_body_that_comes_too_slowly(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(REQUEST[:-20])
        start = time.monotonic()
        answer = split(receive_all(connection))
    assert answer.status == 408 and "body_seconds" in answer.error
    assert 1.9 < time.monotonic() - start < 10


def test_a_connection_without_a_request_is_closed(served: Served) -> None:
    for junk in (b"", b"\r\n\r\n"):
        with served.connect() as connection:
            connection.sendall(junk)
            assert connection.recv(100) == b""


def test_a_kept_connection_has_as_long_as_it_wants_between_requests(served: Served) -> None:
    with served.connect() as connection:
        for pause in (0, 1.5, 2.5):
            time.sleep(pause)
            connection.sendall(REQUEST)
            assert receive(connection).status == 200


def test_a_long_run_is_not_taken_for_a_slow_client(served: Served) -> None:
    body = json.dumps({"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4])]}).encode()
    head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as stack:
        connections = [stack.enter_context(served.connect(60)) for _ in range(12)]
        for connection in connections:
            connection.sendall(head + body)
        for connection in connections:
            assert receive(connection).status == 200


def test_headers_without_end(served: Served) -> None:
    for header in (b"X-A: " + b"a" * (10 << 20), b"".join(b"X-%d: aaaaaaaa\r\n" % i for i in range(500_000))):
        before = served.memory
        with served.connect() as connection:
            with suppress(OSError):
                connection.sendall(LIVE[:-2] + header)
            answer = receive(connection)
        assert answer.status == 431 and "max_header_bytes" in answer.error
        assert served.memory < before + (4 << 20)


def test_what_follows_a_refused_head_is_read_at_leisure(served: Served) -> None:
    """At full speed two endless senders had a core of the server's, and others waited 45 ms instead of 5."""
    with served.connect() as connection:
        connection.sendall(LIVE[:-2] + b"X-A: " + b"a" * 100_000)
        sent, piece, end = 0, b"a" * (1 << 20), time.monotonic() + 1
        while time.monotonic() < end:
            sent += connection.send(piece)
        assert receive(connection).status == 431
    assert sent < 64 << 20


def test_requests_are_told_apart_however_they_arrive(tmp_path: Path) -> None:
    """Thousands in one piece, heads as long as they may be, bodies that are longer."""
    models.place(tmp_path, "relu", models.relu())
    longest = len(REQUEST) - len(BODY) + 3  # a longer Content-Length
    (tmp_path / "twinop.toml").write_text(f"[server]\nmax_header_bytes = {longest}\n")
    assert len(LIVE) < longest < len(BODY) * 2
    padded = REQUEST.replace(BODY, BODY + b" " * 60_000)
    padded = padded.replace(b"Length: %d" % len(BODY), b"Length: %d" % (len(BODY) + 60_000))
    last = LIVE.replace(b"Host: h", b"Connection: close")
    with serve(tmp_path) as served, served.connect() as connection:
        sender = threading.Thread(
            target=connection.sendall, args=((LIVE * 700 + REQUEST + padded) * 5 + last,)
        )
        sender.start()
        answers = receive_all(connection)
        sender.join()
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"HTTP/1.1 ") == 702 * 5 + 1
        assert re.findall(rb"live|outputs", answers) == ([b"live"] * 700 + [b"outputs"] * 2) * 5 + [b"live"]
        assert answers.count(b'"data":[0.0,0.0,1.0,2.0]') == 10
        assert split(served.exchange(LIVE[:-2] + b"A: " + b"a" * longest + b"\r\n\r\n")).status == 431


def test_a_long_request_line(served: Served) -> None:
    answer = split(served.exchange(b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n"))
    assert answer.status == 431
    answer = split(
        served.exchange(b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    )
    assert answer.status == 404


# -------------------------------------------------------------------------------- malformed


MALFORMED = {
    "not HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "binary": bytes(range(256)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
    "header without colon": b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    "two lengths": b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\naa",
    "length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
    "negative length": b"POST /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "length of 30 digits": b"POST /v2 HTTP/1.1\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
    "bad chunk": b"POST /v2/models/relu/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "path beyond ASCII": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    "CONNECT": b"CONNECT a.b:80 HTTP/1.1\r\n\r\n",
    "upgrade with a body": REQUEST.replace(b"Host: h", b"Connection: Upgrade\r\nUpgrade: h2c"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed(served: Served, data: bytes) -> None:
    answer = split(served.exchange(data))
    assert answer.status == 400 and "malformed HTTP" in answer.error
    assert answer.headers["connection"] == "close"


def test_an_upgrade_without_a_body_is_ignored(served: Served) -> None:
    for protocol in (b"h2c", b"websocket"):
        upgrade = LIVE.replace(b"Host: h", b"Host: h\r\nConnection: Upgrade, close\r\nUpgrade: " + protocol)
        assert split(served.exchange(upgrade)).json == {"live": True}


def test_what_came_before_the_malformed_is_answered(served: Served) -> None:
    assert split(served.exchange(SLOW + b"\0\0 not HTTP")).status == 200
    answers = served.exchange(SLOW + REQUEST + b"\0\0 not HTTP")
    assert answers.count(b"HTTP/1.1 200 OK") == 2


# -------------------------------------------------------------------------------- clients that go


def test_a_client_that_does_not_read(served: Served) -> None:
    rows = 500_000
    tensors = [
        {"name": "x", "datatype": "FP32", "shape": [rows, 4], "parameters": {"binary_data_size": rows * 16}}
    ]
    header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/relu/infer HTTP/1.1\r\nInference-Header-Content-Length: {len(header)}\r\n"
        f"Content-Length: {len(header) + rows * 16}\r\n\r\n"
    )
    with served.connect() as connection:
        connection.sendall(head.encode() + header + np.zeros((rows, 4), np.float32).tobytes())
        time.sleep(1)
        answers_well(served)


def test_resets_amid_requests(served: Served) -> None:
    for part in (0, 1, 30, len(REQUEST) - 9, len(REQUEST)):
        for _ in range(20):
            connection = served.connect()
            connection.sendall(REQUEST[:part])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    answers_well(served)


# -------------------------------------------------------------------------------- the end


def test_a_stopping_server_answers_what_has_come(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    models.place(tmp_path, "slow", models.slow(5000))
    with serve(tmp_path) as served, ExitStack() as stack:
        waiting, kept, late, idle = (stack.enter_context(served.connect(60)) for _ in range(4))
        for connection in (kept, late):
            connection.sendall(REQUEST)
            assert receive(connection).headers.get("connection") != "close"
        waiting.sendall(SLOW)
        time.sleep(0.1)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        late.sendall(REQUEST)  # on a connection that was open
        answer = split(receive_all(late))
        assert answer.status in (200, 503) and answer.headers["connection"] == "close"
        answer = split(receive_all(waiting))
        assert answer.status == 200 and answer.headers["connection"] == "close"
        assert receive_all(kept) == receive_all(idle) == b""
        with pytest.raises(OSError):
            served.connect()
        assert served.stop() == 0


def test_every_accepted_request_is_answered_at_the_end(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    with serve(tmp_path) as served:
        lost: list[str] = []
        answered = [0]

        def client() -> None:
            while True:
                try:
                    connection = served.connect()
                except OSError:
                    return
                with connection:
                    answer = None
                    while answer is None or answer.headers.get("connection") != "close":
                        try:
                            connection.sendall(REQUEST)
                            answer = receive(connection)
                        except OSError as error:
                            lost.append(str(error))
                            break
                        answered[0] += answer.status == 200

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        status = served.stop()
        for thread in threads:
            thread.join(60)
    assert status == 0 and lost == [] and answered[0] > 100


def test_grpc_calls_are_answered_or_told_to_go_elsewhere_at_the_end(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    models.place(tmp_path, "slow", models.slow(5000))
    with serve(tmp_path) as served, served.stub() as stub:
        request = pb.ModelInferRequest(model_name="relu")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([0] * 4)
        refusals: list[grpc.StatusCode] = []

        def client() -> None:
            while True:
                try:
                    stub.ModelInfer(request, timeout=60)
                except grpc.RpcError as error:
                    refusals.append(error.code())
                    return

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        slow = pb.ModelInferRequest(model_name="slow", inputs=request.inputs)
        waiting = stub.ModelInfer.future(slow)
        time.sleep(0.1)
        assert served.stop() == 0
        assert waiting.result(60).model_name == "slow"
        for thread in threads:
            thread.join(60)
    assert refusals == [grpc.StatusCode.UNAVAILABLE] * 8


def test_what_takes_longer_than_the_grace_time_is_cut_off(tmp_path: Path) -> None:
    """Once "held" is there, runs wait for "pass", which lets one of them through; the others never end."""
    held, passing = tmp_path / "held", tmp_path / "pass"
    patched = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from twinop.deploy.service.instance import Instance\n"
        "from twinop.cli import app\n"
        "run = Instance.run\n"
        "def wait(*arguments):\n"
        f"    while Path({str(held)!r}).exists():\n"
        "        try:\n"
        f"            Path({str(passing)!r}).unlink()\n"
        "            break\n"
        "        except FileNotFoundError:\n"
        "            time.sleep(0.02)\n"
        "    return run(*arguments)\n"
        "Instance.run = wait\n"
        "app(sys.argv[1:])\n"
    )
    models.place(tmp_path / "models", "slow", models.slow())
    program = ("-c", patched)
    with serve(tmp_path / "models", "--grace-seconds", "2", program=program) as served, ExitStack() as stack:
        held.touch()
        connections = [stack.enter_context(served.connect(60)) for _ in range(8)]
        for connection in connections:
            connection.sendall(SLOW)
        wait_until(lambda: served.metric("twinop_in_flight", model="slow") == 8)
        served.process.send_signal(signal.SIGTERM)
        passing.touch()
        answers = [receive(connection) for connection in connections]
        assert served.stop() == 1
    assert sorted(answer.status for answer in answers) == [200, *[503] * 7]
    assert {answer.error for answer in answers if answer.status == 503} == {
        "the server stopped before it could answer",
    }
