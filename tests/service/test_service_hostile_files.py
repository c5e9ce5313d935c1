"""Files in a model's folder that are no plain text of settings: the error is that model's alone."""

import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import service_models
from fuzzing import WORDS, counts, mutated, survive
from google.protobuf.message import DecodeError
from service_rows import scaled
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.custom_nodes import load_model
from twinop.deploy.errors import ModelError
from twinop.deploy.service import codec_grpc, codec_rest
from twinop.deploy.service.errors import ServiceError
from twinop.deploy.service.folders import scan
from twinop.deploy.service.instance import without_paths
from twinop.deploy.service.operations import Token
from twinop.deploy.service.settings import ServerSettings, Settings, SettingsError, read_settings


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


STRANGE: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": listening,
    "link to itself": lambda path: path.symlink_to(path),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link with a long name": lambda path: path.symlink_to("x" * 300),
    "huge": sparse,
}
TEXTS: dict[str, bytes] = {
    "not UTF-8": b"max_queue = 1 # \xff",
    "NUL": b"max_queue = \0",
    "NUL in a path": b'library = "a\\u0000b"',
    "surrogate": b'library = "\xed\xa0\x80"',
    "deep array": b"max_queue = " + b"[" * 20_000,
    "deep table": b"max_queue = " + b"{a = " * 20_000,
    "long key": b"max_queue" + b".a" * 100_000 + b" = 1",
    "long header": b"[max_queue" + b" . 'a'" * 30_000 + b"]",
    "digits": b"max_queue = " + b"9" * 5_000,
    "hexadecimal digits": b"max_queue = 0x" + b"f" * 100_000,
    "digits of an option": b"[session]\n'session.x' = 0x" + b"f" * 100_000 + b"\n[session.y]",
    "deep option": b"session" + b".a" * 30 + b" = " + b"[" * 400 + b"]" * 400,
}


def placed(folder: Path) -> Path:
    for name in ("bad", "good"):
        service_models.place(folder, name, scaled(1))
    return folder / "bad"


def each_is_that_models_own(root: Path, file: str) -> None:
    found = scan(root)
    assert found["good"].settings(Settings()).max_queue == 256
    with pytest.raises(SettingsError) as caught:
        found["bad"].settings(Settings())
    assert file in str(caught.value) or "bad" in str(caught.value)


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_is_no_regular_file(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(placed(tmp_path) / "twinop.toml")
    each_is_that_models_own(tmp_path, "twinop.toml")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_that_are_no_settings(tmp_path: Path, text: bytes) -> None:
    (placed(tmp_path) / "twinop.toml").write_bytes(text)
    each_is_that_models_own(tmp_path, "twinop.toml")


@pytest.mark.parametrize("make", [os.mkfifo, STRANGE["device"], STRANGE["huge"]])
def test_the_server_s_own_files(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    file = tmp_path / "file"
    make(file)
    with pytest.raises(SettingsError, match="file: cannot be read"):
        read_settings(file, {})
    with pytest.raises(SettingsError, match="token's file .* cannot be read"):
        Token(ServerSettings(token_file=file))


@pytest.mark.parametrize("make", [os.mkfifo, STRANGE["device"], STRANGE["huge"], STRANGE["folder"]])
def test_a_model_that_is_no_regular_file(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"m.onnx: (not a regular file|a folder|cannot be read: larger)"):
        load_model(tmp_path / "m.onnx", confined=True)


def test_names_that_cannot_be_shown(tmp_path: Path) -> None:
    placed(tmp_path)
    (tmp_path / "good" / "1" / "model.onnx").rename(tmp_path / "good" / "1" / "\udcff.onnx")
    (tmp_path / "long").symlink_to("x" * 300)
    assert list(scan(tmp_path)) == ["bad"]
    assert without_paths("/a/\udcff.so: no") == "\\udcff.so: no"


# -------------------------------------------------------------------------------- mutated at random

SERVER_TEXT = b"""[server]
host = "127.0.0.1"
http_port = 8000
library_folders = ["a", "b/c"]
poll_seconds = 0.5
grace_seconds = 2.5
reuse_port = true
allow_model_libraries = true
[model]
max_batch_size = 8
[models.m]
provider = "cpu"
"""
MODEL_TEXT = b"""library = ["a.so", "b.so"]
library_sha256 = "%s"
max_batch_size = 4
instances = 2
versions = "latest:2"
warm_up = { x = [1, 4] }
run_timeout_seconds = 1.5
intra_op_threads = 2
[session]
graph_optimization_level = "all"
[provider_options]
gpu_mem_limit = 1000
""" % (b"a" * 64)
REQUEST = {
    "id": "1",
    "parameters": {"timeout": 100, "binary_data_output": True},
    "inputs": [
        {"name": "x", "datatype": "FP16", "shape": [2, 2], "data": [[1, 2.5], [-3, 4]]},
        {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]},
        {"name": "b", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
        {"name": "i", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}},
    ],
    "outputs": [{"name": "y", "parameters": {"binary_data": False, "classification": 0}}],
}
TAIL = b"\2\0\0\0ab\1\0\0\0c" + bytes(8)


@counts
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "text"), [("twinop.toml", MODEL_TEXT), ("server.toml", SERVER_TEXT)])
def test_mutated_settings(tmp_path: Path, file: str, text: bytes, count: int) -> None:
    path = tmp_path / "server.toml" if file == "server.toml" else placed(tmp_path) / file

    def read(chance: random.Random) -> None:
        path.write_bytes(mutated(text, chance, WORDS))
        os.utime(path, ns=(0, chance.getrandbits(60)))  # what has not changed is not read again
        if file == "server.toml":
            read_settings(path, {}).for_model("m")
        else:
            Settings().for_model("bad", scan(tmp_path)["bad"].own)

    path.write_bytes(text)
    (read_settings(path, {}) if file == "server.toml" else scan(tmp_path)["bad"].own)
    survive(count, read)


@counts
@pytest.mark.timeout(900)
def test_mutated_requests(count: int) -> None:
    """JSON, the header's length and the binary tensors behind it; and messages of gRPC."""
    head = json.dumps(REQUEST).encode()
    message = pb.ModelInferRequest(model_name="m", id="1", raw_input_contents=[TAIL[:11], bytes(16)])
    message.inputs.add(name="b", datatype="BYTES", shape=[2]).parameters["a"].string_param = "x"
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.outputs.add(name="y").parameters["classification"].int64_param = 0
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="x", datatype="INT8", shape=[2]).contents.int_contents.extend([1, 2])
    typed.inputs.add(name="t", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    messages = [each.SerializeToString() for each in (message, typed)]
    codec_rest.decode(head + TAIL, {codec_rest.HEADER_LENGTH: str(len(head))}, "m")
    for each in messages:
        codec_grpc.decode(codec_grpc.parse(each), None)

    def read(chance: random.Random) -> None:
        if chance.random() < 0.3:
            data = mutated(chance.choice(messages), chance)
            codec_grpc.decode(codec_grpc.parse(data), chance.choice((None, 1.0)))
            return
        text, tail = mutated(head, chance, WORDS), mutated(TAIL, chance) if chance.random() < 0.5 else TAIL
        length = str(len(text)).encode()
        if chance.random() < 0.3:
            length = mutated(length, chance, WORDS)
        codec_rest.decode(text + tail, {codec_rest.HEADER_LENGTH: length.decode("latin-1")}, "m")

    survive(count, read, ServiceError, DecodeError)
