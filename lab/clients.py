"""The clients of the soak, which send one request after another over HTTP and gRPC and check the answers."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import grpc

from .mixed import Answer, Case, Wrong, some
from .servers import GRPC, REST, Server

# A pool of its own gives each client its own connection. Each call is one attempt: after a server has ended,
# gRPC 1.85 may retry a call forever without a pause, in the event loop's thread, and take 200 MB per second.
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_SECONDS = 60.0  # an answer that takes longer is lost
_PAUSE = 0.02  # before a new connection to a server that is ending or gone
_NO_ANSWERS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "CANCELLED")  # if gRPC reports it itself


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


async def _post(session: aiohttp.ClientSession, case: Case, outcome: Outcome) -> bool:
    """Sends one request over HTTP. Returns whether there is an answer."""
    try:
        async with session.post(case.target, data=case.body, headers=case.headers) as answer:
            body = await answer.read()
    except aiohttp.ClientConnectorError:  # nobody listens
        outcome.refused += 1
        return False
    except (aiohttp.ClientError, OSError) as error:
        outcome.lost.append(f"{REST}: {error!r}")
        return False
    outcome.take(case, Answer(answer.status, answer.headers, body))
    return True


async def _call(channel: grpc.aio.Channel, case: Case, outcome: Outcome) -> bool:
    """Makes one gRPC call. Returns whether there is an answer."""
    number = uuid.uuid4().hex
    metadata = (("x-request-id", number),)
    try:
        body = await channel.unary_unary(case.target)(case.body, timeout=_SECONDS, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        code, details = error.code().name, error.details() or ""
        is_servers = "x-request-id" in dict(error.trailing_metadata() or ())
        stopping, gone = "server is stopping" in details, details.startswith("failed to connect")
        if stopping if is_servers else gone:
            outcome.refused += 1
            return False
        if code in _NO_ANSWERS and not is_servers:
            outcome.cut_off[number] = f"{GRPC}: {code}: {details}"
            return False
        outcome.take(case, Answer(code, {}, details.encode()))
        return True
    outcome.take(case, Answer("OK", {}, body))
    return True


async def client(server: Server, seed: int, outcome: Outcome, more: Callable[[], bool]) -> None:
    """Sends one request after another while `more()`. Opens new connections after at most 500 requests."""
    choose = random.Random(seed)
    address = f"http://127.0.0.1:{server.ports[REST]}"
    limit = aiohttp.ClientTimeout(total=_SECONDS)
    while more():
        async with (
            aiohttp.ClientSession(address, timeout=limit) as session,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.ports[GRPC]}", _CHANNEL) as channel,
        ):
            for _ in range(choose.randint(1, 500)):
                if not more():
                    break
                case = some(choose)
                sent = (
                    _call(channel, case, outcome) if case.protocol == GRPC else _post(session, case, outcome)
                )
                if not await sent:
                    await asyncio.sleep(_PAUSE)
                    break
