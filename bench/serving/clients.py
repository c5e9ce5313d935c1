"""Clients of the soak: each sends one request after the other over HTTP and gRPC, and checks the answers."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from twinop.bench.serving import mixed_grpc, mixed_rest
from twinop.bench.serving.mixed import Answer, Case, Wrong
from twinop.bench.serving.servers import GRPC, REST, Server

# With subchannels of its own, or all clients would share a connection. Each call is one attempt: where a
# server has just ended, gRPC 1.85 may retry a call that did not reach it without pause and for ever, in the
# event loop's thread, and take 200 MB a second for it.
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_SECONDS = 60.0  # an answer that has not come by then is lost
_PAUSE = 0.02  # before the next connection to a server that ends, or to none
_NO_ANSWERS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "CANCELLED")  # where gRPC itself says so


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        answered: by (protocol, kind).
        lost: were sent on a connection that then closed without an answer.
        cut_off: such gRPC calls, by id, and what gRPC says of each. It does not say whether they arrived.
        refused: connections of a server that is gone, calls that a stopping server told to go elsewhere.
        versions: how often each version of the model answered.
        samples: now and then the seconds since the start, the server's RSS in MiB, its open files.
        swapped: the versions that were put there to be served.
        broken: of the corrupt ones that were put there: their state in the server's index.
    """

    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut_off: dict[str, str] = field(default_factory=dict)
    refused: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    samples: list[tuple[float, float, int]] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.answered.total() + len(self.lost) + len(self.cut_off)

    def take(self, case: Case, answer: Answer) -> None:
        self.answered[case.protocol, case.kind] += 1
        try:
            version = case.check(answer)
        except Wrong as wrong:
            self.wrong.append(f"{case.protocol}, {case.kind}: {wrong}")
            return
        if version is not None:
            self.versions[version] += 1


class _Refused(Exception):
    """Nobody listens, or the server is stopping: the request was not taken."""


class _Lost(Exception):
    """The request was sent, and no answer came."""


class _CutOff(Exception):
    """The gRPC call of this id got no answer; whether the server had it, its log knows."""


class _Connections:
    """One client's connection for each protocol, made when it is needed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up()
        if self._channel is not None:
            await self._channel.close()

    async def ask(self, case: Case) -> Answer:
        """
        Raises:
            _Refused, _Lost, _CutOff: no answer.
        """
        return await (self._call(case) if case.protocol == GRPC else self._post(case.request))

    async def _post(self, request: bytes) -> Answer:
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection("127.0.0.1", self._server.ports[REST])
            except OSError as error:
                raise _Refused from error
        reader, writer = self._streams
        try:
            async with asyncio.timeout(_SECONDS):
                writer.write(request)
                answer = await mixed_rest.read_answer(reader)
        except (EOFError, OSError) as error:
            raise _Lost(f"{REST}: {error!r}") from error
        if answer.headers.get("connection") == "close":
            self._hang_up()
        return answer

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _call(self, case: Case) -> Answer:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._server.ports[GRPC]}", _CHANNEL)
        number = uuid.uuid4().hex
        call = self._channel.unary_unary(case.method)
        try:
            body = await call(case.request, timeout=_SECONDS, metadata=(("x-request-id", number),))
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
            is_servers = "x-request-id" in dict(error.trailing_metadata() or ())
            if _was_not_taken(details, is_servers):
                raise _Refused from error
            if code in _NO_ANSWERS and not is_servers:
                raise _CutOff(number, f"{GRPC}: {code}: {details}") from error
            return Answer(code, {}, details.encode())
        return Answer("OK", {}, body)


def _was_not_taken(details: str, is_servers: bool) -> bool:
    """Nobody listens, or the server said that it is stopping."""
    return "server is stopping" in details if is_servers else details.startswith("failed to connect")


def some(choose: random.Random) -> Case:
    """A third over gRPC; three good ones for each bad one."""
    source = mixed_grpc if choose.random() < 1 / 3 else mixed_rest
    return choose.choice(source.BAD) if choose.random() < 0.25 else source.good(choose)


async def client(server: Server, seed: int, outcome: Outcome, more: Callable[[], bool]) -> None:
    """Sends one request after the other while `more()`; opens new connections now and then."""
    choose = random.Random(seed)
    while more():
        async with _Connections(server) as connections:
            for _ in range(choose.randint(1, 500)):
                if not more():
                    break
                case = some(choose)
                try:
                    outcome.take(case, await connections.ask(case))
                    continue
                except _Lost as lost:
                    outcome.lost.append(str(lost))
                except _CutOff as cut_off:
                    number, said = cut_off.args
                    outcome.cut_off[number] = said
                except _Refused:
                    outcome.refused += 1
                await asyncio.sleep(_PAUSE)
                break
