"""What Triton's own tools ask for: configuration and statistics, over HTTP and gRPC."""

from collections.abc import Iterator
from typing import Any

import pytest
import service_models as models
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from service_fixtures import Served, serve, tensor

from twinop.deploy.service.protocol import pb

ROW = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    settings = "max_batch_size = 8\nmax_queue_delay_us = 300\nintra_op_threads = 1"
    models.place(folder, "relu", models.relu(shape=("N", 4)), settings=settings)
    models.place(folder, "log", models.log())
    models.place(folder, "any_rank", models.identity("FP32", None), settings="warm_up = { x = [1] }")
    with serve(folder, "--allow-model-libraries") as server:
        yield server


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        yield client


@pytest.fixture(scope="module")
def grpc(served: Served) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        yield client


def test_the_configuration_over_http_has_numbers_and_all_fields(http: Any) -> None:
    config = http.get_model_config("relu", "1")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("relu", "onnxruntime", 8)
    [given] = config["input"]
    assert (given["name"], given["data_type"], given["dims"]) == ("x", "TYPE_FP32", [4])
    assert given["optional"] is False
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 300
    assert config["parameters"] == {"intra_op_thread_count": {"string_value": "1"}}
    assert [config["output"][0][name] for name in ("name", "dims")] == ["y", [4]]


def test_the_configuration_over_grpc_is_the_same(http: Any, grpc: Any) -> None:
    config = grpc.get_model_config("relu").config
    assert config.max_batch_size == 8 and list(config.input[0].dims) == [4]
    assert config.dynamic_batching.max_queue_delay_microseconds == 300
    assert config.model_operations.op_library_filename == ["libcustom_relu.so"]
    assert (
        http.get_model_config("log")["max_batch_size"] == grpc.get_model_config("log").config.max_batch_size
    )


def counted(stats: dict[str, Any]) -> dict[str, int]:
    """Return the counts of all durations."""
    return {name: int(each["count"]) for name, each in stats["inference_stats"].items()}


def test_statistics_count_answers_failures_and_rows(served: Served, http: Any, grpc: Any) -> None:
    [before] = http.get_inference_statistics("relu", "1")["model_stats"]
    for _ in range(3):
        assert served.infer("relu", ROW, ROW | {"name": "y"}).status == 400
    for _ in range(5):
        assert served.infer("relu", tensor("x", "FP32", [2, 4], [-1, 0, 1, 2] * 2)).status == 200
    [after] = http.get_inference_statistics("relu", "1")["model_stats"]
    assert (after["name"], after["version"]) == ("relu", "1")
    assert after["inference_count"] - before["inference_count"] == 10
    assert after["execution_count"] - before["execution_count"] == 5
    more = {name: count - counted(before)[name] for name, count in counted(after).items()}
    assert {name: more[name] for name in ("success", "fail", "queue", "compute_infer")} == {
        "success": 5,
        "fail": 3,
        "queue": 5,
        "compute_infer": 5,
    }
    stats = after["inference_stats"]
    assert 0 < stats["compute_infer"]["ns"] <= stats["success"]["ns"]

    [same] = grpc.get_inference_statistics("relu").model_stats
    assert same.execution_count == after["execution_count"]
    assert same.inference_stats.success.ns == stats["success"]["ns"]
    everything = [(each.name, each.version) for each in grpc.get_inference_statistics().model_stats]
    assert everything == [("any_rank", "1"), ("log", "1"), ("relu", "1")]


@pytest.mark.parametrize("what", ["config", "stats"])
def test_a_model_that_is_not_there(served: Served, what: str) -> None:
    assert served.ask("GET", f"/v2/models/nothing/{what}").status == 404
    said = served.ask("GET", f"/v2/models/relu/versions/7/{what}")
    assert said.status == 404 and "model relu has no version 7; it has: 1" in said.error


def test_a_model_without_a_counterpart_in_triton(served: Served) -> None:
    said = served.ask("GET", "/v2/models/any_rank/config")
    assert said.status == 400
    assert "model any_rank has no configuration in Triton's form: x is" in said.error
    assert "and config.pbtxt needs a known rank" in said.error
    with served.stub() as stub, pytest.raises(Exception, match="and config.pbtxt needs a known rank"):
        stub.ModelConfig(pb.ModelConfigRequest(name="any_rank"))
