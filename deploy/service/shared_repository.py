"""The repository of one process of several. What a client asks of one process, all of them do."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from twinop.errors import TwinopError

from . import metrics
from .errors import NOT_FOUND, NOT_READY, ServiceError
from .processes import Member, State
from .repository import Repository
from .repository import State as VersionState
from .settings import Control, Settings
from .siblings import Answer, Siblings

_WORDS = {State.ENDED: "has ended and is started anew", State.STARTING: "is starting"}


class SharedRepository(Repository):
    """Loads and unloads together with those of the other processes, and reports for all of them."""

    def __init__(self, root: Path, settings: Settings, member: Member) -> None:
        super().__init__(root, settings)
        self.member = member
        self._did_load = asyncio.Event()  # the first loads are done
        answers: dict[str, Answer] = {
            "index": super().index,
            "load": self._load_here,
            "unload": self._unload_here,
            "metrics": self._metrics_here,
        }
        self._siblings = Siblings(member, answers)

    # -------------------------------------------------------------------------------- asking

    def why_not_ready(self) -> str:
        """Return why the service is not ready; "" if all processes are."""
        board = self.member.board
        words = (_WORDS.get(board.state(number)) for number in range(board.count))
        said = [f"process {number} of {board.count} {word}" for number, word in enumerate(words) if word]
        return super().why_not_ready() or ", ".join(said)

    async def require_ready(self, name: str, version: int | None = None) -> None:
        """Check that all processes have a version of a model; the latest for None.

        A process that was ready and says nothing is stopped: it does not hold up those that answer.
        """
        await super().require_ready(name, version)
        version = version or max(self.models[name].versions)
        wanted = name, str(version)
        indexes = await self._of_all("index", await super().index())
        states = {
            number: each
            for number, index in indexes.items()
            for each in index
            if (each["name"], each["version"]) == wanted
        }
        for number in range(self.member.board.count):
            if number not in indexes and self.member.board.state(number) == State.READY:
                states[number] = states[self.member.number]
        found = self._merged(name, version, states)
        if found["state"] != VersionState.READY:
            raise ServiceError(NOT_READY, f"model {name} is not ready: {found['reason']}")

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        """Return every version of every model. It is READY if all processes have it."""
        indexes = await self._of_all("index", await super().index())
        found: dict[tuple[str, int], dict[int, dict[str, str]]] = {}
        for number, index in indexes.items():
            for each in index:
                found.setdefault((each["name"], int(each["version"])), {})[number] = each
        merged = [self._merged(*version, states) for version, states in sorted(found.items())]
        return [each for each in merged if each["state"] == VersionState.READY or not ready]

    def _merged(self, name: str, version: int, states: dict[int, dict[str, str]]) -> dict[str, str]:
        """Return a version's entry: that of the first process in which it is not ready, if there is one."""
        absent = {"state": VersionState.LOADING, "reason": "it has not loaded this version"}
        for number in range(self.member.board.count):
            found = states.get(number, absent)
            if found["state"] != VersionState.READY:
                reason = f"process {number}: {found['reason'] or 'it is loading'}"
                return {"name": name, "version": str(version), "state": found["state"], "reason": reason}
        return states[0]

    async def metrics(self) -> Collector:
        """Return the metrics of all processes, labelled with the process."""
        return metrics.Labelled("process", await self._of_all("metrics", metrics.snapshot()))

    async def _of_all(self, question: str, own: Any) -> dict[int, Any]:
        """Return the answers of all processes that run, in the order of their numbers."""
        return dict(sorted({self.member.number: own, **await self._siblings.ask(question)}.items()))

    async def _metrics_here(self) -> Any:
        return metrics.snapshot()

    # -------------------------------------------------------------------------------- loading

    async def load_all(self) -> None:
        """Load all models; after a new start what the other processes have, unless all follow the folder.

        Raises:
            TwinopError: models cannot be loaded, or the folder has no longer what the other processes have.
        """
        await self._siblings.listen()
        board = self.member.board
        others = {}
        follows = self.settings.server.control == Control.POLL
        if not follows and any(board.state(number) == State.READY for number in range(board.count)):
            others = await self._siblings.ask("index", True)
        if others:
            await self._load_those(
                {(each["name"], int(each["version"])) for index in others.values() for each in index}
            )
            self._loaded = True
        else:
            await super().load_all()
        self._did_load.set()

    async def _load_those(self, wanted: set[tuple[str, int]]) -> None:
        """Load these versions of models, whatever else the folder has by now."""
        folders = await self._scanned()
        for name, version in sorted(wanted):
            if name not in folders or version not in folders[name].versions:
                raise TwinopError(f"model {name} version {version} is served, but gone from {self.root}")
        for name in sorted({name for name, _ in wanted}):
            versions = {
                number: folder
                for number, folder in folders[name].versions.items()
                if (name, number) in wanted
            }
            if problems := await self._follow(replace(folders[name], versions=versions)):
                raise TwinopError("\n".join(problems))

    def announce(self, **ports: int | None) -> None:
        """Tell the supervisor, which says when all processes are ready."""
        self.member.ready()

    async def load_by_request(self, name: str) -> None:
        """Load a model for a client, here and then in the other processes."""
        await super().load_by_request(name)
        await self._siblings.ask("load", name)

    async def unload_by_request(self, name: str) -> None:
        self.require_explicit()
        was_here = await self._unload_here(name)
        elsewhere = await self._siblings.ask("unload", name)
        if not was_here and not any(elsewhere.values()):
            raise ServiceError(NOT_FOUND, f"there is no model {name!r} that is loaded")

    async def _load_here(self, name: str) -> None:
        await self._did_load.wait()
        await super().load_by_request(name)

    async def _unload_here(self, name: str) -> bool:
        """Unload a model in this process. Return whether there was one."""
        was_known = name in self._known
        await self._remove(name)
        return was_known
