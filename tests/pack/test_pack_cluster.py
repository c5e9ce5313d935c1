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
    protocols = [each.value for each in constants.PredictorProtocol]
    spec = document["spec"]
    for protocol in spec.get("protocolVersions") or [spec["predictor"]["model"]["protocolVersion"]]:
        expect(protocol, *protocols)


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


@pytest.mark.parametrize(
    ("file", "kind"),
    [("runtime", "V1alpha1ClusterServingRuntime"), ("inferenceservice", "V1beta1InferenceService")],
)
def test_kserve_types(repos: dict[str, Path], file: str, kind: str) -> None:
    files = [repo / f"kubernetes/kserve/{file}.yaml" for repo in repos.values()]
    assert verdicts(kind, *files) == ["fits"] * len(CASES)


def test_kserve_types_refuse(repos: dict[str, Path], tmp_path: Path) -> None:
    text = (repos["cpu"] / "kubernetes/kserve/inferenceservice.yaml").read_text()
    changes = [
        ("maxReplicas:", "maxReplica:"),
        ("scaleTarget: 70", "scaleTarget: often"),
        ("maxSurge: 1", "maxSurge: [1]"),
        ("modelFormat:\n        name: onnx", "modelFormat:\n        nam: onnx"),
        ("serving.kserve.io/v1beta1", "serving.kserve.io/v1"),
        ("kind: InferenceService", "kind: InferenceServices"),
        ("storageUri:", "storageURI:"),
        ("secretKeyRef:", "secretRef:"),
        ("protocolVersion: v2", "protocolVersion: v3"),
    ]
    files = [tmp_path / f"{number}.yaml" for number in range(len(changes))]
    for file, (old, new) in zip(files, changes, strict=True):
        assert old in text
        file.write_text(text.replace(old, new))
    found = verdicts("V1beta1InferenceService", *files)
    fitting = [change for change, verdict in zip(changes, found, strict=True) if verdict == "fits"]
    assert not fitting


def kserve(repo: Path) -> tuple[Any, Any]:
    """The InferenceService and its runtime."""
    folder = repo / "kubernetes/kserve"
    return document(folder / "inferenceservice.yaml"), document(folder / "runtime.yaml")


def refusals(service: Any, runtime: Any) -> set[str]:
    """The fields that KServe's webhook, KEDA or Knative refuse or miss, in words of the manifests."""
    annotations = {key.partition("/")[2]: value for key, value in service["metadata"]["annotations"].items()}
    predictor, container = service["spec"]["predictor"], runtime["spec"]["containers"][0]
    found = set()
    if annotations.get("autoscalerClass") not in (None, "hpa", "keda", "external", "none"):
        found.add("autoscalerClass")
    if annotations["deploymentMode"] == "Standard" and annotations["autoscalerClass"] == "hpa":
        if predictor.get("scaleMetric", "cpu") not in ("cpu", "memory"):
            found.add("scaleMetric")
        found |= {"autoScaling"} & predictor.keys()  # it has no metrics from elsewhere
    elif annotations["deploymentMode"] == "Standard" and annotations["autoscalerClass"] == "keda":
        found |= {"scaleMetric"} & predictor.keys()
        for metric in predictor["autoScaling"]["metrics"]:
            external = metric["external"]
            found |= {"query", "serverAddress"} - external["metric"].keys()
            found |= {"value"} - external.get("target", {}).keys()
    elif annotations["deploymentMode"] == "Knative":
        if predictor.get("scaleMetric", "concurrency") not in ("concurrency", "rps"):
            found.add("scaleMetric")
        found |= {"deploymentStrategy", "terminationGracePeriodSeconds"} & predictor.keys()
        found |= {"lifecycle"} & container.keys()
        names = [port["name"] for port in container["ports"]]
        if len(names) != 1 or names[0] not in ("http1", "h2c"):
            found.add("ports")
    else:
        found.add("deploymentMode")
    return found


def test_the_webhooks_take_it(repo: Path) -> None:
    service, runtime = kserve(repo)
    assert not refusals(service, runtime)


def test_a_gpu_is_scaled_by_its_queue(repos: dict[str, Path]) -> None:
    service, runtime = kserve(repos["gpu"])
    predictor = service["spec"]["predictor"]
    (metric,) = predictor["autoScaling"]["metrics"]
    assert metric["external"]["metric"]["query"] == 'sum(twinop_queued{model="custom_relu"})'
    assert metric["external"]["metric"]["serverAddress"].startswith("http://prometheus-operated")
    assert metric["external"]["target"] == {"type": "Value", "value": "64"}
    (metric,) = plain(repos["gpu"])["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "twinop_queued"
    (metric,) = plain(repos["cpu"])["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["resource"]["name"] == "cpu"
    # KEDA takes no scaleMetric, and needs an address and a target.
    predictor["scaleMetric"] = "cpu"
    external = predictor["autoScaling"]["metrics"][0]["external"]
    del external["metric"]["serverAddress"], external["target"]
    assert refusals(service, runtime) == {"scaleMetric", "serverAddress", "value"}


def test_knative_as_the_readme_says(repo: Path) -> None:
    service, runtime = kserve(repo)
    annotations, predictor = service["metadata"]["annotations"], service["spec"]["predictor"]
    container = runtime["spec"]["containers"][0]
    annotations["serving.kserve.io/deploymentMode"] = "Knative"
    predictor["scaleMetric"] = "concurrency"
    said = (repo / "README.md").read_text()
    said = said[said.index("With Knative") :]
    for name in ("deploymentStrategy", "terminationGracePeriodSeconds", "autoScaling"):
        assert (f"`{name}`" in said) == (name in predictor)
        predictor.pop(name, None)
    assert "the annotation `autoscalerClass`" in said and "without `lifecycle`" in said
    del annotations["serving.kserve.io/autoscalerClass"]
    assert refusals(service, runtime) == {"lifecycle", "ports"}
    del container["lifecycle"]
    container["ports"] = [port for port in container["ports"] if port["name"] != "grpc"]
    assert not refusals(service, runtime)


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
    """The pod that KServe makes: the runtime's container and what the predictor adds to it."""
    service, runtime = kserve(repo)
    predictor = service["spec"]["predictor"]
    theirs, ours = runtime["spec"]["containers"][0], container(repo)
    assert theirs["name"] == "kserve-container"
    added = {key: predictor["model"][key] for key in ("env", "resources")}
    image = {"name": ours["name"], "image": ours["image"]}
    assert theirs | added | image == ours
    pod = plain(repo)["Deployment"]["spec"]["template"]["spec"]
    for key in ("terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert predictor[key] == pod[key]
    assert predictor["deploymentStrategy"] == plain(repo)["Deployment"]["spec"]["strategy"]
    for key in ("volumes", "tolerations"):
        assert runtime["spec"].get(key) == pod.get(key)


def test_service_and_runtime_agree(repo: Path) -> None:
    service, runtime = kserve(repo)
    model = service["spec"]["predictor"]["model"]
    formats = [(each["name"], each["version"]) for each in runtime["spec"]["supportedModelFormats"]]
    assert model["runtime"] == runtime["metadata"]["name"] and model["storageUri"]
    assert tuple(model["modelFormat"].values()) in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    built = f"--target service -t {runtime['spec']['containers'][0]['image']} ."
    assert built in (repo / "Dockerfile").read_text() and built in (repo / "README.md").read_text()
    for each in (runtime, service):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"])


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
    compose = document(repo / "docker-compose.yml")["services"]["twinop"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > needed


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
