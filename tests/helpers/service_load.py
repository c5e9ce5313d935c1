"""Clients that send valid and invalid requests over HTTP and gRPC, while versions change and at SIGTERM."""

import asyncio
import json
import random
import shutil
import signal
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import onnx.parser
from service_fixtures import Served
from tritonclient.grpc import service_pb2 as pb

from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION

NAME = "load"  # the model
OPTIONS = (
    "--provider", "cpu", "--poll-seconds", "0.05", "--max-batch-size", "32", "--log-level", "debug",
)  # fmt: skip
REST, GRPC = "REST", "gRPC"
CLIENTS = 32
_BROKEN_EACH = 4  # every fourth version is corrupt
_SECONDS = 60.0  # an answer that takes longer is lost
_INFER, _LENGTH = f"/v2/models/{NAME}/infer", "Inference-Header-Content-Length"
_CALL = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Request:
    """One request of a row, or of several: `words` are those of a refusal."""

    protocol: str
    body: bytes
    x: np.ndarray
    words: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> Any:
        """That of its answer."""
        expected: dict[str, Any] = {REST: (200, 400), GRPC: ("OK", "INVALID_ARGUMENT")}
        return expected[self.protocol][bool(self.words)]


def some(choose: random.Random) -> Request:
    """Chooses a request: a third over gRPC, a quarter with too short rows."""
    valid = choose.random() < 0.75
    shape = choose.randint(1, 4), 8 if valid else 7
    x = np.random.default_rng(choose.getrandbits(32)).standard_normal(shape, np.float32)
    words = "" if valid else "dimension 1 must be 8"
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": shape}
    if choose.random() < 1 / 3:
        message = pb.ModelInferRequest(model_name=NAME, inputs=[tensor], raw_input_contents=[x.tobytes()])
        return Request(GRPC, message.SerializeToString(), x, words)
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return Request(REST, head + x.tobytes(), x, words, {_LENGTH: str(len(head))})


def version_of(request: Request, headers: Mapping[str, str], body: bytes) -> tuple[int, np.ndarray]:
    """Returns the version that answered, and its output."""
    if request.protocol == GRPC:
        found = pb.ModelInferResponse.FromString(body)
        return int(found.model_version), np.frombuffer(found.raw_output_contents[0], np.float32)
    length = int(headers[_LENGTH])
    return int(json.loads(body[:length])["model_version"]), np.frombuffer(body[length:], np.float32)


# A pool of its own gives each client its own connection. Each call is one attempt: after a server has ended,
# gRPC 1.85 may retry a call forever without a pause, in the event loop's thread, and take 200 MB per second.
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_NO_ANSWERS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "CANCELLED")  # if gRPC reports it itself


@dataclass
class Outcome:
    """The results of the requests.

    Attributes:
        answered: the number of answers by protocol.
        lost: the requests that the server accepted and did not answer.
        cut_off: gRPC calls without an answer, by id. gRPC does not tell whether they reached the server.
        is_ending: a server may refuse connections and calls then.
        versions: the number of answers of each version of the model.
        swapped: the valid versions that were added.
        broken: the corrupt versions that were added, with their state in the server's index.
    """

    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut_off: dict[str, str] = field(default_factory=dict)
    is_ending: bool = False
    versions: Counter[int] = field(default_factory=Counter)
    swapped: list[int] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)

    def take(self, request: Request, status: Any, headers: Mapping[str, str], body: bytes) -> bool:
        """Counts an answer. It is wrong if its status, its words or any bit of a tensor is."""
        self.answered[request.protocol] += 1
        said = body.decode(errors="replace")
        if status != request.status or request.words not in said or "Traceback" in said:
            self.wrong.append(f"{request.protocol}: not {request.status} but {status}: {said[:200]}")
        elif not request.words:
            version, y = version_of(request, headers, body)
            self.versions[version] += 1
            if not np.array_equal(y, np.maximum(request.x, 0).ravel() + np.float32(version)):
                self.wrong.append(f"{request.protocol}: version {version} gave {y} for {request.x}")
        return True

    def refuse(self, said: str) -> bool:
        if not self.is_ending:
            self.lost.append(said)
        return False


async def _post(session: aiohttp.ClientSession, request: Request, outcome: Outcome) -> bool:
    """Sends one request over HTTP. Returns whether there is an answer."""
    try:
        async with session.post(_INFER, data=request.body, headers=request.headers) as answer:
            body = await answer.read()
    except aiohttp.ClientConnectorError as error:  # nobody listens
        return outcome.refuse(f"{REST}: {error!r}")
    except (aiohttp.ClientError, OSError) as error:
        outcome.lost.append(f"{REST}: {error!r}")
        return False
    return outcome.take(request, answer.status, answer.headers, body)


