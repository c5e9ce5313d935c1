"""Run the REST and gRPC servers in one process, from loading the models to a shutdown without loss."""

import asyncio
import gc
import logging
import os
import resource
import signal
from typing import Any

import uvloop

from .grpc_server import GrpcServer
from .newer_python import Runner, timeout
from .operations import Token
from .repository import Repository
from .request import Budget
from .rest import RestServer

_log = logging.getLogger(__name__)
_BROKEN = 70  # the exit code, EX_SOFTWARE


class Server:
    """One event loop for REST, gRPC and the models' queues. The models run in worker threads."""

    def __init__(self, repository: Repository) -> None:
        self._settings = repository.settings.server
        self._repository = repository
        self._cut_off = False

    def start(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, answer all accepted requests, and end the process.

        The exit code is 0; 1 if the grace time did not suffice; 70 if nothing more could be run in this
        process, because of the GPU or a run that did not end.
        """
        _raise_file_limit()
        with Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())
            # Python would wait for threads that still load a model or decode an abandoned request.
            logging.shutdown()
            os._exit(_BROKEN if self._repository.broken else 1 if self._cut_off else 0)

    async def _serve(self) -> None:
        repository, loop = self._repository, asyncio.get_running_loop()
        stop = asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if sign != signal.SIGHUP or signal.getsignal(sign) == signal.SIG_DFL:  # nohup ignores it
                loop.add_signal_handler(sign, stop.set)
        repository.on_broken = stop.set
        settings = self._settings
        budget, token = Budget(settings.max_bytes_in_flight), Token(settings)
        servers: list[Any] = [RestServer(repository, budget, token)]
        if settings.grpc_port is not None:
            servers.append(GrpcServer(repository, budget, token))
        background: list[asyncio.Task[None]] = []
        try:
            for server in servers:  # live at once, ready once the models are loaded
                await server.start()
            asked = loop.create_task(stop.wait())
            loading = loop.create_task(repository.load_all())
            background.append(loading)
            if settings.poll_seconds:
                background.append(loop.create_task(repository.poll()))
            await asyncio.wait((asked, loading), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                gc.collect()
                gc.freeze()  # full collections skip all that is imported by now
                gc.enable()  # off since the start
                ports = {name: port for server in servers for name, port in server.ports.items()}
                _log.info("ready", extra={"grpc_port": None} | ports)
                if not settings.poll_seconds:
                    _log.info("changes in %s are not watched: --poll-seconds does so", repository.root)
                await asked
        finally:
            for task in background:
                task.cancel()
            await self._drain(servers)

    async def _drain(self, servers: list[Any]) -> None:
        """Stop accepting connections, and answer all accepted requests within the grace time."""
        grace = self._settings.grace_seconds
        self._repository.draining = True
        _log.info("stopping: finishing what was accepted, for up to %g s", grace)
        try:
            async with timeout(grace + 1):
                self._cut_off = not all(await asyncio.gather(*(server.drain(grace) for server in servers)))
                if not self._repository.broken:  # then the sessions cannot be freed
                    await self._repository.close()
        except TimeoutError:
            self._cut_off = True
        if self._cut_off:
            _log.error("stopped with requests unanswered: grace_seconds (%g) were not enough", grace)
        _log.info("stopped")


def _raise_file_limit() -> None:
    """Allow as many open files, and so connections, as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
