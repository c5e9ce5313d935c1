"""Clients that misbehave below the protocol: others are answered meanwhile, and files are closed again."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import service_models as models
from service_fixtures import Served, receive, receive_all, serve, split, wait_until
from service_raw import LIVE, REQUEST, answers_well, settled


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


# -------------------------------------------------------------------------------- malformed


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


ATTACKS = (resets, slow_bodies, no_reader)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_are_answered_and_files_are_closed(
    served: Served, attack: Callable[[Served], ExitStack]
) -> None:
    for _ in range(2):
        with attack(served):
            answers_well(served, 20)
