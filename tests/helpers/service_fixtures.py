"""Start the real server in its own process on free ports of the loopback interface, with simple clients."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

READY_SECONDS = 120  # enough on a machine that is compiling
PROGRAM = ("-m", "twinop")


@dataclass
class Served:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int | None
    log_path: Path
    root: Path  # the folder of models, or the model file
    is_stopped: bool = False

    @property
    def log(self) -> list[dict[str, Any]]:
        """Its JSON log lines so far, without ONNX Runtime's lines."""
        return list(_log_lines(self.log_path))

    @property
    def files(self) -> int:
        """The number of its open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self, sign: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal and return the exit status."""
        self.is_stopped = True
        self.process.send_signal(sign)
        return self.process.wait(seconds)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        """Open a new connection for gRPC calls. By default gRPC uses one again that is being closed."""
        address, new = f"127.0.0.1:{self.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, new) as channel:
            yield GRPCInferenceServiceStub(channel)

    def connect(self, seconds: float = 60) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http_port), seconds)

    def ask(self, method: str, path: str, body: Any = None, headers: Any = None) -> "Answer":
        """Send an HTTP request on its own connection. `body` is sent as JSON unless it is bytes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        try:
            connection.request(method, path, content, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()

    def infer(self, model: str, *inputs: Any, **rest: Any) -> "Answer":
        """Send an inference request in JSON. `inputs` are made by `tensor`."""
        body = {"inputs": list(inputs), **rest}
        return self.ask("POST", f"/v2/models/{model}/infer", body, {"content-type": "application/json"})

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.ask("GET", "/metrics").content.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def versions(self) -> dict[tuple[str, int], tuple[str, str]]:
        """Return the state of each model's versions and the reason."""
        models = self.ask("POST", "/v2/repository/index").json
        return {(each["name"], int(each["version"])): (each["state"], each["reason"]) for each in models}

    def exchange(self, data: bytes, seconds: float = 60) -> bytes:
        """Send raw bytes and return what arrives until the server closes the connection."""
        with self.connect(seconds) as connection:
            connection.sendall(data)
            return receive_all(connection)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # by lower-case name
    content: bytes

    def __post_init__(self) -> None:
        self.headers = {name.lower(): value for name, value in self.headers.items()}

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> str:
        """The message of an answer that contains nothing else."""
        assert self.status >= 400 and list(self.json) == ["error"], self
        message: str = self.json["error"]
        for trace in ("Traceback", 'File "', ".py", "site-packages"):
            assert trace not in message
        return message


def receive_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def receive(connection: socket.socket) -> Answer:
    """Receive one answer with a content-length; the connection may carry more.

    Raises:
        ConnectionError: the connection was closed before the end.
    """
    data = b""
    while True:
        _, end, content = data.partition(b"\r\n\r\n")
        if end:
            answer = split(data)
            if len(content) >= int(answer.headers["content-length"]):
                return answer
        if not (part := connection.recv(1 << 16)):
            raise ConnectionError(f"closed after {data[:1000]!r}")
        data += part


def split(answer: bytes) -> Answer:
    """Parse a raw HTTP answer with a content-length."""
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]), headers, content)


def tensor(name: str, datatype: str, shape: list[int], data: list[Any], **rest: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **rest}


@contextmanager
def serve(
    models: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    seconds: float = READY_SECONDS,
    program: Sequence[str] = PROGRAM,
    cwd: Path | None = None,
    python: str | Path = sys.executable,
) -> Iterator[Served]:
    """Run `twinop serve models options` until the block ends; enter it once the server is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "log"
        process = start(models, log_path, *options, env=env, program=program, cwd=cwd, python=python)
        try:
            ready = _wait_until_ready(process, log_path, seconds)
            served = Served(process, ready["http_port"], ready["grpc_port"], log_path, models)
            yield served
            if not served.is_stopped and (status := process.poll()) is not None:
                raise AssertionError(f"the server ended by itself with {status}:\n{_tail(log_path)}")
        finally:
            process.kill()
            process.wait()


def start(
    models: Path,
    log_path: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
    cwd: Path | None = None,
    python: str | Path = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start the server's process, with its output in a file.

    Args:
        program: Python's arguments instead of `-m twinop`, for example to replace a part of twinop.
        python: the interpreter; its environment has the twinop that serves.
    """
    ports = ("--http-port", "0", "--grpc-port", "0")
    command = (str(python), *program, "serve", str(models), *ports, *options)
    with log_path.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, cwd=cwd)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so after {seconds:g} s"
        time.sleep(0.05)


def _wait_until_ready(process: subprocess.Popen[bytes], log_path: Path, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while True:
        ended = process.poll()
        for line in _log_lines(log_path):
            if line.get("message") == "ready":
                return line
        if ended is not None or time.monotonic() > end:
            said = f"ended with {ended}" if ended is not None else f"not ready after {seconds:g} s"
            raise AssertionError(f"the server is {said}:\n{_tail(log_path)}")
        time.sleep(0.02)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-8000:]


def _log_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        if line.startswith(b"{") and line.endswith(b"}"):
            yield json.loads(line)
