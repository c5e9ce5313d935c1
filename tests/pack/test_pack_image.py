"""The files of examples/serving for what `twinop pack` writes; all offline."""

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack_fixtures import packed
from service_fixtures import free_ports, serve, tensor

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS, SERVING = ROOT / "requirements", ROOT / "examples/serving"
DOCKERFILE = (SERVING / "Dockerfile").read_text()


def requirements(device: str) -> dict[str, str]:
    """The version of each package in the image."""
    lines = (SERVING / f"requirements-{device}.txt").read_text().splitlines()[1:]
    line = re.compile(r"([a-z0-9-]+(?:\[[a-z,]+\])?)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")
    matches = list(map(line.fullmatch, lines))
    assert all(matches), "each line has a name, a version and hashes"
    return {found[1]: found[2] for found in matches if found is not None}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_requirements_are_locked(device: str) -> None:
    found = requirements(device)
    gpu = device == "gpu"
    assert ("onnxruntime-gpu" in found, "onnxruntime" in found) == (gpu, not gpu)
    assert not {"torch", "kserve", "pandas", "kubernetes"} & found.keys()
    assert "--require-hashes" in DOCKERFILE


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lock_is_not_older_than_requirements(device: str) -> None:
    """`python requirements/lock.py` writes it again."""
    pins: dict[str, str] = {}
    for file in ("constraints", "base", "serve", "cpu", "cuda"):
        text = (REQUIREMENTS / f"{file}.txt").read_text()
        for name, version in re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==([^\s#]+)", text, re.MULTILINE):
            pins[normal(name)] = version
    found = requirements(device)
    older = {name: version for name, version in found.items() if pins.get(name, version) != version}
    assert not older
    wanted = re.findall(r"^([A-Za-z][\w.-]*)", (REQUIREMENTS / "serve.txt").read_text(), re.MULTILINE)
    assert set(map(normal, wanted)) <= found.keys()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_requirements_hold_all_that_the_service_imports() -> None:
    found = requirements("cpu").keys() | {"torch"}  # which no process of the service imports
    providers = importlib.metadata.packages_distributions()
    sources = [ROOT / "twinop", ROOT / "deploy", ROOT / "deploy/service"]
    for path in (path for folder in sources for path in folder.glob("*.py")):
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


def test_the_packed_folder_is_served(tmp_path: Path) -> None:
    """The container's own command on the packed files: the image without Docker."""
    repo, _ = packed(tmp_path, gpu=False)
    command = re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    healthcheck = re.search(r'CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    assert command is not None and healthcheck is not None
    serve_, place, *options = json.loads(command[1])
    assert (serve_, place) == ("serve", "/mnt/models")
    http, grpc = map(str, free_ports(2))
    ports = {"0.0.0.0": "127.0.0.1", "8080": http, "8081": grpc}
    options = [ports.get(each, each) for each in options]
    token, env = {"authorization": "Bearer secret"}, {"TWINOP_TOKEN": "secret"}
    with serve(repo / "models", *options, env=env, cwd=tmp_path) as served:
        healthy = [sys.executable, "-c", healthcheck[1].replace("8080", http)]
        subprocess.run(healthy, check=True)
        assert served.ask("GET", "/v2/models/custom_relu").status == 401
        said = served.ask("GET", "/v2/models/custom_relu", headers=token).content
        assert b"CustomRelu" in said and b"libcustom_relu.so" in said
        body = {"inputs": [tensor("x", "FP32", [1, 4], [-1, 2, -3, 4])]}
        answer = served.ask("POST", "/v2/models/custom_relu/infer", body, token)
        assert answer.json["outputs"][0]["data"] == [0, 2, 0, 4]
        assert b"twinop_queued" in served.ask("GET", "/metrics", headers=token).content  # docs/serving.md
        assert served.stop() == 0
