"""Loading a version: what is known of it, its first runs, the comparison with function bodies, a GPU."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import service_models
from onnx import TensorProto, helper
from service_codecs import raw, values
from service_loads import loaded

from twinop.deploy import session
from twinop.deploy.create_session import open_session
from twinop.deploy.errors import ModelError, ProviderError
from twinop.deploy.service import loading
from twinop.deploy.service.errors import OUT_OF_MEMORY, ServiceError
from twinop.deploy.service.instance import Instance, LoadedModel
from twinop.deploy.service.settings import SettingsError
from twinop.record.tolerance import difference


def test_auto_says_which_provider_it_took(
    libraries: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twinop.deploy.cuda.driver", lambda: None)
    with caplog.at_level(logging.INFO):
        model = loaded(tmp_path, service_models.relu(), provider="auto")
    assert model.session.device == "cpu" and "no NVIDIA driver" in model.session.reason
    assert "runs on cpu (no NVIDIA driver" in caplog.text and "CustomRelu x1 from " in caplog.text
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider was asked for .*\n  - no NVIDIA driver"):
        loaded(tmp_path, service_models.relu(), provider="cuda")


def test_warm_up_at_the_shapes_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = Instance.run

    def recorded(self: Instance, parts: Any, outputs: Any) -> Any:
        seen.append([{name: array.shape for name, array in part.items()} for part in parts])
        return run(self, parts, outputs)

    monkeypatch.setattr(Instance, "run", recorded)
    loaded(tmp_path, service_models.add(), warm_up={"a": (3, 4)}, max_batch_size=5)
    # b has the same dimension N; the second run is at the largest batch. Then rows are compared.
    assert seen[:2] == [[{"a": (3, 4), "b": (3, 4)}], [{"a": (5, 4), "b": (5, 4)}]]
    with pytest.raises(ModelError, match="not enough memory to load it: Unable to allocate"):
        loaded(tmp_path, service_models.relu(), warm_up={"x": (1 << 45, 4)})
    with pytest.raises(SettingsError, match="warm_up names 'z'; the model's inputs: x"):
        loaded(tmp_path, service_models.relu(), warm_up={"z": (1,)})
    with pytest.raises(SettingsError, match=r"warm_up: input x is FP32\[1, 5\].* must be 4, not 5"):
        loaded(tmp_path, service_models.relu(), warm_up={"x": (1, 5)})


def test_what_may_run_on_the_event_loop_s_thread(tmp_path: Path) -> None:
    body = "t (int64 i, bool c, float[1] v) => (bool d, float[1] w) { d = Identity(c) w = Add(v, v) }"
    loop = f"(int64 n, bool c, float[1] x) => (float[1] y) {{ y = Loop <body = {body}> (n, c, x) }}"
    models = service_models.add(), service_models.relu(), service_models.parsed(loop)
    assert [loaded(tmp_path, each).may_run_on_loop for each in models] == [True, False, False]


def test_a_first_run_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reshape = "(float[N] x) => (float[2, 4] y) { y = Reshape(x, shape) }"  # x must have 8 elements
    model = service_models.parsed(reshape, shape=np.array([2, 4]))
    with caplog.at_level(logging.WARNING):
        served = loaded(tmp_path, model)  # the size 1 for N is only a guess
    assert re.search(r"was not warmed up, set warm_up: .*its first run, at x \[1\], failed", caplog.text)
    assert served.instances[0].run([{"x": np.ones(8, np.float32)}], ["y"])["y"].shape == (2, 4)
    assert loaded(tmp_path, model, warm_up={"x": (8,)})
    with pytest.raises(ModelError, match=r"its first run, at x \[9\], failed"):
        loaded(tmp_path, model, warm_up={"x": (9,)})


def test_an_input_of_unknown_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = loaded(tmp_path, service_models.relu(shape=None))
    assert "not warmed up: the rank of an input is unknown" in caplog.text
    assert model.describe()["inputs"][0]["shape"] == [-1]
    assert loaded(tmp_path, service_models.relu(shape=None), warm_up={"x": (2, 2)}).difference == "none"


def test_a_default_may_be_left_out(tmp_path: Path) -> None:
    session = loaded(tmp_path, service_models.optional_scale()).session
    assert [spec.name for spec in session.required] == ["x"] and list(session.inputs) == ["x", "scale"]
    batched = loaded(tmp_path, service_models.optional_scale(), max_batch_size=4)  # scale has no rows
    assert list(batched.session.inputs) == ["x"]


def test_bodies_that_would_take_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make weights dense: a model that fits may not fit twice."""
    monkeypatch.setattr(loading, "body_bytes", lambda model: 3 << 30)
    said = "not compared: the function bodies take about 3.22 GB of memory"
    assert loaded(tmp_path, service_models.relu()).difference == said


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-30])
def test_small_outputs_that_disagree(libraries: dict[str, Path], tmp_path: Path, scale: float) -> None:
    """The kernel's 0 is as wrong for outputs of 1e-5 as for those of 1."""
    model = service_models.relu(body=False)
    model.functions.append(service_models.wrong_body())
    model.graph.node[0].input[0] = "small"
    model.graph.node.insert(0, helper.make_node("Mul", ["x", "scale"], ["small"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-scale], np.float32), "scale"))
    with pytest.raises(ModelError, match="disagree in output y .* error .* where the largest value is [1-9]"):
        loaded(tmp_path, model)
    assert loaded(tmp_path, model, compare_bodies=False).difference is None


