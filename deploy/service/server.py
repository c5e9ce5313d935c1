"""KServe's server with our REST and gRPC fronts, ready when the models are, and an end that loses nothing."""

import asyncio
import gc
import logging
import os
import resource
import signal
from typing import Any

import uvloop

from twinop.deploy.service import spans
from twinop.deploy.service._kserve import ModelServer
from twinop.deploy.service.grpc_server import GrpcServer
from twinop.deploy.service.repository import Repository
from twinop.deploy.service.rest import RestServer
from twinop.deploy.service.settings import Control

_log = logging.getLogger(__name__)


class Server(ModelServer):
    """One process, one event loop: REST, gRPC and the models' queues; models run in worker threads."""

    def __init__(self, repository: Repository) -> None:
        self._settings = repository.settings.server
        self._repository = repository
        self._cut_off = False
        super().__init__(
            http_port=self._settings.http_port,
            grpc_port=self._settings.grpc_port or 0,
            registered_models=repository,
            enable_latency_logging=False,
        )

    def start(self, models: Any = ()) -> None:
        """Serves until SIGTERM or SIGINT, and ends the process when all that was accepted is answered.

        The exit code is 0, or 1 if the grace time was over before that.

        Raises:
            TwinopError: a port is in use, or a model cannot be loaded.
        """
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())
            # Threads may still load a model, or decode what nobody waits for: Python would wait for them.
            logging.shutdown()
            os._exit(1 if self._cut_off else 0)

    async def _serve(self) -> None:
        self.setup_event_loop()
        repository, loop = self._repository, asyncio.get_running_loop()
        stop = asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        fronts: list[Any] = [RestServer(self._settings, self.dataplane, repository)]
        if self._settings.grpc_port is not None:
            fronts.append(GrpcServer(self._settings, self.dataplane, repository))
        background: list[asyncio.Task[None]] = []
        try:
            for front in fronts:
                await front.start()  # live at once, ready when the models are
            asked = loop.create_task(stop.wait())
            loading = loop.create_task(repository.load_all())
            background.append(loading)
            await asyncio.wait((asked, loading), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                gc.collect()
                gc.freeze()  # a full collection walked all that was imported: p99 at 64 clients 90 ms, now 8
                ports = [front.port for front in fronts] + [None]
                _log.info("ready", extra={"http_port": ports[0], "grpc_port": ports[1]})
                if self._follows():
                    background.append(loop.create_task(repository.poll()))
                await asked
        finally:
            for task in background:
                task.cancel()
            await self._drain(fronts)

    def _follows(self) -> bool:
        return self._settings.control == Control.POLL and self._repository.root.is_dir()

    async def _drain(self, fronts: list[Any]) -> None:
        """Not ready any more; no new connections; what came in is answered within the grace time."""
        grace = self._settings.grace_seconds
        self._repository.draining = True
        _log.info("stopping: finishing what was accepted, for up to %g s", grace)
        try:
            async with asyncio.timeout(grace + 1):
                self._cut_off = not all(await asyncio.gather(*(front.drain(grace) for front in fronts)))
                await self._repository.close()
        except TimeoutError:
            self._cut_off = True
        if self._cut_off:
            _log.error("stopped with requests unanswered: grace_seconds (%g) were not enough", grace)
        spans.shutdown()  # here, for the threads of to_thread may all be busy
        _log.info("stopped")


def _raise_file_limit() -> None:
    """A connection is a file: as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
