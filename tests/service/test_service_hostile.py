"""Clients that misbehave below the protocol, and limits of bytes and connections: others are answered."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import onnx
import pytest
import service_models as models
from service_fixtures import Served, receive_all, serve, split, tensor, wait_until
from service_raw import LIVE, REQUEST, answers_well, settled
from service_rows import binary

from twinop.deploy.service.codec_grpc import SERVICE
from twinop.deploy.service.errors import OVER_BUDGET, ServiceError
from twinop.deploy.service.request import Budget, RequestMemory


@pytest.fixture
def calm(served: Served) -> Iterator[Served]:
    """Check that the server answers after the test, holds no more files than before, and logged no error."""
    answers_well(served)
    settled(served)
    before, logged = served.files, len(served.log)
    yield served
    answers_well(served)
    wait_until(lambda: served.files <= before + 2)
    assert [line for line in served.log[logged:] if "traceback" in line] == []


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
    body, headers = binary(np.zeros((1 << 19, 4), np.float32))
    lines = [f"{name}: {text}\r\n" for name, text in (headers | {"content-length": str(len(body))}).items()]
    with served.connect() as connection:
        connection.sendall(f"POST /v2/models/relu/infer HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body)
        yield


@pytest.mark.parametrize("attack", [resets, no_reader], ids=lambda attack: attack.__name__)
def test_others_are_answered_and_files_are_closed(calm: Served, attack: Callable[..., ExitStack]) -> None:
    for _ in range(2):
        with attack(calm):
            answers_well(calm, 20)


MIB = 1 << 20
X = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])


def largest() -> onnx.ModelProto:
    """Return a model with large inputs and a small output."""
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[N] x) => (float[1] y) { y = ReduceMax(x) }'
    )


def test_a_request_gives_back_what_it_took() -> None:
    budget = Budget(100 * MIB)
    with RequestMemory(budget, 50 * MIB) as one, RequestMemory(budget, 40 * MIB) as other:
        one.reserve(50 * MIB)
        other.reserve(30 * MIB)
        with pytest.raises(ServiceError, match=r"hold 83886080 of 104857600 bytes .max_bytes") as error:
            other.reserve(10 * MIB)
        assert error.value.failure is OVER_BUDGET and error.value.headers == {"Retry-After": "1"}
        one.reserve(-20 * MIB)
        other.reserve(10 * MIB)
        assert budget.used == 70 * MIB
    assert budget.used == 0


def test_an_eighth_is_kept_for_small_requests() -> None:
    budget = Budget(80 * MIB)
    large, other, small = (RequestMemory(budget, size) for size in (70 * MIB, 70 * MIB, 100))
    with large, other, small:
        large.reserve(70 * MIB)
        with pytest.raises(ServiceError):
            other.reserve(1)  # it announced more
        small.reserve(100)
        with pytest.raises(ServiceError):
            small.reserve(1 * MIB)  # no longer small


def over_http(served: Served, size: int) -> str:
    """Send a binary request for `largest`; return "ok", or the error."""
    answer = served.ask("POST", "/v2/models/largest/infer", *binary(np.zeros(size // 4, np.float32)))
    if answer.status == 200:
        assert answer.content.endswith(bytes(4))
        return "ok"
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    return answer.error


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with room for four messages of the largest size, which waits 2 s for each."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "largest", largest())
    models.place(folder, "relu", models.relu())
    (folder / "twinop.toml").write_text(
        f"[server]\nmax_bytes_in_flight = {8 * MIB}\nmax_request_bytes = {2 * MIB}\nbody_seconds = 2\n"
    )
    with serve(folder, "--provider", "cpu") as served:
        yield served


def test_a_body_that_comes_too_slowly(small: Served) -> None:
    with small.connect() as connection:
        connection.sendall(REQUEST[:-20])
        answer = split(receive_all(connection))
    assert answer.status == 408 and "body_seconds" in answer.error


def test_slow_bodies_give_their_bytes_back(small: Served) -> None:
    head = b"POST /v2/models/largest/infer HTTP/1.1\r\nContent-Length: %d\r\n"
    head += b"Inference-Header-Content-Length: 9\r\n\r\n"
    connections: list[socket.socket] = []

    def is_refused() -> bool:
        """Each holds its bytes for 2 s, in which a busy machine may send few of them."""
        connections.append(small.connect(60))
        connections[-1].sendall(head % (2 * MIB) + bytes(MIB))
        return "(max_bytes_in_flight)" in over_http(small, MIB)

    wait_until(is_refused, 60)
    assert small.infer("relu", X).status == 200
    wait_until(lambda: over_http(small, MIB) == "ok", 60)
    statuses = [connection.recv(1000).split()[1] for connection in connections]
    assert b"408" in statuses and {*statuses} <= {b"408", b"503"}
    for connection in connections:
        connection.close()


def test_a_grpc_message_that_does_not_arrive(small: Served) -> None:
    """Others are answered meanwhile."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait(60)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        silent = channel.stream_unary(f"/{SERVICE}/ModelInfer").future(nothing())
        assert small.infer("relu", X).status == 200
        error = silent.exception(60)
        end.set()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 2 s (body_seconds)" in error.details()