def test_bodies_that_no_kernel_runs(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = service_models.relu("FP16", body=False)
    body = service_models.relu_body("FP16")
    body.node[0].attribute[0].i = TensorProto.BFLOAT16
    body.node[1].attribute[0].t.CopyFrom(helper.make_tensor("zero", TensorProto.BFLOAT16, [], [0.0]))
    model.functions.append(body)
    found = loaded(tmp_path, model).difference
    assert found is not None and found.startswith("not compared: the function bodies do not run: ")
    assert "Less" in found


@pytest.mark.parametrize("largest", [1e4, 1.0, 1e-5, 1e-30])
def test_a_difference_is_relative_to_the_largest_value(largest: float) -> None:
    a = np.array([1.0, -0.5, 0.25], np.float32) * np.float32(largest)
    assert difference(a, np.zeros_like(a)) == pytest.approx(1)
    assert difference(a, a * np.float32(1.01)) == pytest.approx(0.01, rel=1e-3)
    assert difference(np.zeros_like(a), a) > 1 and difference(a, a, largest) == 0
    assert difference(a * np.float32(1e-3), a, largest) == pytest.approx(1, rel=1e-2)


def test_differences_of_special_values() -> None:
    a = np.array([1.0, np.nan, np.inf, 100], np.float32)
    assert difference(a, a) == difference(np.zeros(0), np.zeros(0)) == 0
    assert difference(a, np.array([2.0, np.nan, np.inf, 100], np.float32)) == pytest.approx(0.01)
    for other in ([1, 1, np.inf, 100], [1, np.nan, -np.inf, 100], [1, np.nan, 5, 100], [1, np.nan]):
        assert difference(a, np.array(other, np.float32)) == float("inf")
    assert difference(a, a.astype(np.float64)) == difference(np.array([1]), np.array([2])) == float("inf")
    small = np.full(30_000, 1 / 30_000).astype(np.float16)  # below the normal numbers
    assert difference(small, np.nextafter(small, np.float16(1))) < 2e-3
    assert difference(small, small * np.float16(2)) > 0.5 < difference(small, np.zeros_like(small))


def small(batch_axis: int, scale: float) -> onnx.ModelProto:
    """y = Softmax(x) along an axis, made small and, for the batch axis, 0 for a row alone."""
    nodes = f"""
        shares = Softmax <axis = {batch_axis}> (x)
        apart = Sub(shares, one)
        y = Mul(apart, scale)
    """
    one, factor = np.array([1 - batch_axis], np.float32), np.array([scale], np.float32)
    return service_models.parsed(f"(float[N, 4] x) => (float[N, 4] y) {{ {nodes} }}", one=one, scale=factor)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-20])
def test_small_rows_are_joined_only_where_they_are_independent(tmp_path: Path, scale: float) -> None:
    assert not loaded(tmp_path, small(0, scale), max_batch_size=4).rows_independent
    assert loaded(tmp_path, small(1, scale), max_batch_size=4).rows_independent


OF_ROWS = "(float[N, 4] x) => (float[N, N] y) { t = Transpose <perm = [1, 0]> (x) y = MatMul(x, t) }"
DEPENDENT = [
    (service_models.centred(), "output y differs: error .* where the largest value is .*, accepted"),
    (service_models.parsed(OF_ROWS), r"output y has shape \[2, 2\] for two rows"),
]


@pytest.mark.parametrize(("model", "words"), DEPENDENT, ids=["centred", "products of rows"])
def test_rows_that_depend_on_each_other_are_not_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: onnx.ModelProto, words: str
) -> None:
    assert not loaded(tmp_path, model, max_batch_size=4).rows_independent
    assert re.search(f"its rows depend on each other, so requests are not batched: {words}", caplog.text)
    assert loaded(tmp_path, service_models.relu(), max_batch_size=4).rows_independent


