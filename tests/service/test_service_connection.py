"""Clients that misbehave below the protocol: the service keeps answering, and its files are closed again."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import service_models as models
from service_fixtures import Served, receive, receive_all, serve, split, wait_until
from service_raw import LIVE, REQUEST, SLOW, answers_well, settled

from twinop.deploy.service.protocol import pb


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that waits 0.6 s for a body."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu())
    models.place(folder, "slow", models.slow(400))
    (folder / "twinop.toml").write_text("[server]\nbody_seconds = 0.6\n")
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


# -------------------------------------------------------------------------------- slow


def test_a_body_that_comes_too_slowly(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(REQUEST[:-20])
        answer = split(receive_all(connection))
    assert answer.status == 408 and "body_seconds" in answer.error


def test_a_kept_connection_has_as_long_as_it_wants_between_requests(served: Served) -> None:
    with served.connect() as connection:
        for pause in (0, 0.5, 0.8):  # longer than the limit
            time.sleep(pause)
            connection.sendall(REQUEST)
            assert receive(connection).status == 200


def test_a_connection_that_never_sends_anything_is_closed(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    patched = "import twinop.deploy.service.rest as r\nfrom twinop.cli import app\n"
    patched += "r.KEEP_ALIVE_SECONDS = 0.5\napp()"
    with serve(tmp_path, "--provider", "cpu", program=("-c", patched)) as served:
        assert served.exchange(b"") == b""


def test_a_long_run_is_not_taken_for_a_slow_client(served: Served) -> None:
    """Together the runs take longer than the limit."""
    with ExitStack() as stack:
        connections = [stack.enter_context(served.connect(60)) for _ in range(16)]
        for connection in connections:
            connection.sendall(SLOW)
        for connection in connections:
            assert receive(connection).status == 200


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
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed(served: Served, data: bytes) -> None:
    answer = split(served.exchange(data))
    assert answer.status == 400 and "not an HTTP/1.1 request, or its head is malformed" in answer.error
    assert answer.headers["connection"] == "close"


def test_an_upgrade_with_a_body_is_refused(served: Served) -> None:
    """What follows such a head must not count as the next request, however it arrives."""
    head, body = REQUEST.replace(b"Host: h", b"Connection: Upgrade\r\nUpgrade: h2c").split(b"{", 1)
    answer = split(served.exchange(head + b"{" + body))
    assert answer.status == 400 and "without the header Upgrade" in answer.error
    with served.connect() as connection:
        connection.sendall(head)
        connection.sendall(LIVE)
        assert receive_all(connection).count(b"HTTP/1.1 ") == 1


def test_an_upgrade_without_a_body_is_ignored(served: Served) -> None:
    for protocol in (b"h2c", b"websocket"):
        upgrade = LIVE.replace(b"Host: h", b"Host: h\r\nConnection: Upgrade, close\r\nUpgrade: " + protocol)
        assert split(served.exchange(upgrade)).json == {"live": True}


# -------------------------------------------------------------------------------- clients that go


@pytest.mark.parametrize("request_", [REQUEST, SLOW, REQUEST + SLOW + REQUEST, LIVE])
def test_a_client_that_closes_its_half_is_answered(served: Served, request_: bytes) -> None:
    with served.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # both at once, on a busy machine too
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        data = receive_all(connection)
    assert data.count(b"HTTP/1.1 200 OK") == data.count(b"HTTP/1.1 ") == request_.count(b"HTTP/1.1")


def test_a_client_that_closes_its_half_amid_a_request_is_not(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(REQUEST[:-9])
        connection.shutdown(socket.SHUT_WR)
        assert receive_all(connection) == b""


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
