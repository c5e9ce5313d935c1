"""Tensors in system shared memory: registered over HTTP and gRPC with Triton's clients, and every refusal."""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_models as models
import tritonclient.grpc
import tritonclient.http
from service_fixtures import Served, serve
from service_loads import refusal_of
from tritonclient.utils import InferenceServerException

X = np.array([[-1, 2, -3, 4]], np.float32)
CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu(shape=("N", 4)))
    models.place(folder, "strings", models.identity("BYTES", ("N",)))
    (folder / "twinop.toml").write_text(
        f"[server]\nmax_request_bytes = {1 << 20}\n[policy]\nshared_memory = true\n"
    )
    with serve(folder, "--provider", "cpu") as found:
        yield found
        assert [line for line in found.log if "traceback" in line] == []


@pytest.fixture(params=CLIENTS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def connect(served: Served, protocol: str) -> Any:
    """Return a client with a connection of its own."""
    if protocol == "http":
        return tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.http_port}")
    own = [("grpc.use_local_subchannel_pool", 1)]
    return tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}", channel_args=own)


@pytest.fixture
def client(served: Served, protocol: str) -> Iterator[Any]:
    found = connect(served, protocol)
    yield found
    found.unregister_system_shared_memory()


@pytest.fixture
def segment() -> Iterator[Path]:
    """A segment with X and room for 16 more bytes; its key is its name."""
    path = Path("/dev/shm") / f"twinop-{secrets.token_hex(4)}"
    path.write_bytes(X.tobytes() + bytes(16))
    yield path
    with suppress(FileNotFoundError):
        path.unlink()


def infer(client: Any, protocol: str, x: Any = None, y: Any = None, region: str = "r", **rest: Any) -> Any:
    """Run relu with its input, and its output, at (size, offset) in the region; None for in the message."""
    module = CLIENTS[protocol]
    given = module.InferInput("x", rest.get("shape", [1, 4]), "FP32")
    wanted = module.InferRequestedOutput("y")
    given.set_shared_memory(region, *x) if x else given.set_data_from_numpy(X)
    if y:
        wanted.set_shared_memory(region, *y)
    return client.infer("relu", [given], outputs=[wanted])


def registered(client: Any) -> dict[str, Any]:
    found = client.get_system_shared_memory_status()
    return {each["name"]: each for each in found} if isinstance(found, list) else dict(found.regions)


def test_input_and_output(client: Any, protocol: str, segment: Path) -> None:
    client.register_system_shared_memory("r", f"/{segment.name}", 32)
    answer = infer(client, protocol, x=(16, 0), y=(16, 16))
    assert np.frombuffer(segment.read_bytes()[16:], np.float32).tolist() == [0, 2, 0, 4]
    given = answer.get_output("y")
    assert (given["shape"] if protocol == "http" else given.shape) == [1, 4]
    assert infer(client, protocol, x=(16, 16)).as_numpy("y").tolist() == [[0, 2, 0, 4]]
    segment.write_bytes((-X).tobytes())
    assert infer(client, protocol, x=(16, 0)).as_numpy("y").tolist() == [[1, 0, 3, 0]]


def test_a_region_may_begin_within_its_segment(client: Any, protocol: str, segment: Path) -> None:
    client.register_system_shared_memory("r", segment.name, 24, offset=8)
    infer(client, protocol, y=(16, 8))
    assert np.frombuffer(segment.read_bytes()[16:], np.float32).tolist() == [0, 2, 0, 4]


def test_registering_asking_and_forgetting(served: Served, client: Any, protocol: str, segment: Path) -> None:
    client.register_system_shared_memory("r", segment.name, 16)
    client.register_system_shared_memory("r", segment.name, 32)  # again
    other = connect(served, protocol)
    other.register_system_shared_memory("s", segment.name, 16)
    assert set(registered(client)) == {"r"} and set(registered(other)) == {"s"}
    assert infer(other, protocol, x=(16, 0)).as_numpy("y").tolist() == [[0, 2, 0, 4]]  # it knows the name
    client.unregister_system_shared_memory()
    assert not registered(client) and set(registered(other)) == {"s"}
    with pytest.raises(
        InferenceServerException, match="there is no region 'r' of shared memory: register it"
    ):
        client.get_system_shared_memory_status("r")
    client.get_system_shared_memory_status("s")
    segment.unlink()
    client.unregister_system_shared_memory()  # also what is gone
    assert not registered(other)
    client.unregister_system_shared_memory("none such")
    client.unregister_cuda_shared_memory()


def test_texts(client: Any, protocol: str, segment: Path) -> None:
    module = CLIENTS[protocol]
    segment.write_bytes(b"\2\0\0\0ab\1\0\0\0c" + bytes(21))
    client.register_system_shared_memory("r", segment.name, 32)
    given, wanted = module.InferInput("x", [2], "BYTES"), module.InferRequestedOutput("y")
    given.set_shared_memory("r", 11)
    wanted.set_shared_memory("r", 16, 16)
    client.infer("strings", [given], outputs=[wanted])
    assert segment.read_bytes()[16:27] == b"\2\0\0\0ab\1\0\0\0c"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown region": ({"region": "s", "x": (16, 0)}, "there is no region 's' of shared memory: register it"),
    "beyond the region": ({"x": (16, 20)}, "region r has 32 bytes, but a tensor in it ends at 36"),
    "output beyond it": ({"y": (33, 0)}, "region r has 32 bytes, but a tensor in it ends at 33"),
    "wrong size": ({"x": (12, 0)}, r"input x: 12 bytes of data, but FP32 of shape \[1, 4\] has 16"),
    "output too large": ({"y": (8, 16)}, "output y has 16 bytes, but shared_memory_byte_size is 8"),
}