def test_the_session_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, spinning = [], "session.intra_op.allow_spinning"

    def opened(*arguments: Any, options: Any, **more: Any) -> Any:
        given.append(options)
        return open_session(*arguments, options=options, **more)

    monkeypatch.setattr(loading, "open_session", opened)
    asked = {"execution_mode": "ORT_PARALLEL", "inter_op_num_threads": 2, "enable_cpu_mem_arena": False}
    asked |= {"session.use_device_allocator_for_initializers": "1"}
    loaded(tmp_path, service_models.relu(), session=asked, intra_op_threads=2)
    for options in given:  # the session, and that of the function bodies
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        assert options.inter_op_num_threads == options.intra_op_num_threads == 2
        assert not options.enable_cpu_mem_arena
        assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
        assert options.get_session_config_entry(spinning) == "0"
    assert len(given) == 2
    loaded(tmp_path, service_models.identity("FP32"), session={spinning: "1"})
    assert given[2].get_session_config_entry(spinning) == "1"


@pytest.mark.parametrize(
    ("name", "value"),
    [("level", 1), ("execution_mode", "fast"), ("enable_mem_pattern", "x"), ("long." * 300, "1")],
)
def test_what_a_session_does_not_take_is_one_message(tmp_path: Path, name: str, value: Any) -> None:
    said = re.escape(f"session: onnxruntime.SessionOptions does not take {name} = {value!r}")
    with pytest.raises(SettingsError, match=said):
        loaded(tmp_path, service_models.relu(), session={name: value})


@pytest.mark.parametrize(
    ("limit", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 0), ("900000 100000", 0)]
)
def test_a_groups_quota(limit: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(loading, "_GROUPS", tmp_path)
    monkeypatch.setattr(loading, "_OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/pods/a\n")
    assert loading.quota() == 0
    (tmp_path / "pods/a").mkdir(parents=True)
    (tmp_path / "pods/a/cpu.max").write_text(f"{limit}\n")
    assert loading.quota() == cores


def on_gpu(folder: Path, model: onnx.ModelProto, **given: Any) -> LoadedModel:
    return loaded(folder, model, **{"provider": "cuda"} | given)


SHAPES = ((1, 3), (5, 3), (2, 3), (300, 3), (1, 3), (0, 3))


@pytest.mark.cuda
@pytest.mark.parametrize("datatype", service_models.ELEMENTS)
def test_every_datatype_comes_back(tmp_path: Path, datatype: str) -> None:
    instance = on_gpu(tmp_path, service_models.identity(datatype)).instances[0]
    kept = []  # earlier results must not change
    for seed, shape in enumerate(SHAPES):
        first = values(datatype, *shape, seed=seed)
        second = values(datatype, 2, 3, seed=seed + 100)
        kept.append((instance.run([{"x": first}], ["y"])["y"], first))
        both = instance.run([{"x": first}, {"x": second}], ["y"])["y"]
        kept.append((both, np.concatenate([first, second])))
    rows = values(datatype, 8, 3)[::2]
    kept.append((instance.run([{"x": rows}], ["y"])["y"], rows))
    for found, expected in kept:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert raw(found) == raw(expected)


@pytest.mark.cuda
def test_auto_takes_the_gpu(tmp_path: Path) -> None:
    model = on_gpu(tmp_path, service_models.mlp(64, 128, 16), provider="auto", max_batch_size=8)
    assert (model.session.device, model.session.reason) == ("cuda:0", "CUDA works here")
    assert model.custom_nodes == ["CustomRelu x1"]
    assert model.difference is not None and "not compared" not in model.difference
    rows = np.random.default_rng(0).standard_normal((5, 64), np.float32)
    found = model.instances[0].run([{"x": rows[:2]}, {"x": rows[2:]}], ["y"])["y"]
    expected = session(service_models.mlp(64, 128, 16), ["CPUExecutionProvider"]).run({"x": rows})["y"]
    np.testing.assert_allclose(found, expected, atol=5e-3)
    model.close()


@pytest.mark.cuda
def test_out_of_gpu_memory(tmp_path: Path) -> None:
    instance = on_gpu(tmp_path, service_models.expand()).instances[0]
    x = np.ones(1, np.float32)
    for _ in range(2):
        with pytest.raises(ServiceError, match="not enough memory for this request") as error:
            instance.run([{"x": x, "shape": np.array([1 << 40])}], ["y"])
        assert error.value.failure is OUT_OF_MEMORY
        assert instance.run([{"x": x, "shape": np.array([3, 2])}], ["y"])["y"].shape == (3, 2)


@pytest.mark.cuda
def test_memory_comes_back(tmp_path: Path, gpu_alone: None) -> None:
    import torch

    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    model = service_models.mlp(4096, 4096, 4096)  # 128 MiB of weights
    on_gpu(tmp_path, model, instances=2).close()
    before = used()
    for _ in range(4):
        on_gpu(tmp_path, model, instances=2).close()
    assert used() - before < 200 << 20
