"""Clients that misbehave below the protocol: the service keeps answering, and its files are closed again."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import service_models as models
from service_fixtures import Served, receive, receive_all, serve, split, wait_until
from service_raw import BODY, LIVE, REQUEST, SLOW, answers_well, settled

from twinop.deploy.service.protocol import pb


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that waits 0.3 s for headers and 0.6 s for a body."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu())
    models.place(folder, "slow", models.slow(400))
    (folder / "twinop.toml").write_text("[server]\nheader_seconds = 0.3\nbody_seconds = 0.6\n")
    with serve(folder) as served:
        answers_well(served)
        with served.stub() as stub:
            stub.ServerLive(pb.ServerLiveRequest())
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """Check that the server answers after the test, holds no more files than before, and logged no error."""
    settled(server)
    before, logged = server.files, len(server.log)
    yield server
    answers_well(server)
    wait_until(lambda: server.files <= before + 2)
    assert [line for line in server.log[logged:] if "traceback" in line] == []


# -------------------------------------------------------------------------------- slow and endless


def test_headers_that_come_too_slowly(served: Served) -> None:
    with served.connect() as connection:
        with suppress(OSError):
            for byte in LIVE[:-2] + b"X-Header: " + b"a" * 1000:
                connection.send(bytes([byte]))
                time.sleep(0.02)
        answer = split(receive_all(connection))
    assert answer.status == 408 and "header_seconds" in answer.error


def test_a_body_that_comes_too_slowly(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(REQUEST[:-20])
        answer = split(receive_all(connection))
    assert answer.status == 408 and "body_seconds" in answer.error


def test_a_connection_without_a_request_is_closed(served: Served) -> None:
    for junk in (b"", b"\r\n\r\n"):
        with served.connect() as connection:
            connection.sendall(junk)
            assert connection.recv(100) == b""


def test_a_kept_connection_has_as_long_as_it_wants_between_requests(served: Served) -> None:
    with served.connect() as connection:
        for pause in (0, 0.5, 0.8):  # longer than both limits
            time.sleep(pause)
            connection.sendall(REQUEST)
            assert receive(connection).status == 200


def test_a_long_run_is_not_taken_for_a_slow_client(served: Served) -> None:
    """Together the runs take longer than both limits."""
    with ExitStack() as stack:
        connections = [stack.enter_context(served.connect(60)) for _ in range(16)]
        for connection in connections:
            connection.sendall(SLOW)
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
    """Endless senders must not occupy the event loop."""
    with served.connect() as connection:
        connection.sendall(LIVE[:-2] + b"X-A: " + b"a" * 100_000)
        sent, piece, end = 0, b"a" * (1 << 20), time.monotonic() + 0.5
        while time.monotonic() < end:
            sent += connection.send(piece)
        assert receive(connection).status == 431
    assert sent < 32 << 20


def test_requests_are_told_apart_however_they_arrive(tmp_path: Path) -> None:
    """Thousands in one piece, heads of the largest size, and larger bodies."""
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
        answers_well(served)


def test_resets_amid_requests(served: Served) -> None:
    for part in (0, 1, 30, len(REQUEST) - 9, len(REQUEST)):
        for _ in range(20):
            connection = served.connect()
            connection.sendall(REQUEST[:part])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    answers_well(served)
