"""The inference service under mixed load while versions of its model change, and at SIGTERM.

python lab/soak.py --requests 20000 --seconds 30 --swap-seconds 5 --ends 2
"""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import grpc
import numpy as np
import onnx.parser
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.servers import GRPC, METHOD, REST, Server, started
from twinop.bench.measurements import Measurements, Output
from twinop.cli.console import clear_errors
from twinop.deploy.service.protocol import pb
from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION
from twinop.system import python_child

NAME = "soak"  # the model
CLIENTS = 32
_BROKEN_EACH = 4  # every fourth version is corrupt
_SECONDS = 60.0  # an answer that takes longer is lost

# ------------------------------------------------------------------------------------------- requests


class Wrong(Exception):
    """An answer is not the expected one."""


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        target: HTTP's path or gRPC's method.
        check: takes the status, the headers and the body of the answer, and returns the version that
            answered, or None for a refusal. It raises Wrong.
    """

    kind: str
    protocol: str
    target: str
    body: bytes
    check: Callable[[Any, Mapping[str, str], bytes], int | None]
    headers: Mapping[str, str] = field(default_factory=dict)


def some(choose: random.Random) -> Request:
    """Chooses a request: a third over gRPC, a quarter invalid."""
    over_grpc = choose.random() < 1 / 3
    if choose.random() < 0.25:
        return choose.choice(GRPC_BAD if over_grpc else REST_BAD)
    x = np.random.default_rng(choose.getrandbits(32)).standard_normal((choose.randint(1, 4), 8), np.float32)
    return (_over_grpc if over_grpc else _over_rest)(x, choose.random() < 0.3)


def _version(y: np.ndarray, x: np.ndarray, version: int) -> int:
    """Returns the version that answered. Raises Wrong if y differs in any bit from its output."""
    if not np.array_equal(y.reshape(x.shape), np.maximum(x, 0) + np.float32(version)):
        raise Wrong(f"version {version} gave {y.tolist()} for {x.tolist()}")
    return version


def _require(found: Any, status: Any, body: bytes, words: str = "") -> None:
    if found != status or words not in body.decode(errors="replace") or b"Traceback" in body:
        raise Wrong(f"expected {status} and {words!r}, not {found}: {body[:200]!r}")


def _bad(
    kind: str, protocol: str, status: Any, words: str, target: str, body: bytes, **headers: str
) -> Request:
    def check(found: Any, _: Mapping[str, str], said: bytes) -> None:
        _require(found, status, said, words)

    return Request(kind, protocol, target, body, check, headers)


_INVALID = "INVALID_ARGUMENT"
_INFER, _LENGTH = f"/v2/models/{NAME}/infer", "Inference-Header-Content-Length"


def _over_rest(x: np.ndarray, as_json: bool) -> Request:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}

    def check(status: Any, headers: Mapping[str, str], body: bytes) -> int:
        _require(status, 200, body)
        length = int(headers.get(_LENGTH, len(body)))
        content = json.loads(body[:length])
        data = content["outputs"][0].get("data")
        y = np.frombuffer(body[length:], np.float32) if data is None else np.array(data, np.float32)
        return _version(y, x, int(content["model_version"]))

    if as_json:
        whole = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]})
        return Request("JSON", REST, _INFER, whole.encode(), check)
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return Request("binary", REST, _INFER, head + x.tobytes(), check, {_LENGTH: str(len(head))})


def _bad_json(kind: str, words: str, **tensor: Any) -> Request:
    whole = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} | tensor
    return _bad(kind, REST, 400, words, _INFER, json.dumps({"inputs": [whole]}).encode())


REST_BAD = (
    _bad_json("wrong name", "has no input", name="z"),
    _bad_json("wrong dtype", "convert it to FP32", datatype="INT32", data=[1] * 8),
    _bad_json("wrong size", "dimension 1 must be 8", shape=[1, 7], data=[1.0] * 7),
    _bad_json("NaN", "", data=[float("nan")] * 8),
    _bad("no model", REST, 404, "there is no model", "/v2/models/none/infer", b'{"inputs": []}'),
    _bad("no JSON", REST, 400, "JSON", _INFER, b'{"inputs": ['),
    _bad("content encoding", REST, 415, "content encoding", _INFER, b"{}", **{"Content-Encoding": "br"}),
)


def _over_grpc(x: np.ndarray, typed: bool) -> Request:
    message = pb.ModelInferRequest(model_name=NAME)
    tensor = message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    if typed:
        tensor.contents.fp32_contents.extend(x.ravel().tolist())
    else:
        message.raw_input_contents.append(x.tobytes())

    def check(status: Any, _: Mapping[str, str], body: bytes) -> int:
        _require(status, "OK", body)
        found = pb.ModelInferResponse.FromString(body)
        values = found.outputs[0].contents.fp32_contents
        y = np.array(values, np.float32) if typed else np.frombuffer(found.raw_output_contents[0], np.float32)
        return _version(y, x, int(found.model_version))

    return Request("typed" if typed else "raw", GRPC, METHOD, message.SerializeToString(), check)


def _bad_grpc(kind: str, words: str, code: str = _INVALID, size: int = 32, **fields: Any) -> Request:
    """Returns a row of zeros with some `fields` changed: those of the tensor, or else of the message."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 8]}
    tensor |= {name: fields.pop(name) for name in tensor if name in fields}
    message = {"model_name": NAME, "inputs": [tensor], "raw_input_contents": [bytes(size)]} | fields
    return _bad(kind, GRPC, code, words, METHOD, pb.ModelInferRequest(**message).SerializeToString())


