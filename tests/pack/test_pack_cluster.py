"""What `twinop pack` writes for KServe and Triton, held against their types and schemas; all offline."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pack_fixtures import CASES, container, document, packed_case, plain


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case: packed_case(tmp_path_factory.mktemp(case), case) for case in CASES}


@pytest.fixture(params=list(CASES))
def repo(request: Any, repos: dict[str, Path]) -> Path:
    return repos[request.param]


def in_another_process(script: str, *arguments: object) -> str:
    """KServe's and tritonclient's messages have the same names, so neither is imported here."""
    python = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(python, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


# -------------------------------------------------------------------------------- Kubernetes

KSERVE = """
import re, sys
import kserve, yaml
from kserve.constants import constants
from kubernetes import client

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": object,
         "ResourceQuantity": (int, str), "V1beta1MetricQuantity": (int, str),
         "IntstrIntOrString": (int, str)}


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
        assert set(value) <= set(names), f"{where}: {set(value) - set(names)} are not fields of {kind}"
        for name, each in value.items():
            check(model.openapi_types[names[name]], each, f"{where}.{name}")
        model(**{names[name]: each for name, each in value.items()})  # says what is required and missing


def expect(found, *known):
    assert found in known, f"{found!r} is not one of {known}"


def check_document(path, type_name):
    # The types, and what they leave to KServe's controller because they are strings.
    with open(path) as file:
        document = yaml.safe_load(file)
    check(type_name, document, type_name)
    version, kind = re.fullmatch(r"V([a-z0-9]+)([A-Z].*)", type_name).groups()
    expect(f"v{version}", constants.KSERVE_V1ALPHA1_VERSION, constants.KSERVE_V1BETA1_VERSION)
    expect(document["apiVersion"], f"{constants.KSERVE_GROUP}/v{version}")
    expect(document["kind"], kind)


for path in sys.argv[2:]:
    try:
        check_document(path, sys.argv[1])
        print("fits")
    except (AssertionError, ValueError) as error:
        print("refused", type(error).__name__)
"""


def verdicts(kind: str, *files: Path) -> list[str]:
    """What KServe's types, made from the same OpenAPI document as its CRDs, say of each file."""
    return in_another_process(KSERVE, kind, *files).splitlines()


def test_kserve_types(repos: dict[str, Path]) -> None:
    files = [repo / "kubernetes/kserve/inferenceservice.yaml" for repo in repos.values()]
    assert verdicts("V1beta1InferenceService", *files) == ["fits"] * len(CASES)


def test_kserve_types_refuse(repos: dict[str, Path], tmp_path: Path) -> None:
    text = (repos["cpu"] / "kubernetes/kserve/inferenceservice.yaml").read_text()
    changes = [
        ("maxReplicas:", "maxReplica:"),
        ("scaleTarget: 70", "scaleTarget: often"),
        ("maxSurge: 1", "maxSurge: [1]"),
        ("serving.kserve.io/v1beta1", "serving.kserve.io/v1"),
        ("kind: InferenceService", "kind: InferenceServices"),
        ("containerPort:", "containerport:"),
        ("secretKeyRef:", "secretRef:"),
    ]
    files = [tmp_path / f"{number}.yaml" for number in range(len(changes))]
    for file, (old, new) in zip(files, changes, strict=True):
        assert old in text
        file.write_text(text.replace(old, new))
    found = verdicts("V1beta1InferenceService", *files)
    fitting = [change for change, verdict in zip(changes, found, strict=True) if verdict == "fits"]
    assert not fitting


def validate(thing: Any) -> None:
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


def test_plain_objects_fit_kubernetes_schema(repo: Path) -> None:
    found = plain(repo)
    assert found.keys() == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    for each in found.values():
        validate(each)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    pod["containers"][0]["livenessProbe"]["httpGett"] = {}
    with pytest.raises(importlib.import_module("kubernetes_validate").ValidationError):
        validate(found["Deployment"])


def test_plain_objects_name_each_other(repo: Path) -> None:
    found = plain(repo)
    deployment = found["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"] for port in container(repo)["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} == ports
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]  # it would undo what the autoscaler did
    assert 1 <= scaler["minReplicas"] <= scaler["maxReplicas"]


def test_kserves_pod_is_the_plain_one(repo: Path) -> None:
    service = document(repo / "kubernetes/kserve/inferenceservice.yaml")
    deployment = plain(repo)["Deployment"]["spec"]
    predictor, pod = service["spec"]["predictor"], deployment["template"]["spec"]
    assert {key: predictor[key] for key in pod} == pod
    assert predictor["deploymentStrategy"] == deployment["strategy"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])


def test_container_is_hardened_and_probed(repo: Path) -> None:
    found = container(repo)
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
    pod = plain(repo)["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > needed


# -------------------------------------------------------------------------------- Triton

TRITON = """
import sys
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto

for argument in sys.argv[1:]:
    path, *libraries = argument.split(",")
    config = text_format.Parse(open(path).read(), proto.ModelConfig())
    assert config.name == "custom_relu" and config.backend == "onnxruntime", config
    assert list(config.model_operations.op_library_filename) == libraries, config
    assert config.default_model_filename == "model.onnx", config
    assert bool(config.max_batch_size) == config.HasField("dynamic_batching"), config
    for each in (*config.input, *config.output):
        assert each.data_type == proto.TYPE_FP32 and list(each.dims) in ([4], [-1, 4], [-1, -1]), each
"""


def test_triton_reads_config_pbtxt(repos: dict[str, Path]) -> None:
    arguments = []
    for repo in repos.values():
        libraries = [path.relative_to(repo / "models") for path in (repo / "models").rglob("*.so")]
        config = repo / "models/custom_relu/config.pbtxt"
        arguments.append(",".join([str(config), *(f"/mnt/models/{path}" for path in libraries)]))
    in_another_process(TRITON, *arguments)


def test_the_library_lies_where_config_pbtxt_says(repo: Path) -> None:
    """In the container, models/ is at the place that the path begins with."""
    assert "COPY models /mnt/models" in (repo / "Dockerfile").read_text()
