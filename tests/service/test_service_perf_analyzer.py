"""Triton's perf_analyzer against the service. Its program comes in older wheels of tritonclient."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import service_models as models
from service_fixtures import Served, serve
from wheels import unpacked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = "tritonclient-2.48.0.data/data/bin/perf_analyzer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "relu", models.relu(shape=("N", 4)), settings="max_batch_size = 8")
    with serve(folder, "--allow-model-libraries") as server:
        yield server


@pytest.fixture(scope="module")
def program() -> Path:
    found = unpacked("tritonclient==2.48.0", lambda folder: (folder / PROGRAM).chmod(0o755))
    return found / PROGRAM


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folders of what the program is linked with: libb64 from Debian, and CUDA's runtime."""
    folder = tmp_path_factory.mktemp("libb64")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("libb64.so.0d comes from Debian's package libb64-0d, and this is not Debian")
    ran = subprocess.run(["apt-get", "download", "libb64-0d"], cwd=folder, capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"libb64-0d cannot be downloaded: {ran.stderr.strip()}")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    (library,) = folder.rglob("libb64.so.0d")
    runtime = unpacked("nvidia-cuda-runtime-cu12==12.4.127") / "nvidia/cuda_runtime/lib"
    return f"{library.parent}{os.pathsep}{runtime}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_it_measures_and_reads_the_statistics(
    served: Served, program: Path, libraries: str, protocol: str
) -> None:
    port = served.http_port if protocol == "http" else served.grpc_port
    options = ["-m", "relu", "-i", protocol, "-u", f"127.0.0.1:{port}", "-b", "2"]
    options += ["--measurement-mode", "count_windows", "--measurement-request-count", "50", "-s", "900"]
    ran = subprocess.run(
        [program, *options],
        env=os.environ | {"LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    requests = re.search(r"Server:\s+Inference count: (\d+)\s+Execution count: (\d+)", ran.stdout)
    assert requests is not None and int(requests[1]) >= 2 * 50 and int(requests[2]) >= 50, ran.stdout
    assert re.search(r"compute infer [1-9]\d* usec", ran.stdout), ran.stdout