@pytest.mark.parametrize(("given", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_tensors(client: Any, protocol: str, segment: Path, given: Any, said: str) -> None:
    client.register_system_shared_memory("r", segment.name, 32)
    with pytest.raises(InferenceServerException, match=said):
        infer(client, protocol, **given)
    assert segment.read_bytes() == X.tobytes() + bytes(16)


def test_more_than_a_request_may_have(client: Any, protocol: str, segment: Path) -> None:
    segment.write_bytes(bytes(2 << 20))
    client.register_system_shared_memory("r", segment.name, 2 << 20)
    with pytest.raises(
        InferenceServerException, match="request's shared memory is larger than 1048576 bytes"
    ):
        infer(client, protocol, x=(2 << 20, 0), shape=[1 << 17, 4])


@pytest.mark.parametrize("places", [{"x": (16, 16)}, {"y": (16, 16)}])
def test_a_segment_that_is_cut_short(client: Any, protocol: str, segment: Path, places: Any) -> None:
    client.register_system_shared_memory("r", segment.name, 32)
    segment.write_bytes(bytes(20))
    with pytest.raises(
        InferenceServerException, match="region r: a tensor ends at byte 32, but its segment has only 20"
    ):
        infer(client, protocol, **places)
    assert len(segment.read_bytes()) == 20


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("none-such", "the segment 'none-such' cannot be opened: No such file or directory"),
        ("/../../etc/passwd", "must be the name of a segment, such as /mine"),
        ("..", "must be the name of a segment"),
        ("", "must be the name of a segment"),
        ("a\0b", "must be the name of a segment"),
        ("{}-link", "cannot be opened: Too many levels of symbolic links"),
        ("{}-folder", "cannot be opened: Is a directory"),
        ("{}-pipe", "is not a shared memory segment"),
    ],
)
def test_refused_keys(client: Any, segment: Path, key: str, said: str) -> None:
    (link := segment.with_name(f"{segment.name}-link")).symlink_to("/etc/passwd")
    (folder := segment.with_name(f"{segment.name}-folder")).mkdir()
    os.mkfifo(pipe := segment.with_name(f"{segment.name}-pipe"))
    try:
        with pytest.raises(InferenceServerException, match=said):
            client.register_system_shared_memory("r", key.format(segment.name), 1)
    finally:
        link.unlink()
        folder.rmdir()
        pipe.unlink()


def test_refused_regions(client: Any, segment: Path) -> None:
    with pytest.raises(
        InferenceServerException, match="the region ends at byte 33, but its segment has only"
    ):
        client.register_system_shared_memory("r", segment.name, 17, offset=16)
    client.register_system_shared_memory("r", segment.name, 16)
    with pytest.raises(InferenceServerException, match="there is a region r already, with another key"):
        client.register_system_shared_memory("r", "other", 16)
    with pytest.raises(InferenceServerException, match="1024 regions are registered, and no more are kept"):
        for number in range(1024):
            client.register_system_shared_memory(f"r{number}", segment.name, 16)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"byte_size": 1}, "key None must be the name of a segment"),
        ({"key": "k"}, '"byte_size" must be a number of bytes, not None'),
        ({"key": "k", "byte_size": -1}, '"byte_size" must be a number of bytes, not -1'),
        ({"key": "k", "byte_size": 1, "offset": "0"}, "\"offset\" must be a number of bytes, not '0'"),
    ],
)
def test_malformed_registrations(served: Served, body: Any, said: str) -> None:
    answer = served.ask("POST", "/v2/systemsharedmemory/region/r/register", body)
    assert answer.status == 400 and said in answer.error


@pytest.mark.parametrize(
    ("parameters", "rest", "said"),
    [
        ({"shared_memory_region": 1}, {}, "parameter shared_memory_region must be a region's name, not 1"),
        ({"shared_memory_region": "r"}, {}, "shared_memory_byte_size must be a number of bytes, not None"),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": -1},
            {},
            "shared_memory_offset must be a number of bytes, not -1",
        ),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 16},
            {"data": [1, 2, 3, 4]},
            "input x has data besides shared_memory_region: send one of them",
        ),
    ],
)
def test_malformed_tensors(served: Served, parameters: Any, rest: Any, said: str) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": parameters, **rest}
    answer = served.infer("relu", x)
    assert answer.status == 400 and said in answer.error


def test_it_is_off_by_default(tmp_path: Path, protocol: str, segment: Path) -> None:
    models.place(tmp_path, "relu", models.relu(shape=("N", 4)))
    with serve(tmp_path, "--provider", "cpu") as served:
        client = connect(served, protocol)
        for call in (
            lambda: client.register_system_shared_memory("r", segment.name, 16),
            lambda: client.unregister_system_shared_memory(),
            lambda: client.get_system_shared_memory_status(),
            lambda: infer(client, protocol, x=(16, 0)),
            lambda: infer(client, protocol, y=(16, 0)),
        ):
            with pytest.raises(InferenceServerException, match="shared memory is off: the server permits it"):
                call()
        assert "system_shared_memory" not in served.ask("GET", "/v2").json["extensions"]


def test_it_needs_one_process(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "twinop.toml").write_text("[policy]\nshared_memory = true\n")
    said = "shared_memory needs processes = 1, not 2: only the process that registered a region could use it"
    assert said in refusal_of(tmp_path, "--processes", "2")
