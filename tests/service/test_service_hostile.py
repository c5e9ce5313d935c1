"""Clients that misbehave below the protocol: others are answered meanwhile, and files are closed again."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import service_models as models
from service_fixtures import Served, receive_all, serve, split, wait_until
from service_raw import LIVE, REQUEST, answers_well, settled


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that waits 0.6 s for a body."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu())
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
def resets(served: Served) -> Iterator[None]:
    """Reset connections amid requests, again and again."""
    done, rounds = threading.Event(), list[int]()

    def reset() -> None:
        while not done.is_set():
            for part in (0, 1, 30, len(REQUEST) - 9, len(REQUEST)):
                with served.connect() as connection:
                    connection.sendall(REQUEST[:part])
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            rounds.append(1)

    with ThreadPoolExecutor() as pool:
        resetting = pool.submit(reset)
        try:
            yield
        finally:
            done.set()
    resetting.result()
    assert rounds


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


@pytest.mark.parametrize("attack", [resets, no_reader], ids=lambda attack: attack.__name__)
def test_others_are_answered_and_files_are_closed(
    served: Served, attack: Callable[[Served], ExitStack]
) -> None:
    for _ in range(2):
        with attack(served):
            answers_well(served, 20)
