"""Versions and models appear, change and disappear under a running server, and its answers follow."""

import hashlib
import json
import os
import random
import select
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx.parser
import pytest
from abi_files import c_library, negate_model
from service_fixtures import Served, serve, wait_until
from service_models import place, relu
from service_rows import QUICK, ROW, binary, call, scaled, y_of
from tritonclient.grpc import service_pb2 as pb

from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that follows its folder; each test has its own models there."""
    root = tmp_path_factory.mktemp("root") / "models"
    place(root, "older", scaled(1))
    broken_version(root, "older", 2)
    root.with_name("libs").mkdir()
    (root / "twinop.toml").write_text("[server]\npoll_seconds = 0.05\nlibrary_folders = ['../libs']")
    with serve(root, *QUICK, "--allow-model-libraries") as found:
        yield found


def broken_version(root: Path, model: str, version: int) -> Path:
    path = root / model / str(version) / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(b"half of a model")
    return path


def wait_for_scans(served: Served, marker: str) -> None:
    """Wait until the server has scanned its folder twice more, which it takes to load a new model."""
    place(served.root, marker, scaled(1))
    wait_until(lambda: served.infer(marker, ROW).status == 200)


def test_a_new_version_takes_over_and_a_broken_one_does_not(served: Served) -> None:
    place(served.root, "new", scaled(1))
    wait_until(lambda: served.infer("new", ROW).status == 200)
    assert y_of(served, "new") == [-1, 2, -3, 4]
    place(served.root, "new", scaled(2), version=2)
    wait_until(lambda: y_of(served, "new") == [-2, 4, -6, 8])
    broken = broken_version(served.root, "new", 3)
    wait_until(lambda: served.versions().get(("new", 3), ("",))[0] == "UNAVAILABLE")
    wait_for_scans(served, "after_broken")
    assert y_of(served, "new") == [-2, 4, -6, 8]
    assert served.versions()["new", 2] == ("READY", "")
    broken.write_bytes(scaled(3).SerializeToString())  # repaired
    wait_until(lambda: y_of(served, "new") == [-3, 6, -9, 12])
    broken.write_bytes(scaled(5).SerializeToString())  # changed
    wait_until(lambda: y_of(served, "new") == [-5, 10, -15, 20])
    shutil.rmtree(broken.parent)  # withdrawn
    wait_until(lambda: y_of(served, "new") == [-2, 4, -6, 8])


def test_models_come_and_go(served: Served) -> None:
    place(served.root, "come", scaled(2))
    wait_until(lambda: served.ask("GET", "/v2/models/come/ready").status == 200)
    assert y_of(served, "come") == [-2, 4, -6, 8]
    shutil.rmtree(served.root / "come")
    wait_until(lambda: served.ask("GET", "/v2/models/come").status == 404)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('library = "libnone.so"', "libnone.so: no such library"),
        (f'library_sha256 = "{"0" * 64}"', "its SHA-256 is"),
        ('library = "text.so"', "text.so: not a shared library"),
    ],
)
def test_unservable_model_is_reported_and_isolated(served: Served, settings: str, words: str) -> None:
    logged, bad = len(served.log), served.root / "bad"
    staged = served.root.with_name("staged")  # a library that is still being copied would be cut short
    place(staged, "bad", relu(), settings=settings)
    (staged / "bad" / "text.so").write_text("#!/bin/sh")
    (staged / "bad").rename(bad)
    try:
        wait_until(lambda: served.versions().get(("bad", 1), ("",))[0] == "UNAVAILABLE")
        reason = served.versions()["bad", 1][1]
        errors = [line["message"] for line in served.log[logged:] if line["level"] == "error"]
        assert words in reason and any(words in message for message in errors)
        assert "/tmp" not in reason
        refused = served.infer("bad", ROW)
        assert refused.status == 503 and refused.error == "model bad is not ready"
        with pytest.raises(grpc.RpcError) as error:
            call(served, "bad")
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert y_of(served, "older") == [-1, 2, -3, 4]
        assert "Traceback" not in served.log_path.read_text()
    finally:
        shutil.rmtree(bad)
        wait_until(lambda: ("bad", 1) not in served.versions())


def test_an_older_version_serves_where_the_newest_is_broken_at_the_start(served: Served) -> None:
    states = {version: state for (name, version), (state, _) in served.versions().items() if name == "older"}
    assert states == {1: "READY", 2: "UNAVAILABLE"}
    wait_for_scans(served, "after_start")
    assert y_of(served, "older") == [-1, 2, -3, 4]


def test_settings_that_do_not_fit_are_said_and_the_folder_is_followed_on(served: Served) -> None:
    place(served.root, "m", scaled(1))
    wait_until(lambda: served.infer("m", ROW).status == 200)
    (served.root / "m" / "twinop.toml").write_text("max_batchsize = 8")
    place(served.root, "unfit", scaled(1), settings="warm_up = { z = [4] }")
    wait_until(lambda: served.versions().get(("unfit", 1), ("",))[0] == "UNAVAILABLE")
    wait_until(lambda: any("max_batchsize" in line["message"] for line in served.log))
    assert y_of(served, "m") == [-1, 2, -3, 4] and "max_batchsize" in served.versions()["m", 1][1]
    (served.root / "m" / "twinop.toml").unlink()
    wait_until(lambda: served.versions()["m", 1] == ("READY", ""))
    wait_for_scans(served, "good")
    (served.root / "unfit" / "twinop.toml").unlink()
    wait_until(lambda: served.infer("unfit", ROW).status == 200)


def test_a_folder_that_is_away_for_a_moment_changes_nothing(served: Served) -> None:
    away = served.root.with_name("away")
    served.root.rename(away)
    try:
        wait_until(lambda: any("no such file or folder" in line["message"] for line in served.log))
        assert y_of(served, "older") == [-1, 2, -3, 4]
    finally:
        away.rename(served.root)
    wait_for_scans(served, "after_away")
    assert y_of(served, "older") == [-1, 2, -3, 4]


def test_a_library_that_is_replaced_under_load(served: Served) -> None:
    """The answers show which code runs: the first library gives -x, the second one x."""
    library = served.root.with_name("libs") / "libplain_c.so"
    minus, plus = c_library("plain_c").read_bytes(), c_library("plain_c", "-DSIGN=1").read_bytes()
    library.write_bytes(minus)
    place(served.root, "signed", negate_model())
    wait_until(lambda: served.infer("signed", ROW).status == 200)
    answers: list[list[float]] = []

    def put(data: bytes) -> None:
        """Put a file into a folder that is followed, as a whole."""
        (new := library.parents[1] / "new").write_bytes(data)
        new.rename(library)

    def now(data: bytes, sign: int) -> bool:
        answers.append(y_of(served, "signed"))
        told = served.ask("GET", "/v2/models/signed").json["parameters"]["library_sha256"]
        is_loaded: bool = told == hashlib.sha256(data).hexdigest()
        return is_loaded and answers[-1] == [sign * each for each in ROW["data"]]

    def is_refused(words: str) -> bool:
        state, reason = served.versions()["signed", 1]
        return state == "UNAVAILABLE" and words in reason

    assert now(minus, -1)
    put(plus)
    wait_until(lambda: now(plus, 1))
    for bad, words in ((b"", "not a shared library"), (minus[: len(minus) // 2], "damaged or cut short")):
        put(bad)
        wait_until(partial(is_refused, words))
        assert all(now(plus, 1) for _ in range(20))  # the one before goes on
    put(minus)
    wait_until(lambda: now(minus, -1))
    assert all(answer in (ROW["data"], [-each for each in ROW["data"]]) for answer in answers)


@dataclass
class Load:
    """Clients that send rows, some of which are too short.

    Attributes:
        is_ending: the server may refuse connections, and no client calls over gRPC any more.
    """

    served: Served
    is_ending: bool = False
    answered: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def over_grpc(self, seed: int) -> None:
        """Calls until the server is going to end: of a call that gets no answer gRPC does not tell more."""
        choose = random.Random(seed)
        while not self.is_ending:
            with self.served.stub() as stub:
                for _ in range(choose.randint(1, 100)):
                    x = self.row(choose)
                    inputs: Any = [{"name": "x", "datatype": "FP32", "shape": x.shape}]
                    request = pb.ModelInferRequest(model_name="load", inputs=inputs)
                    request.raw_input_contents.append(x.tobytes())
                    try:
                        found = stub.ModelInfer(request, timeout=60)
                    except grpc.RpcError as error:
                        self.take("gRPC", x, 0, error.details() or "")
                    else:
                        self.take("gRPC", x, int(found.model_version), found.raw_output_contents[0])

    def over_http(self, seed: int) -> None:
        """Posts until nobody listens."""
        choose = random.Random(seed)
        while True:
            with closing(HTTPConnection("127.0.0.1", self.served.http_port, timeout=60)) as connection:
                for _ in range(choose.randint(1, 100)):
                    if connection.sock and select.select([connection.sock], [], [], 0)[0]:
                        connection.close()  # as the server has, after the last answer
                    try:
                        connection.request("POST", "/v2/models/load/infer", *binary(x := self.row(choose)))
                        answer = connection.getresponse()
                        body = answer.read()
                    except ConnectionRefusedError:
                        if not self.is_ending:
                            self.wrong.append("REST: refused")
                        return
                    except (OSError, HTTPException) as error:
                        self.wrong.append(f"REST: {error!r}")
                        break
                    if length := int(answer.headers.get("Inference-Header-Content-Length", 0)):
                        version = int(json.loads(body[:length])["model_version"])
                        self.take("REST", x, version, body[length:])
                    else:
                        self.take("REST", x, 0, body.decode(errors="replace"))

    def row(self, choose: random.Random) -> np.ndarray:
        shape = choose.randint(1, 4), 8 if choose.random() < 0.75 else 7
        return np.random.default_rng(choose.getrandbits(32)).standard_normal(shape, np.float32)

    def take(self, protocol: str, x: np.ndarray, version: int, said: str | bytes) -> None:
        """Counts an answer: y, or what refuses x."""
        self.answered[protocol] += 1
        self.versions[version] += 1
        if isinstance(said, str):
            is_right = x.shape[1] == 7 and "dimension 1 must be 8" in said and "Traceback" not in said
        else:
            is_right = (np.maximum(x, 0) + np.float32(version)).tobytes() == said
        if not is_right:
            self.wrong.append(f"{protocol}: {said!r} for {x}")


def plus(version: int) -> onnx.ModelProto:
    """Makes y = CustomRelu(x) + version, so that an answer shows which version made it."""
    head = f'<ir_version: 10, opset_import: ["" : 20, "{DOMAIN}" : {DOMAIN_VERSION}]> model'
    nodes = f"v = Constant<value_float = {version}.0>() r = {DOMAIN}.CustomRelu(x) y = Add(r, v)"
    return onnx.parser.parse_model(f"{head} (float[n, 8] x) => (float[n, 8] y) {{ {nodes} }}")


def test_no_request_is_lost_or_wrong_while_versions_are_swapped_and_at_sigterm(tmp_path: Path) -> None:
    """Every fourth version is corrupt. TWINOP_SOAK=200000 makes a soak of it."""
    requests = int(os.environ.get("TWINOP_SOAK", "1000"))
    place(tmp_path, "load", plus(1))
    (tmp_path / "twinop.toml").write_text("[server]\npoll_seconds = 0.05")
    options = ("--provider", "cpu", "--max-batch-size", "32")
    swapped, broken, last, version = list[int](), list[int](), 1, 1
    with ThreadPoolExecutor(12) as pool, serve(tmp_path, *options) as served:
        load = Load(served)

        def is_now(version: int, state: str) -> bool:
            return load.served.versions().get(("load", version), ("",))[0] == state

        posting = [pool.submit(load.over_http, seed) for seed in range(8)]
        calling = [pool.submit(load.over_grpc, seed) for seed in range(4)]
        while load.answered.total() < requests or not broken:
            version += 1
            if is_broken := version % 4 == 0:
                broken_version(tmp_path, "load", version)
            else:
                place(tmp_path, "load", plus(version), version)
            wait_until(partial(is_now, version, "UNAVAILABLE" if is_broken else "READY"))
            shutil.rmtree(tmp_path / "load" / str(version if is_broken else last))
            if not is_broken:
                wait_until(partial(load.versions.__contains__, version))
            (broken if is_broken else swapped).append(version)
            last = last if is_broken else version
        load.is_ending = served.is_stopped = True
        for client in calling:
            client.result()
        served.process.send_signal(signal.SIGTERM)
        for client in posting:
            client.result()
        assert served.process.wait(60) == 0
    assert load.wrong == []
    assert load.answered.keys() == {"REST", "gRPC"}
    assert len(swapped) >= 2 and set(swapped) <= load.versions.keys() and not {*broken} & load.versions.keys()
