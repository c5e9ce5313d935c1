"""The files of examples/serving for what `twinop pack` writes, and who may ask the server; all offline."""

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from pack_fixtures import packed
from service_fixtures import Served, free_ports, serve, tensor, wait_until
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

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


MODELS, INDEX = "/v2/models", "/v2/repository/index"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The container's own command on the packed files, with a token: the image without Docker."""
    folder = tmp_path_factory.mktemp("image")
    repo, _ = packed(folder, gpu=False)
    command = re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert command is not None
    serve_, place, *options = json.loads(command[1])
    assert (serve_, place) == ("serve", "/mnt/models")
    ports = dict(zip(("8080", "8081"), map(str, free_ports(2)), strict=True)) | {"0.0.0.0": "127.0.0.1"}
    options = [ports.get(each, each) for each in options]
    with serve(repo / "models", *options, env={"TWINOP_TOKEN": "secret"}, cwd=folder) as served:
        yield served
        assert served.stop() == 0


def test_the_packed_folder_is_served(image: Served) -> None:
    healthcheck = re.search(r'CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    assert healthcheck is not None
    healthy = [sys.executable, "-c", healthcheck[1].replace("8080", str(image.http_port))]
    subprocess.run(healthy, check=True)
    token = {"authorization": "Bearer secret"}
    said = image.ask("GET", "/v2/models/custom_relu", headers=token).content
    assert b"CustomRelu" in said and b"libcustom_relu.so" in said
    body = {"inputs": [tensor("x", "FP32", [1, 4], [-1, 2, -3, 4])]}
    answer = image.ask("POST", "/v2/models/custom_relu/infer", body, token)
    assert answer.json["outputs"][0]["data"] == [0, 2, 0, 4]
    assert b"twinop_queued" in image.ask("GET", "/metrics", headers=token).content  # docs/serving.md


def test_token(image: Served) -> None:
    def status(path: str, token: str | None = None) -> int:
        method = "POST" if path == INDEX else "GET"
        answer = image.ask(method, path, headers={} if token is None else {"Authorization": token})
        if answer.status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer" in answer.error
        return answer.status

    assert status("/v2/health/live") == status("/v2/health/ready") == 200
    for path in (MODELS, "/v2", "/metrics", "/", "/nowhere", "/v2/health/live/", INDEX):
        assert status(path) == status(path, "Bearer wrong") == status(path, "Basic secret") == 401, path
    assert status(MODELS, "Bearer secret") == status("/metrics", "bearer secret") == 200
    assert status("/nowhere", "Bearer secret") == 404
    assert status(INDEX, "Bearer secret") == 200


def test_token_and_health_over_grpc(image: Served) -> None:
    """The health service needs no token, as other probes."""
    with grpc.insecure_channel(f"127.0.0.1:{image.grpc_port}") as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert stub.ServerReady(pb.ServerReadyRequest()).ready

        def is_allowed(call: Any, request: Any, token: str) -> bool:
            try:
                return bool(call(request, metadata=(("authorization", f"Bearer {token}"),)))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                return False

        ready = stub.ModelReady, pb.ModelReadyRequest(name="custom_relu")
        index = stub.RepositoryIndex, pb.RepositoryIndexRequest()
        for token, expected in (("", (0, 0)), ("wrong", (0, 0)), ("secret", (1, 1))):
            assert (is_allowed(*ready, token), is_allowed(*index, token)) == expected

        health = HealthStub(channel)

        def is_serving(service: str) -> bool:
            found: int = health.Check(HealthCheckRequest(service=service), timeout=60).status
            return found == HealthCheckResponse.SERVING

        for service in ("", "inference.GRPCInferenceService"):
            wait_until(partial(is_serving, service))
        with pytest.raises(grpc.RpcError) as error:
            is_serving("nothing")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
