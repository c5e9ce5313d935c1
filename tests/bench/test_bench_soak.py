"""The clients of the soak: how they count a gRPC call without an answer."""

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinop.bench.report import BenchError
from lab import clients, mixed, soak
from lab.servers import GRPC, REST, Server, free_ports

_HEADERS, _SETTINGS, _GOAWAY = 1, 4, 7  # frames of HTTP/2


class Refusing:
    """A gRPC server that goes away and says that it has seen no call, like gRPC's own in its shutdown."""

    def __init__(self) -> None:
        self.calls = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.server = Server("refusing", {REST: free_ports(1)[0], GRPC: self.listener.getsockname()[1]})
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self.listener.accept()[0],), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        with contextlib.suppress(OSError), connection:
            stream.read(24)  # the preface of HTTP/2
            connection.sendall(_frame(_SETTINGS))
            while len(head := stream.read(9)) == 9:
                kind, flags = head[3], head[4]
                stream.read(int.from_bytes(head[:3], "big"))
                if kind == _SETTINGS and not flags:
                    connection.sendall(_frame(_SETTINGS, flags=1))
                elif kind == _HEADERS:
                    self.calls += 1
                    connection.sendall(_frame(_GOAWAY, bytes(8)))  # no error; no stream was seen


def _frame(kind: int, content: bytes = b"", flags: int = 0) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + content


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    server = Refusing()
    yield server
    server.listener.close()


def test_a_call_is_one_attempt(refusing: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC itself may retry an unseen call forever and use up the memory."""
    monkeypatch.setattr(clients, "some", mixed.grpc_good)
    outcome = clients.Outcome()
    asyncio.run(clients.client(refusing.server, 0, outcome, lambda: len(outcome.cut_off) < 3))
    assert (refusing.calls, outcome.requests, len(outcome.cut_off)) == (3, 3, 3)
    assert outcome.refused == 0 and not outcome.lost


class Every(Container[str]):
    def __contains__(self, number: object) -> bool:
        return True


@pytest.mark.parametrize(("accepted", "lost"), [(set(), False), (Every(), True)], ids=["none", "every"])
def test_calls_are_lost_that_the_server_had_accepted(
    refusing: Refusing, monkeypatch: pytest.MonkeyPatch, accepted: Any, lost: bool
) -> None:
    monkeypatch.setattr(soak, "accepted", lambda log: accepted)
    with subprocess.Popen(["sleep", "60"]) as running:
        ending = soak.ended_under_load(refusing.server, running, Path("log"), 0.2)
        outcome = asyncio.run(ending)
    assert outcome.cut_off and len(outcome.lost) == (len(outcome.cut_off) if lost else 0)


def test_what_the_log_says_was_accepted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [{"message": "accepted", "request_id": "a"}, {"message": "ready", "request_id": "b"}]
    log.write_text("\n".join(["WARNING of gRPC's", *map(json.dumps, lines)]))
    assert soak.accepted(log) == {"a"}
    log.write_text(json.dumps(lines[1]))
    with pytest.raises(BenchError, match="lists no call that it accepted"):
        soak.accepted(log)