_LOAD = f"{METHOD.rpartition('/')[0]}/RepositoryModelLoad"
GRPC_BAD = (
    _bad_grpc("wrong name", "has no input", name="z"),
    _bad_grpc("wrong dtype", "convert it to FP32", datatype="INT32"),
    _bad_grpc("wrong size", "dimension 1 must be 8", size=28, shape=[1, 7]),
    _bad_grpc("no model", "there is no model", "NOT_FOUND", model_name="none"),
    _bad_grpc("no version", "no version", "NOT_FOUND", model_version="999999"),
    _bad("no message", GRPC, _INVALID, "not a protobuf message", METHOD, b"\xff" * 40),
    _bad("load by request", GRPC, "PERMISSION_DENIED", "--control", _LOAD, b"\x12\x04soak"),
)

# ------------------------------------------------------------------------------------------- clients

# A pool of its own gives each client its own connection. Each call is one attempt: after a server has ended,
# gRPC 1.85 may retry a call forever without a pause, in the event loop's thread, and take 200 MB per second.
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_NO_ANSWERS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "CANCELLED")  # if gRPC reports it itself


@dataclass
class Outcome:
    """The results of the requests.

    Attributes:
        answered: the number of answers by (protocol, kind).
        lost: the requests whose connection closed without an answer.
        cut_off: the same for gRPC calls, by id. gRPC does not tell whether they reached the server.
        refused: connections to a server that is gone, and calls that a stopping server rejected.
        versions: the number of answers of each version of the model.
        samples: at intervals, the server's RSS in MiB and its open files.
        swapped: the valid versions that were added.
        broken: the corrupt versions that were added, with their state in the server's index.
    """

    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut_off: dict[str, str] = field(default_factory=dict)
    refused: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    samples: list[tuple[float, int]] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.answered.total() + len(self.lost) + len(self.cut_off)

    def take(self, request: Request, status: Any, headers: Mapping[str, str], body: bytes) -> bool:
        self.answered[request.protocol, request.kind] += 1
        try:
            version = request.check(status, headers, body)
            self.versions.update([version] if version is not None else [])
        except Wrong as wrong:
            self.wrong.append(f"{request.protocol}, {request.kind}: {wrong}")
        return True


async def _post(session: aiohttp.ClientSession, request: Request, outcome: Outcome) -> bool:
    """Sends one request over HTTP. Returns whether there is an answer."""
    try:
        async with session.post(request.target, data=request.body, headers=request.headers) as answer:
            body = await answer.read()
    except aiohttp.ClientConnectorError:  # nobody listens
        outcome.refused += 1
        return False
    except (aiohttp.ClientError, OSError) as error:
        outcome.lost.append(f"{REST}: {error!r}")
        return False
    return outcome.take(request, answer.status, answer.headers, body)


