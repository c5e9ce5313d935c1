"""What `twinop pack` writes for Kubernetes and KServe, held against their schemas and types; all offline."""

import importlib
import json
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


# -------------------------------------------------------------------------------- Kubernetes

KSERVE = """
import json, sys
import kserve

document = json.loads(sys.argv[1])
for kind, found in (
    ("V1beta1InferenceService", document),
    ("V1beta1InferenceServiceSpec", document["spec"]),
    ("V1beta1PredictorSpec", document["spec"]["predictor"]),
):
    fields = {there: here for here, there in getattr(kserve, kind).attribute_map.items()}
    types = getattr(kserve, kind).openapi_types
    for name, value in found.items():
        kinds = {"int": int, "str": str}
        assert isinstance(value, kinds.get(types[fields[name]], object)), f"{name} is {value!r}"
    getattr(kserve, kind)(**{fields[name]: value for name, value in found.items()})  # is all there?
assert document["apiVersion"] == f"{kserve.constants.KSERVE_GROUP}/{kserve.constants.KSERVE_V1BETA1_VERSION}"
assert document["kind"] == "InferenceService"
"""


def validate(thing: Any) -> None:
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


def test_plain_objects_fit_kubernetes_schema(repo: Path) -> None:
    found = plain(repo)
    assert found.keys() == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    for each in found.values():
        validate(each)


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


def test_kserves_service_has_the_plain_pod_and_fits_kserves_types(repo: Path) -> None:
    """In another process: KServe's and tritonclient's messages have the same names."""
    service = document(repo / "kubernetes/kserve/inferenceservice.yaml")
    deployment = plain(repo)["Deployment"]
    predictor, pod = service["spec"]["predictor"], deployment["spec"]["template"]["spec"]
    assert {key: predictor[key] for key in pod} == pod
    assert predictor["deploymentStrategy"] == deployment["spec"]["strategy"]
    validate(deployment | {"metadata": service["metadata"]})
    python = [sys.executable, "-c", KSERVE, json.dumps(service)]
    ran = subprocess.run(python, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr


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
    gpu = "cuda" in (repo / "models/custom_relu/twinop.toml").read_text()
    assert ("nvidia.com/gpu" in found["limits"]) == ("nvidia.com/gpu" in found["requests"]) == gpu
    assert found["requests"]["cpu"] == found["limits"]["cpu"] == "2"


def test_grace_is_longer_than_what_it_covers(repo: Path) -> None:
    from twinop.deploy.service.settings import read_settings

    sleep = container(repo)["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(sleep[1]) + read_settings(None, {}).server.grace_seconds
    pod = plain(repo)["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > needed
