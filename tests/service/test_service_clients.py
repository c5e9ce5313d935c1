"""Every datatype through the real server, with Triton's client, curl, and requests made by hand."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import service_models as models
import service_triton
import tritonclient.http as triton_http
from service_fixtures import Served, serve

DATATYPES = list(models.ELEMENTS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for datatype in DATATYPES:
        models.place(folder, f"id_{datatype.lower()}", models.identity(datatype))
    models.place(folder, "relu", models.relu())
    with serve(folder, "--control", "explicit") as server:
        yield server


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[Any]:
    with served.stub() as found:
        yield found


def values(datatype: str, seed: int = 0) -> np.ndarray:
    """Return 7 x 11 random bit patterns, including NaN payloads, infinities, -0, subnormals; or strings."""
    random = np.random.default_rng(seed)
    dtype = models.NUMPY[datatype]
    if datatype == "BYTES":
        texts = ["", "a", "zwei\n", "\0", "\N{SNOWMAN}", "\N{PILE OF POO}", '"quoted\\"']
        array = np.empty((7, 11), object)
        array[:] = random.choice(np.array(texts, object), (7, 11))
        return array
    if datatype == "BOOL":
        return random.integers(0, 2, (7, 11)).astype(bool)
    array = np.frombuffer(random.bytes(77 * dtype.itemsize), dtype).reshape(7, 11).copy()
    if array.dtype.kind not in "iu":
        array[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    return array


def finite(datatype: str) -> np.ndarray:
    array = values(datatype)
    with np.errstate(invalid="ignore"):
        return array if datatype == "BYTES" else np.where(np.isfinite(array), array, array.dtype.type(-0.0))


def raw(array: np.ndarray) -> bytes:
    """Return the tensor's bytes in the protocol's binary format."""
    if array.dtype == object:
        texts = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return array.tobytes()


# -------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_tritonclient_http(served: Served, datatype: str, is_binary: bool) -> None:
    if not is_binary and datatype in ("FP16", "BF16"):
        pytest.skip("tritonclient sends these only as binary data")
    array = values(datatype) if is_binary else finite(datatype)
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        given = triton_http.InferInput("x", list(array.shape), datatype)
        given.set_data_from_numpy(array, binary_data=is_binary)
        wanted = [triton_http.InferRequestedOutput("y", binary_data=is_binary)]
        result = client.infer(f"id_{datatype.lower()}", [given], outputs=wanted, request_id="7")
    answer = result.get_response()
    assert (answer["id"], answer["model_version"]) == ("7", "1")
    assert answer["outputs"][0]["datatype"] == datatype
    assert raw(result.as_numpy("y")) == raw(array)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_tritonclient_grpc(served: Served, datatype: str) -> None:
    array = values(datatype)
    model = f"id_{datatype.lower()}"
    kind, output = service_triton.echoed(served.grpc_port, model, datatype, array)
    assert kind == datatype and raw(output) == raw(array)


def test_curl(served: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    body = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [-1, 0, 1, 2.5]}]}'
    url = f"http://127.0.0.1:{served.http_port}/v2/models/relu/infer"
    for options in ((), ("--http1.0",), ("-H", "Expect: 100-continue")):
        command = ["curl", "-s", "--fail", *options, "--json", body, url]
        output = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        assert output["outputs"] == [
            {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 1, 2.5]}
        ]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(served: Served, algorithm: str) -> None:
    array = values("FP32")
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        given = triton_http.InferInput("x", list(array.shape), "FP32")
        given.set_data_from_numpy(array)
        result = client.infer("id_fp32", [given], request_compression_algorithm=algorithm)
    assert result.as_numpy("y").tobytes() == array.tobytes()


# -------------------------------------------------------------------------------- loading and unloading


def test_a_model_s_life_over_http(served: Served) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("relu", "1")
        index = {each["name"]: each for each in client.get_model_repository_index()}
        assert index["relu"] == {"name": "relu", "version": "1", "state": "READY", "reason": ""}
        client.unload_model("id_int8")
        assert not client.is_model_ready("id_int8")
        client.load_model("id_int8")
        assert client.is_model_ready("id_int8")


def test_a_model_s_life_over_grpc(served: Served) -> None:
    seen = service_triton.repository(served.grpc_port, "id_uint8")
    assert seen == {
        "extensions": ["binary_tensor_data", "model_configuration", "statistics", "model_repository"],
        "live": True,
        "ready": True,
        "model ready": (True, True),
        "metadata": ("onnxruntime_onnx", ["1"], [("x", "UINT8", [-1, -1])]),
        "unloaded": "StatusCode.NOT_FOUND",
        "index": ("1", "UNAVAILABLE", "not loaded"),
        "index of the ready": False,
        "loaded with parameters": (
            "StatusCode.INVALID_ARGUMENT",
            "a model is loaded from its folder as it is: parameters are not taken",
        ),
        "loaded": True,
        "index of the ready, loaded": True,
    }
