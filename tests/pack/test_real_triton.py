"""What `twinop pack --triton` writes, in a real Triton.

It is TWINOP_TRITON, or that of the wheel nvidia-pytriton, where triton_backend.py runs models.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_models as models
import tritonclient.http as http_client
from pack_fixtures import packed, saved
from service_fixtures import free_ports
from wheels import unpacked

from twinop.deploy.create_session import session

WHEEL = "nvidia-pytriton==0.7.0"  # tritonserver 2.51 with its Python backend


def installation() -> Path:
    """The folder of a Triton. Skips the test where there is none."""
    given = os.environ.get("TWINOP_TRITON")
    if given:
        assert Path(given, "bin/tritonserver").is_file(), f"TWINOP_TRITON={given}: no bin/tritonserver there"
        return Path(given)
    if sys.version_info[:2] != (3, 11) or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("Triton's Python backend needs libpython3.11.so; or set TWINOP_TRITON")
    return unpacked(WHEEL, _install_stub) / "pytriton/tritonserver"


def _install_stub(folder: Path) -> None:
    server = folder / "pytriton/tritonserver"
    stub = server / "python_backend_stubs/3.11/triton_python_backend_stub"
    shutil.copy(stub, server / "backends/python")
    for program in (server / "bin/tritonserver", server / "backends/python" / stub.name):
        program.chmod(0o755)


def _backends(root: Path, folder: Path) -> Path:
    """The folder of backends, with one for ONNX Runtime."""
    if (root / "backends/onnxruntime/libtriton_onnxruntime.so").exists():
        return root / "backends"
    shutil.copytree(root / "backends", folder)
    (folder / "onnxruntime").mkdir()
    shutil.copy(Path(__file__).with_name("triton_backend.py"), folder / "onnxruntime/model.py")
    return folder


@contextmanager
def running(repository: Path, scratch: Path, http: int, grpc: int) -> Iterator[str]:
    """Serves a repository on this machine until the end of the block."""
    root = installation()
    libraries = [root.parents[1] / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, [*libraries, os.environ.get("LD_LIBRARY_PATH", "")])),
        "TRITON_SITE_PACKAGES": sysconfig.get_path("purelib"),  # it ignores PYTHONPATH
    }
    options = {
        "model-repository": repository,
        "backend-directory": _backends(root, scratch / "backends"),
        "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1",
        "http-port": http,
        "grpc-port": grpc,
        "allow-metrics": "false",
    }
    command = [f"{root}/bin/tritonserver", *(f"--{name}={value}" for name, value in options.items())]
    with (scratch / "triton.log").open("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=scratch)
        try:
            _wait(server, f"http://127.0.0.1:{http}/v2/health/ready", scratch / "triton.log")
            yield f"127.0.0.1:{http}"
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(server: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    pytest.fail(f"Triton is not ready: {log.read_text()}")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packs in one repository."""
    folder = tmp_path_factory.mktemp("repository")
    for name, rows in ("plain", 0), ("joined", 16):
        given: Any = {"name": name, "triton": True, "gpu": False, "max_batch_size": rows}
        repo, _ = packed(tmp_path_factory.mktemp(name), models.relu(), **given)
        shutil.copytree(repo / "models", folder, dirs_exist_ok=True)
        config = folder / name / "config.pbtxt"  # as if the repository were mounted where its files say
        config.write_text(config.read_text().replace("/mnt/models/", f"{folder}/"))
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
