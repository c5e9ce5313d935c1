"""Load models at the start, follow changes on disk, and swap versions without a gap."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from twinop.errors import TwinopError

from ..errors import FeedError
from . import metrics
from .batching import Batcher
from .errors import NOT_FOUND, NOT_READY, ServiceError, invalid
from .folders import ModelFolder, Stamp, scan
from .instance import LoadedModel, without_paths
from .loading import load
from .request import MOST_TENSORS, Request
from .settings import ModelSettings, Settings

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0  # with one model, before the next one is looked at
_LOADS = 64  # at once, of models that take longer than that


class ServedVersion:
    """A loaded version with its queue and its metrics."""

    def __init__(self, loaded: LoadedModel, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is told why this process cannot run models any more."""
        self.loaded = loaded
        self.batcher = Batcher(loaded)
        self.batcher.on_broken = on_broken
        self.most_tensors = max(MOST_TENSORS, len(loaded.session.inputs), len(loaded.session.outputs))
        self.metrics = metrics.ModelMetrics(loaded.name, loaded.version, self.batcher, loaded.session.device)

    def check(self, request: Request) -> tuple[str, ...]:
        """Check a request, and return its outputs' names; raise ServiceError if it does not fit."""
        settings, inputs = self.loaded.settings, request.inputs
        try:
            outputs = self.loaded.session.check(inputs, request.outputs)
        except FeedError as error:
            raise invalid(str(error)) from error
        if not settings.allow_empty:
            for name, array in inputs.items():
                if array.size == 0:
                    raise invalid(
                        f"input {name} is empty: its shape is {list(array.shape)}. Send at least one "
                        "element, or set allow_empty for this model if it is made for empty inputs"
                    )
        if settings.max_batch_size and inputs:
            self._check_batch(request)
        return tuple(outputs)

    async def close(self) -> None:
        """Answer all accepted requests, then release the sessions."""
        await self.batcher.drain()
        while self.metrics.in_flight:  # answered, but not counted yet
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.loaded.close)  # freeing a session takes long
        self.metrics.drop()

    def _check_batch(self, request: Request) -> None:
        if scalars := [name for name, array in request.inputs.items() if not array.ndim]:
            raise invalid(f"input {scalars[0]} is a scalar; a batched model takes rows")
        sizes = {name: array.shape[0] for name, array in request.inputs.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise invalid(f"all inputs of a batched model need the same number of rows: {listed}")
        limit = self.loaded.settings.max_batch_size
        if (rows := next(iter(sizes.values()))) > limit:
            name = self.loaded.name
            raise invalid(f"{rows} rows in one request; model {name} takes up to {limit}: split it")


@dataclass
class _Known:
    """The last attempt to load a version: the stamp of its files, and the outcome."""

    stamp: Any
    state: Literal["LOADING", "READY", "UNAVAILABLE"]  # as the repository extension names it
    reason: str = ""


class Repository:
    """All models, for the event loop's thread; they are loaded in other threads while serving goes on."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root = root.absolute()
        self.settings = settings
        self.draining = False
        self.broken = ""  # why nothing more can be run in this process
        self.on_broken: Callable[[], None] = lambda: None
        self.models: dict[str, dict[int, ServedVersion]] = {}
        self._known: dict[str, dict[int, _Known]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._following: dict[str, asyncio.Task[list[str]]] = {}  # by model
        self._followed: dict[str, dict[int, Stamp]] = {}  # by model, its files when it was last followed
        self._pool = ThreadPoolExecutor(_LOADS, "load")  # a load that hangs takes no thread from requests
        self._began = asyncio.Event()  # the first load of each model has begun
        self._loaded = False

    # -------------------------------------------------------------------------------- asking

    def why_not_ready(self) -> str:
        """Return why the server is not ready; "" if all initial models are loaded and it is not stopping."""
        return "it is stopping" if self.draining else "" if self._loaded else "its models are loading"

    def unavailable(self) -> list[str]:
        """Return the models of which no version could be loaded."""
        tried = {name: {each.state for each in known.values()} for name, known in self._known.items()}
        return sorted(name for name, states in tried.items() if states == {"UNAVAILABLE"})

    def find(self, name: str, version: int | None = None) -> ServedVersion:
        """Return a version of a model, the latest for None; raise ServiceError if it is not ready."""
        versions = self.models.get(name)
        if not versions:
            if name in self._known:
                raise ServiceError(NOT_READY, f"model {name} is not ready")
            known = ", ".join(sorted(self.models)) or "none"
            raise ServiceError(NOT_FOUND, f"there is no model {name!r}; models: {known}")
        found = versions.get(max(versions) if version is None else version)
        if found is None:
            known = ", ".join(map(str, sorted(versions)))
            raise ServiceError(NOT_FOUND, f"model {name} has no version {version}; it has: {known}")
        return found

    def mark_fatal(self, why: str) -> None:
        """Note why nothing more can be run in this process: the server is no longer live, and ends."""
        if not self.broken:
            self.broken = why
            _log.critical("the server stops and must be restarted: %s", why)
            self.on_broken()

    def index(self) -> list[dict[str, str]]:
        """Return every version of every model with its state, as the repository extension lists them."""
        return [
            {"name": name, "version": str(version), "state": known.state, "reason": known.reason}
            for name, versions in sorted(self._known.items())
            for version, known in sorted(versions.items())
        ]

    # -------------------------------------------------------------------------------- loading

    async def load_all(self) -> None:
        """Load all models. If a wanted version is broken, an older one is loaded instead.

        TwinopError: no model can be loaded, or there are settings for one that cannot appear later.
        """
        folders = await self._scan()
        problems = []
        for name in self.settings.models.keys() - folders.keys():
            said = f"there are settings [models.{name}], but no model {name!r}; models: {', '.join(folders)}"
            if not self.settings.server.poll_seconds or self.root.is_file():
                problems.append(said)
            else:
                _log.warning("%s", said)
        tasks = await self._in_turn(folders.values())
        self._began.set()
        failed = []
        for name, found in zip(folders, await asyncio.gather(*tasks), strict=True):
            failed += found if not self.models.get(name) else []
        if problems or (failed and not any(self.models.values())):
            raise TwinopError("\n".join(problems + failed))
        if failed:
            _log.error("served without %s, which cannot be loaded", ", ".join(self.unavailable()))
        self._loaded = True

    async def _in_turn(self, folders: Iterable[ModelFolder]) -> list[asyncio.Task[list[str]]]:
        """Follow models one after the other. One that takes long goes on while others are followed."""
        tasks = []
        for folder in folders:
            if folder.name not in self._following:
                task = asyncio.ensure_future(self._guarded(folder))
                self._following[folder.name] = task
                tasks.append(task)
                await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
        return tasks

    async def _guarded(self, folder: ModelFolder) -> list[str]:
        """Follow a model. A bug in that does not concern the others."""
        try:
            return await self._follow(folder)
        except Exception as error:
            _log.exception("model %s cannot be followed", folder.name)
            return [f"model {folder.name} cannot be followed: {error!r}"]
        finally:
            del self._following[folder.name]

    async def poll(self) -> None:
        """Follow models whose files stopped changing, remove those that two scans miss, until cancelled."""
        await self._began.wait()
        before: dict[str, ModelFolder] = {}
        missing: set[str] = set()
        said = ""
        while True:
            await asyncio.sleep(self.settings.server.poll_seconds)
            try:
                folders = await self._scan()
            except Exception as error:  # such as a missing folder: go on serving, and following
                if said != (said := repr(error)):
                    _log.warning("%s", error, exc_info=not isinstance(error, TwinopError))
                continue
            said = ""
            known = [folder for name, folder in folders.items() if name in before]
            whole = [each for each in known if each.stamps == before[each.name].stamps]
            await self._in_turn([each for each in whole if each.stamps != self._followed.get(each.name)])
            gone = self._known.keys() - folders.keys()
            for name in (gone & missing) - self._following.keys():
                for number in list(self._known[name]):
                    self._retire(name, number)
                for of_models in (self._known, self._followed, self.models):
                    of_models.pop(name, None)
            before, missing = folders, gone

    async def _scan(self) -> dict[str, ModelFolder]:
        libraries = self.settings.server.library_folders
        return await asyncio.to_thread(scan, self.root, libraries)

    async def _follow(self, folder: ModelFolder) -> list[str]:
        """Bring one model in line with its folder, and return the problems as messages.

        A new version takes over once it is loaded and warm. If it cannot be loaded, the old one stays; if
        there is none, the newest of the other versions that loads is served.
        """
        known = self._known.setdefault(folder.name, {})
        self._followed[folder.name] = folder.stamps
        try:
            settings = await asyncio.to_thread(folder.settings, self.settings)
            wanted = folder.wanted(settings.versions)
        except TwinopError as error:
            self._refuse(folder, error)
            return [str(error)]
        problems: list[str] = []
        for version in sorted(wanted, reverse=True):
            problems += await self._load_if_new(folder, version, settings)
        if all(known[version].state == "READY" for version in wanted):  # otherwise the old ones stay
            for version in known.keys() - wanted.keys():
                self._retire(folder.name, version)
        for version in sorted(folder.versions.keys() - wanted.keys(), reverse=True):
            if not self.models.get(folder.name):
                await self._load_if_new(folder, version, settings)
                if self.models.get(folder.name):
                    _log.warning("model %s: version %d is served instead", folder.name, version)
        return problems

    async def _load_if_new(self, folder: ModelFolder, version: int, settings: ModelSettings) -> list[str]:
        """Load a version, unless it was tried with the same files, and let it take over. Return problems."""
        where, stamp, known = folder.versions[version], folder.stamps[version], self._known[folder.name]
        if (last := known.get(version)) is not None and last.stamp == stamp:
            if last.state == "READY":  # the settings fit, if they have not before
                known[version] = replace(last, reason="")
            return []
        known[version] = _Known(stamp, "LOADING")
        try:
            pool, server = self._pool, self.settings.server
            loaded = await asyncio.get_running_loop().run_in_executor(pool, load, where, settings, server)
            new = ServedVersion(loaded, self.mark_fatal)
        except TwinopError as error:
            metrics.loaded(False)
            _log.error("model %s version %d cannot be loaded: %s", where.model, where.version, error)
            known[version] = _Known(stamp, "UNAVAILABLE", self._for_clients(error))
            return [str(error)]
        metrics.loaded(True)
        known[version] = _Known(stamp, "READY")
        versions = self.models.setdefault(where.model, {})
        old = versions.get(where.version)
        versions[where.version] = new
        seconds = loaded.load_seconds
        _log.info("model %s version %d is ready after %.2f s", where.model, where.version, seconds)
        if old is not None:
            self._close(old)
        return []

    def _refuse(self, folder: ModelFolder, error: TwinopError) -> None:
        """Report settings that do not fit."""
        known, reason = self._known[folder.name], self._for_clients(error)
        _log.error("model %s: %s", folder.name, error)
        for version, stamp in folder.stamps.items():
            known[version] = replace(known.get(version, _Known(stamp, "UNAVAILABLE")), reason=reason)

    def _for_clients(self, error: TwinopError) -> str:
        return without_paths(str(error).replace(f"{self.root}/", ""))

    def _retire(self, name: str, number: int) -> None:
        self._known[name].pop(number, None)
        version = self.models.get(name, {}).pop(number, None)
        if version is not None:
            _log.info("model %s version %d is no longer served", name, number)
            self._close(version)

    def _close(self, version: ServedVersion) -> None:
        task = asyncio.get_running_loop().create_task(version.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Answer all accepted requests, then release all models."""
        for task in self._following.values():
            task.cancel()
        versions = [version for model in self.models.values() for version in model.values()]
        await asyncio.gather(*(version.close() for version in versions), *self._closing)
