"""Every datatype through the real server, with Triton's clients and curl."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import service_models as models
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from service_fixtures import Served
from tritonclient.utils import InferenceServerException

DATATYPES = list(models.ELEMENTS)


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


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(served: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    kind, port = {"http": (triton_http, served.http_port), "grpc": (triton_grpc, served.grpc_port)}[
        request.param
    ]
    with kind.InferenceServerClient(f"127.0.0.1:{port}") as found:
        yield found


def echoed(client: Any, datatype: str, array: np.ndarray, **options: Any) -> np.ndarray:
    """Return y of the identity model of the datatype."""
    kind = triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc
    given = kind.InferInput("x", list(array.shape), datatype)
    given.set_data_from_numpy(array, **options)
    wanted = [kind.InferRequestedOutput("y", **options)]
    result = client.infer(f"id_{datatype.lower()}", [given], outputs=wanted, request_id="7")
    answer = result.get_response(as_json=True) if kind is triton_grpc else result.get_response()
    assert answer["id"] == "7" and answer["outputs"][0]["datatype"] == datatype
    found: np.ndarray = result.as_numpy("y")
    return found


@pytest.mark.parametrize("datatype", DATATYPES)
def test_tritonclient(client: Any, datatype: str) -> None:
    array = values(datatype)
    assert raw(echoed(client, datatype, array)) == raw(array)


@pytest.mark.parametrize("datatype", [each for each in DATATYPES if each not in ("FP16", "BF16")])
def test_tritonclient_with_json(served: Served, datatype: str) -> None:
    array = finite(datatype)
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        assert raw(echoed(client, datatype, array, binary_data=False)) == raw(array)


def test_health_and_the_list_of_models(client: Any, served: Served) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("relu", "1")
    listed = client.get_model_repository_index()
    entries = (
        [(each.name, each.state) for each in listed.models]
        if hasattr(listed, "models")
        else [(each["name"], each["state"]) for each in listed]
    )
    states = dict(entries)
    assert states.pop("broken") == "UNAVAILABLE" and set(states.values()) == {"READY"}
    assert {*states, "broken"} == {path.name for path in served.root.iterdir() if path.is_dir()}
    with pytest.raises(InferenceServerException):
        client.unload_model("relu")
    assert client.is_model_ready("relu")