async def _call(channel: grpc.aio.Channel, request: Request, outcome: Outcome) -> bool:
    """Makes one gRPC call. Returns whether there is an answer."""
    number = uuid.uuid4().hex
    call = channel.unary_unary(request.target)
    try:
        body = await call(request.body, timeout=_SECONDS, metadata=(("x-request-id", number),))
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
        return outcome.take(request, code, {}, details.encode())
    return outcome.take(request, "OK", {}, body)


async def client(server: Server, seed: int, outcome: Outcome, more: Callable[[], bool]) -> None:
    """Sends one request after another while `more()`. Opens new connections after at most 500 requests."""
    choose, limit = random.Random(seed), aiohttp.ClientTimeout(total=_SECONDS)
    address, channel_address = (f"127.0.0.1:{server.ports[each]}" for each in (REST, GRPC))
    while more():
        async with (
            aiohttp.ClientSession(f"http://{address}", timeout=limit) as session,
            grpc.aio.insecure_channel(channel_address, _CHANNEL) as channel,
        ):
            for _ in range(choose.randint(1, 500)):
                request = some(choose)
                over_grpc = request.protocol == GRPC
                sent = _call(channel, request, outcome) if over_grpc else _post(session, request, outcome)
                if not await sent:
                    await asyncio.sleep(0.02)  # before a new connection to a server that is ending or gone
                    break
                if not more():
                    break


# ------------------------------------------------------------------------------------------- the server


def write_version(folder: Path, version: int, broken: bool = False) -> None:
    """Adds y = CustomRelu(x) + version, so that an answer shows which version made it.

    It does so as a copy over the network does: first the folder, then the file in pieces.
    """
    head = f'<ir_version: 10, opset_import: ["" : 20, "{DOMAIN}" : {DOMAIN_VERSION}]> model'
    nodes = f"v = Constant<value_float = {version}.0>() r = {DOMAIN}.CustomRelu(x) y = Add(r, v)"
    model = onnx.parser.parse_model(f"{head} (float[n, 8] x) => (float[n, 8] y) {{ {nodes} }}")
    data = model.SerializeToString()
    target = folder / NAME / str(version)
    target.mkdir(parents=True)
    with (target / "model.onnx").open("wb") as file:
        file.write(data[:20])
        file.flush()
        time.sleep(0.05)
        file.write(data[20 : len(data) // 2 if broken else None])


def service(
    models: Path, log: Path, *more: str
) -> AbstractContextManager[tuple[Server, subprocess.Popen[bytes]]]:
    """Starts the service on a folder of models. Yields it and its process when the soak's model is ready."""
    options = ["--provider", "cpu", "--control", "poll", "--max-batch-size", "32", "--log-level", "warning"]
    return started("twinop", python_child.module("twinop", "serve", str(models), *options, *more), NAME, log)


async def _watch(pid: int, outcome: Outcome) -> None:
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = len(os.listdir(f"/proc/{pid}/fd"))
        outcome.samples.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files))
        await asyncio.sleep(0.5)


