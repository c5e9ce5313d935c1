"""What `twinop pack --triton` writes, in a real Triton (triton_server.py says which)."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_models as models
import tritonclient.http as http_client
from pack_fixtures import packed, saved
from service_fixtures import free_ports
from triton_server import running

from twinop.deploy.create_session import session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
FAILING = ("foreign", "unmounted", "on_gpu")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, libraries: dict[str, Path]) -> Path:
    """Several packs in one repository: two that are served, and FAILING."""
    folder = tmp_path_factory.mktemp("repository")
    options: dict[str, Any] = {"joined": {"max_batch_size": 16}, "on_gpu": {"gpu": True}}
    for name in ("plain", "joined", *FAILING):
        repo, said = packed(
            tmp_path_factory.mktemp(name),
            models.relu(),
            name=name,
            triton=True,
            **{"gpu": False} | options.get(name, {}),
        )
        shutil.copytree(repo / "models", folder, dirs_exist_ok=True)
        if name != "unmounted":  # as if the repository were mounted where its files say
            config = folder / name / "config.pbtxt"
            config.write_text(config.read_text().replace("/mnt/models/", f"{folder}/"))
        if name == "foreign":
            shutil.copy(libraries["test_ops"], folder / name / "1" / Path(said.library_paths[0]).name)
    return folder


@pytest.fixture(scope="module")
def triton(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address for HTTP."""
    http, grpc = free_ports(2)
    with running(repository, tmp_path_factory.mktemp("triton"), http, grpc) as address:
        yield address


def expected(folder: Path, rows: np.ndarray) -> np.ndarray:
    return session(saved(folder, models.relu()), ["CPUExecutionProvider"]).run({"x": rows})["y"]


def over_http(address: str, name: str, rows: np.ndarray) -> np.ndarray:
    tensor = http_client.InferInput("x", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    client = http_client.InferenceServerClient(address)
    try:
        return client.infer(name, [tensor]).as_numpy("y")
    finally:
        client.close()


@pytest.mark.parametrize("name", ["plain", "joined"])
def test_the_same_bits(triton: str, name: str, tmp_path: Path) -> None:
    rows = ROWS[:16]
    wanted = expected(tmp_path, rows)
    assert over_http(triton, name, rows).tobytes() == wanted.tobytes()


def test_joined_requests_have_the_same_bits(triton: str, tmp_path: Path) -> None:
    wanted = expected(tmp_path, ROWS)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda row: over_http(triton, "joined", row[None]), ROWS))
    assert np.concatenate(answers).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foreign", "CustomRelu"),  # a library without the model's op: no function body runs instead
        ("unmounted", "cannot open shared object file"),
        ("on_gpu", "has kind KIND_GPU but no GPUs are available"),
    ],
)
def test_failures_are_said(triton: str, name: str, message: str) -> None:
    if name == "on_gpu" and shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU here")
    request = urllib.request.Request(f"http://{triton}/v2/repository/index", b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        states = {each["name"]: each for each in json.load(answer)}
    assert states["plain"]["state"] == states["joined"]["state"] == "READY"
    assert states[name]["state"] == "UNAVAILABLE" and message in states[name]["reason"], states[name]
