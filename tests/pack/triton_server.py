"""A real Triton: TWINOP_TRITON, or that of the wheel nvidia-pytriton, where triton_backend.py runs models."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from wheels import unpacked

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
    """Serves a repository on this machine until the end of the block. Models that fail do not end it."""
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
        "exit-on-error": "false",
        "strict-readiness": "false",
    }
    command = [f"{root}/bin/tritonserver", *(f"--{name}={value}" for name, value in options.items())]
    with (scratch / "triton.log").open("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
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