def _state(server: Server, version: int) -> str:
    """Returns the state of a version, or "" if there is no such version."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[REST]}/status", timeout=30) as answer:
        models = json.load(answer)["models"]
    return {(each["name"], each["version"]): each["state"] for each in models}.get((NAME, str(version)), "")


async def _swap(server: Server, models: Path, every: float, outcome: Outcome) -> None:
    """Adds a version every `every` seconds, and half of that later removes the old or a corrupt one."""
    version, served = 1, 1
    await asyncio.sleep(every)
    while True:
        version += 1
        broken = version % _BROKEN_EACH == 0
        await asyncio.to_thread(write_version, models, version, broken)
        await asyncio.sleep(every / 2)  # the previous version serves until the new one does
        end = time.monotonic() + 30
        while (state := await asyncio.to_thread(_state, server, version)) not in ("ready", "unavailable"):
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.05)
        if broken:
            outcome.broken[version], gone = state, version
        else:
            gone, served = served, version
        shutil.rmtree(models / NAME / str(gone))
        await asyncio.sleep(every / 2)
        if not broken:
            outcome.swapped.append(version)  # it had this time to answer


async def soak(
    server: Server, pid: int, models: Path, requests: int, every: float, *, seconds: float = 0.0
) -> Outcome:
    """Sends at least so many requests for so many seconds, with a new version each `every` seconds."""
    outcome, began = Outcome(), time.monotonic()

    def more() -> bool:
        return outcome.requests < requests or time.monotonic() < began + seconds

    beside = [
        asyncio.create_task(each) for each in (_watch(pid, outcome), _swap(server, models, every, outcome))
    ]
    await asyncio.gather(*(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    for task in beside:
        if task.done():
            task.result()  # raises the task's error
        task.cancel()
    outcome.lost += outcome.cut_off.values()  # the server was there all the time
    return outcome


async def ended_under_load(
    server: Server, running: subprocess.Popen[bytes], log: Path, seconds: float
) -> Outcome:
    """Sends SIGTERM while all clients are sending. They go on until the process has ended.

    A gRPC call that was cut off is lost if the server's log, at level debug, says that it was accepted.
    """
    outcome, end = Outcome(), time.monotonic() + seconds + 60

    async def send_signal() -> None:
        await asyncio.sleep(seconds)
        running.send_signal(signal.SIGTERM)

    def more() -> bool:
        return running.poll() is None and time.monotonic() < end

    await asyncio.gather(send_signal(), *(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    await asyncio.to_thread(running.wait, 40)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    accepted = {line["request_id"] for line in lines if line["message"] == "accepted"}
    if not accepted:
        raise RuntimeError(f"{log}: the server, at --log-level debug, lists no call that it accepted")
    outcome.lost += [f"{said}: accepted" for number, said in outcome.cut_off.items() if number in accepted]
    return outcome


def main(
    requests: Annotated[int, typer.Option(help="Least number of requests of the soak.")] = 200_000,
    seconds: Annotated[float, typer.Option(help="Least duration of the soak.")] = 70.0,
    swap_seconds: Annotated[float, typer.Option(help="Seconds from one version to the next.")] = 10.0,
    ends: Annotated[int, typer.Option(help="How often SIGTERM is sent under load.")] = 20,
    output: Output = None,
) -> None:
    """Soak the service: 32 clients send valid and invalid requests while versions change, then SIGTERM.

    Every answer is checked, each bit of a tensor and the status and message of a refusal; it counts what was
    lost or wrong, and what memory and open files grew by.
    """
    with clear_errors(), tempfile.TemporaryDirectory() as work:
        measured = Measurements("soak", torch.device("cpu"), output)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC reports each server that went away
        models, log = Path(work) / "models", Path(work) / "log"
        write_version(models, 1)
        with service(models, log) as (server, running):
            outcome = asyncio.run(soak(server, running.pid, models, requests, swap_seconds, seconds=seconds))
        finished = []
        for _ in range(ends):
            with service(models, log, "--log-level", "debug") as (server, running):
                ended = asyncio.run(ended_under_load(server, running, log, 0.5))
            finished.append((ended, running.returncode))
        fifth = len(outcome.samples) // 5
        early, late = (
            [*map(median, zip(*part, strict=True))]
            for part in (outcome.samples[fifth : 2 * fifth], outcome.samples[4 * fifth :])
        )
        found = {
            "requests sent": outcome.requests,
            "requests lost": len(outcome.lost),
            "wrong answers": len(outcome.wrong),
            "connections or calls refused": outcome.refused,
            "new versions that never answered": len(set(outcome.swapped) - outcome.versions.keys()),
            "broken versions not refused": sum(s != "unavailable" for s in outcome.broken.values()),
            "answers of a broken version": sum(outcome.versions[v] for v in outcome.broken),
            "growth of resident memory": round(late[0] / early[0] - 1, 3),
            "growth of open files": round(late[1] - early[1]),
            "requests lost at the ends": sum(len(each.lost) for each, _ in finished),
            "wrong answers at the ends": sum(len(each.wrong) for each, _ in finished),
            "exits that were not 0": sum(code != 0 for _, code in finished),
        }
        for what, value in found.items():
            print(f"{what}: {value}")
        settings = {"requests": requests, "seconds": seconds, "swap_seconds": swap_seconds, "ends": ends}
        kinds = {f"{protocol}, {kind}": count for (protocol, kind), count in outcome.answered.items()}
        said = {"wrong": outcome.wrong[:20], "lost": outcome.lost[:20]}
        measured.add(settings | {"clients": CLIENTS, "times": {}, "found": found, "answered": kinds} | said)


if __name__ == "__main__":
    typer.run(main)
