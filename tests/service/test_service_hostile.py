"""Clients that misbehave below the protocol: others are answered meanwhile, and files are closed again."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import service_models as models
from service_fixtures import Served, receive, receive_all, serve, split, wait_until
from service_raw import LIVE, REQUEST, SLOW, answers_well, settled


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that waits 0.6 s for a body."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu())
    models.place(folder, "slow", models.slow(400))
    (folder / "twinop.toml").write_text("[server]\nbody_seconds = 0.6\n")
    with serve(folder, "--provider", "cpu") as found:
        answers_well(found)
        yield found


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
        for pause in (0, 0.8):  # longer than the limit
            time.sleep(pause)
            connection.sendall(REQUEST)
            assert receive(connection).status == 200


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
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
    "two lengths": b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\naa",
    "length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
    "length of 30 digits": b"POST /v2 HTTP/1.1\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
    "bad chunk": b"POST /v2/models/relu/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed(served: Served, data: bytes) -> None:
    assert served.exchange(data).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_an_upgrade_with_a_body_is_refused(served: Served) -> None:
    """What follows such a head must not count as the next request, however it arrives."""
    head, body = REQUEST.replace(b"Host: h", b"Connection: Upgrade\r\nUpgrade: h2c").split(b"{", 1)
    answer = split(served.exchange(head + b"{" + body))
    assert answer.status == 400 and "leave the header Upgrade out" in answer.error
    with served.connect() as connection:
        connection.sendall(head)
        connection.sendall(LIVE)
        assert receive_all(connection).count(b"HTTP/1.1 ") == 1
    upgrade = LIVE.replace(b"Host: h", b"Host: h\r\nConnection: Upgrade, close\r\nUpgrade: websocket")
    assert split(served.exchange(upgrade)).json == {"live": True}


# -------------------------------------------------------------------------------- attacks


@contextmanager
def doing(work: Callable[[], None]) -> Iterator[None]:
    """Repeat the call in a thread, at least once, until the block ends."""
    done, failed, rounds = threading.Event(), [], [0]

    def repeat() -> None:
        try:
            while not done.is_set():
                work()
                rounds[0] += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert failed == [] and rounds[0]


KILLED = """
import socket, sys, time
request = sys.stdin.buffer.read()
connections = [socket.create_connection(("127.0.0.1", {port})) for _ in range(50)]
for index, connection in enumerate(connections):
    connection.sendall((request, request[:-9], request[:30])[index % 3])
print("sent", flush=True)
time.sleep(60)
"""


@contextmanager
def killed_clients(served: Served) -> Iterator[None]:
    """Kill clients with SIGKILL that have each sent 50 requests, complete and incomplete ones."""

    def client() -> None:
        command = [sys.executable, "-S", "-c", KILLED.format(port=served.http_port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(REQUEST)
            process.stdin.close()
            assert process.stdout.readline() == b"sent\n"
            os.kill(process.pid, signal.SIGKILL)

    with doing(client):
        yield


@contextmanager
def resets(served: Served) -> Iterator[None]:
    """Reset connections amid requests."""

    def reset() -> None:
        for part in (0, 1, 30, len(REQUEST) - 9, len(REQUEST)):
            connection = served.connect()
            connection.sendall(REQUEST[:part])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()

    with doing(reset):
        yield


@contextmanager
def slow_bodies(served: Served) -> Iterator[None]:
    """Send bodies byte by byte on 200 connections; each is refused."""
    head, _, body = REQUEST.partition(b"\r\n\r\n")
    with ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in range(200)]
        for connection in connections:
            connection.sendall(head + b"\r\n\r\n")
        rest = iter(body)

        def drip() -> None:
            byte = bytes([next(rest)])
            for connection in connections:
                with suppress(OSError):
                    connection.send(byte)
            time.sleep(0.1)

        with doing(drip):
            yield
        statuses = set()
        for connection in connections:
            with suppress(ConnectionError):  # what is sent after the answer resets the connection
                statuses.add(receive(connection).status)
        assert statuses == {408}


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty SETTINGS
UNFINISHED = (PREFACE[:10], b"\0" * 50)
HALVES = (
    *UNFINISHED,
    PREFACE,
    PREFACE + b"\0\1\0\0\1",  # half the head of a frame
    PREFACE + b"\0\1\0\1\4\0\0\0\1" + bytes(20),  # 20 of 256 bytes of HEADERS
)


@contextmanager
def half_frames(served: Served) -> Iterator[None]:
    """Open gRPC connections that stop within the preface, a frame's head or a frame, or that send noise.

    The server closes those that never become gRPC connections, the others when the client leaves.
    """
    assert served.grpc_port is not None
    with ExitStack() as stack:
        connections = []
        for data in HALVES * 20:
            connection = socket.create_connection(("127.0.0.1", served.grpc_port), 10)
            connections.append((stack.enter_context(connection), data))
            connection.sendall(data)
        yield
        for connection, data in connections:
            if data in UNFINISHED:
                receive_all(connection)  # until body_seconds have passed


@contextmanager
def idle_connections(served: Served) -> Iterator[None]:
    """Hold a thousand connections open. Half have sent one request, the others nothing."""
    with ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in range(1000)]
        for connection in connections[::2]:
            connection.sendall(LIVE)
        for connection in connections[::2]:
            assert receive(connection).status == 200
        yield
        assert served.files >= 500


@contextmanager
def no_reader(served: Served) -> Iterator[None]:
    """Ask for a large answer, and do not read it."""
    size = 8 << 20
    given = {
        "name": "x",
        "datatype": "FP32",
        "shape": [size // 16, 4],
        "parameters": {"binary_data_size": size},
    }
    header = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/relu/infer HTTP/1.1\r\nInference-Header-Content-Length: {len(header)}\r\n"
        f"Content-Length: {len(header) + size}\r\n\r\n"
    )
    with served.connect() as connection:
        connection.sendall(head.encode() + header + bytes(size))
        yield


ATTACKS = (killed_clients, resets, slow_bodies, half_frames, idle_connections, no_reader)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_are_answered_and_files_are_closed(
    served: Served, attack: Callable[[Served], ExitStack]
) -> None:
    for _ in range(2):
        with attack(served):
            answers_well(served, 20)
