"""The clients of the soak, which send one request after another over HTTP and gRPC and check the answers."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from .mixed import Answer, Case, Wrong, read_answer, some
from .servers import GRPC, REST, Server

# A pool of its own gives each client its own connection. Each call is one attempt: after a server has ended,
# gRPC 1.85 may retry a call forever without a pause, in the event loop's thread, and take 200 MB per second.
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_SECONDS = 60.0  # an answer that takes longer is lost
_PAUSE = 0.02  # before a new connection to a server that is ending or gone
_NO_ANSWERS = (
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNKNOWN",
    "CANCELLED",
)  # if gRPC reports it, not the server


@dataclass
class Outcome:
    """The results of the requests.

    Attributes:
        answered: the number of answers by (protocol, kind).
        wrong: what was wrong about wrong answers.
        lost: the requests whose connection closed without an answer.
        cut_off: the same for gRPC calls, by id. gRPC does not tell whether they reached the server.
        refused: connections to a server that is gone, and calls that a stopping server rejected.
        versions: the number of answers of each version of the model.
        samples: at intervals, the seconds since the start, the server's RSS in MiB and its open files.
        swapped: the valid versions that were added.
        broken: the corrupt versions that were added, with their state in the server's index.
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
    """Nobody listens, or the server is stopping, and did not accept the request."""


class _Lost(Exception):
    """The request was sent, but no answer came."""


class _CutOff(Exception):
    """The gRPC call with this id got no answer. The server's log tells whether the server had accepted it."""


class _Connections:
    """One client's connections, one for each protocol, opened on demand."""

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
        """Sends one request and returns the answer.

        Raises:
            _Refused, _Lost, _CutOff: there is no answer.
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
                answer = await read_answer(reader)
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
    """Whether nobody listens, or the server said that it is stopping."""
    return "server is stopping" in details if is_servers else details.startswith("failed to connect")


async def client(server: Server, seed: int, outcome: Outcome, more: Callable[[], bool]) -> None:
    """Sends one request after another while `more()`. Opens new connections after at most 500 requests."""
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
