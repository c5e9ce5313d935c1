"""Hostile clients: others are answered meanwhile, and afterwards memory and files are released."""

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
from service_fixtures import Served, receive, receive_all, serve, wait_until
from service_raw import LIVE, REQUEST, answers_well, settled

MIB = 1 << 20
Attack = Callable[[Served], Iterator[None]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that waits 0.6 s for a body."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu())
    (folder / "twinop.toml").write_text("[server]\nbody_seconds = 0.6\n")
    with serve(folder, "--provider", "cpu") as found:
        yield found


# -------------------------------------------------------------------------------- attacks


@contextmanager
def doing(*work: Callable[[], None]) -> Iterator[None]:
    """Repeat each call in a thread of its own, at least once, until the block ends."""
    done, failed, rounds = threading.Event(), [], [0] * len(work)

    def repeat(index: int) -> None:
        try:
            while not done.is_set():
                work[index]()
                rounds[index] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failed == [] and all(rounds)


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
def slow_bodies(served: Served) -> Iterator[None]:
    """Send bodies byte by byte on 200 connections; replace each once it has been refused."""
    head, _, body = REQUEST.partition(b"\r\n\r\n")
    refused: list[bytes] = []

    def fresh() -> tuple[socket.socket, Iterator[int]]:
        connection = served.connect()
        connection.sendall(head + b"\r\n\r\n")
        connection.setblocking(False)
        return connection, iter(body)

    connections = [fresh() for _ in range(200)]

    def drip() -> None:
        for index, (connection, rest) in enumerate(connections):
            with suppress(OSError):
                connection.send(bytes([next(rest)]))
            with suppress(BlockingIOError):
                refused.append(connection.recv(1000))
                connection.close()
                connections[index] = fresh()
        time.sleep(0.1)

    try:
        with doing(drip):
            wait_until(lambda: len(refused) > 0)
            yield
            wait_until(lambda: len(refused) >= 200)
        assert all(b"body_seconds" in answer for answer in refused)
    finally:
        for connection, _ in connections:
            connection.close()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty SETTINGS
HALF_HEADERS = b"\0\1\0\1\4\0\0\0\1" + bytes(20)  # 20 of 256 bytes of HEADERS
HALVES = {
    "preface": PREFACE[:10],
    "nothing more": PREFACE,
    "head": PREFACE + b"\0\1\0\0\1",
    "frame": PREFACE + HALF_HEADERS,
    "noise": b"\0" * 50,
}


@contextmanager
def half_frames(served: Served, *halves: bytes) -> Iterator[list[socket.socket]]:
    """Open gRPC connections that stop within the preface, a frame's head or a frame, or that send noise."""
    assert served.grpc_port is not None
    connections = []
    with ExitStack() as stack:
        for data in halves or HALVES.values():
            for _ in range(20):
                connection = socket.create_connection(("127.0.0.1", served.grpc_port), 10)
                connections.append(stack.enter_context(connection))
                connection.sendall(data)
        yield connections


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


# -------------------------------------------------------------------------------- the others


ATTACKS = (killed_clients, slow_bodies, half_frames, idle_connections)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_are_answered_and_nothing_leaks(served: Served, attack: Callable[[Served], ExitStack]) -> None:
    with attack(served):  # allocates what is allocated only once
        answers_well(served)
    settled(served)
    files, memory, logged = served.files, served.memory, len(served.log)
    with attack(served):
        answers_well(served, 30)
    wait_until(lambda: served.files <= files)
    answers_well(served)
    for _ in range(3):
        if served.memory <= memory + 4 * MIB:
            break
        memory = served.memory  # an allocator may keep some memory, but a leak grows with each attack
        with attack(served):
            answers_well(served)
    else:
        pytest.fail("memory grew by 4 MiB with every attack")
    assert [line for line in served.log[logged:] if "traceback" in line] == []


@pytest.mark.parametrize("half", HALVES)
def test_half_frames_do_not_add_up(served: Served, half: str) -> None:
    """The server closes connections that never become gRPC connections, and others when the client leaves."""
    answers_well(served, 1)
    settled(served)
    files = served.files
    for _ in range(2):
        with half_frames(served, HALVES[half]) as connections:
            if half in ("preface", "noise"):
                for connection in connections:
                    receive_all(connection)  # until body_seconds have passed
            else:
                wait_until(lambda: served.files >= files + 20)  # the server would close them after a minute
        wait_until(lambda: served.files <= files)
