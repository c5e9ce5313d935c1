"""Ask the other processes of a service, which answer over Unix sockets."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .errors import NOT_READY, ServiceError
from .newer_python import timeout
from .processes import Member, State

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
Answer = Callable[..., Awaitable[Any]]


class Siblings:
    """Sends a question with its arguments to all other processes, and answers theirs. Both are JSON."""

    def __init__(self, member: Member, answers: Mapping[str, Answer]) -> None:
        """`answers` has a function for each question. Its ServiceErrors are raised where it was asked."""
        self._member = member
        self._answers = answers

    async def listen(self) -> None:
        address = self._member.address(self._member.number)
        self._server = await asyncio.start_unix_server(self._answer, address)

    async def ask(self, question: str, *arguments: Any) -> dict[int, Any]:
        """Return the answers by process, without those of processes that do not run.

        Raises:
            ServiceError: a process could not do what was asked.
        """
        board = self._member.board
        others = [
            number
            for number in range(board.count)
            if number != self._member.number and board.state(number) != State.ENDED
        ]
        asked = [self._ask(number, question, arguments) for number in others]
        found = {}
        for number, answer in zip(others, await asyncio.gather(*asked), strict=True):
            if answer is None:
                continue
            if "error" in answer:
                raise ServiceError(NOT_READY, f"process {number}: {answer['error']}")
            found[number] = answer["answer"]
        return found

    async def _ask(self, number: int, question: str, arguments: tuple[Any, ...]) -> Any:
        """Return what a process answers; None if it does not run."""
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            try:
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, self._member.address(number))
                _require_own(connection)
                reader, writer = await asyncio.open_unix_connection(sock=connection)
                with contextlib.closing(writer):
                    writer.write(json.dumps([question, *arguments]).encode())
                    writer.write_eof()
                    async with timeout(ANSWER_SECONDS):  # one that is stopped accepts, and says nothing
                        await reader.readexactly(1)
                    return json.loads(await reader.read())
            except TimeoutError:
                return {"error": "it does not answer"} if question in ("load", "unload") else None
            except (OSError, EOFError, ValueError):  # it has ended
                return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):  # the other process has ended
            _require_own(writer.get_extra_info("socket"))
            question, *arguments = json.loads(await reader.read())
            writer.write(b" ")  # it was heard
            try:
                said = {"answer": await self._answers[question](*arguments)}
            except ServiceError as error:
                said = {"error": str(error)}
            except Exception:
                _log.exception("the question %r of another process has no answer", question)
                said = {"error": "internal error; its log says why"}
            writer.write(json.dumps(said).encode())
            await writer.drain()


def _require_own(connection: socket.socket) -> None:
    """Check that the process at the other end runs for the same user.

    Raises:
        PermissionError: it does not.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", peer)
    if user != os.geteuid():
        raise PermissionError(f"user {user} uses the address of a process of this service")