async def _call(channel: grpc.aio.Channel, request: Request, outcome: Outcome) -> bool:
    """Makes one gRPC call. Returns whether there is an answer."""
    number = uuid.uuid4().hex
    call = channel.unary_unary(_CALL)
    try:
        body = await call(request.body, timeout=_SECONDS, metadata=(("x-request-id", number),))
    except grpc.aio.AioRpcError as error:
        code, details = error.code().name, error.details() or ""
        is_servers = "x-request-id" in dict(error.trailing_metadata() or ())
        stopping, gone = "server is stopping" in details, details.startswith("failed to connect")
        if stopping if is_servers else gone:
            return outcome.refuse(f"{GRPC}: {details}")
        if code in _NO_ANSWERS and not is_servers:
            outcome.cut_off[number] = f"{GRPC}: {code}: {details}"
            return False
        return outcome.take(request, code, {}, details.encode())
    return outcome.take(request, "OK", {}, body)


async def _client(served: Served, seed: int, outcome: Outcome) -> None:
    """Sends one request after another until the server has ended, at most 100 on a connection."""
    choose, limit = random.Random(seed), aiohttp.ClientTimeout(total=_SECONDS)
    while served.process.poll() is None:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{served.http_port}", timeout=limit) as session,
            grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}", _CHANNEL) as channel,
        ):
            for _ in range(choose.randint(1, 100)):
                request = some(choose)
                over_grpc = request.protocol == GRPC
                sent = _call(channel, request, outcome) if over_grpc else _post(session, request, outcome)
                if not await sent:
                    await asyncio.sleep(0.02)  # before a new connection to a server that is ending or gone
                    break


def write_version(folder: Path, version: int, broken: bool = False) -> None:
    """Adds y = CustomRelu(x) + version, so that an answer shows which version made it."""
    head = f'<ir_version: 10, opset_import: ["" : 20, "{DOMAIN}" : {DOMAIN_VERSION}]> model'
    nodes = f"v = Constant<value_float = {version}.0>() r = {DOMAIN}.CustomRelu(x) y = Add(r, v)"
    model = onnx.parser.parse_model(f"{head} (float[n, 8] x) => (float[n, 8] y) {{ {nodes} }}")
    data = model.SerializeToString()
    target = folder / NAME / str(version)
    target.mkdir(parents=True)
    (target / "model.onnx").write_bytes(data[: len(data) // 2 if broken else None])


async def _swap(served: Served, models: Path, requests: int, every: float, outcome: Outcome) -> None:
    """Adds a version every `every` seconds, and half of that later removes the old or a corrupt one."""
    version, last = 1, 1
    while outcome.answered.total() < requests or not outcome.broken:
        await asyncio.sleep(every / 2)
        version += 1
        broken = version % _BROKEN_EACH == 0
        await asyncio.to_thread(write_version, models, version, broken)
        state = ""
        while state not in ("READY", "UNAVAILABLE"):  # the previous version serves until then
            await asyncio.sleep(0.05)
            state = (await asyncio.to_thread(served.versions)).get((NAME, version), ("",))[0]
        if broken:
            outcome.broken[version], gone = state, version
        else:
            gone, last = last, version
        shutil.rmtree(models / NAME / str(gone))
        await asyncio.sleep(every / 2)
        if not broken:
            outcome.swapped.append(version)  # it had this time to answer


async def swapped_and_ended(served: Served, models: Path, requests: int, every: float) -> Outcome:
    """Adds versions until so many requests are answered, then sends SIGTERM; the clients go on until the end.

    A gRPC call that was cut off is lost if the server's log, at level debug, says that it was accepted.
    """
    outcome = Outcome()

    async def swap_and_end() -> None:
        await _swap(served, models, requests, every, outcome)
        outcome.lost += outcome.cut_off.values()  # the server was there all the time
        outcome.is_ending = served.is_stopped = True
        served.process.send_signal(signal.SIGTERM)

    await asyncio.gather(swap_and_end(), *(_client(served, seed, outcome) for seed in range(CLIENTS)))
    accepted = {line["request_id"] for line in served.log if line["message"] == "accepted"}
    assert accepted, "the server, at --log-level debug, lists no call that it accepted"
    outcome.lost += [f"{said}: accepted" for number, said in outcome.cut_off.items() if number in accepted]
    return outcome
