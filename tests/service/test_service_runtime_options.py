"""Options of ONNX Runtime's sessions and providers, which are handed to it."""

import os
import re
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import service_models
from service_loads import loaded, repository_of

from twinop.deploy.create_session import open_session
from twinop.deploy.errors import ProviderError
from twinop.deploy.service.folders import scan
from twinop.deploy.service.runtime_options import OptionError, Value, with_options
from twinop.deploy.service.settings import Settings, SettingsError

SESSION = {
    "graph_optimization_level": "ORT_ENABLE_EXTENDED",
    "execution_mode": "ORT_PARALLEL",
    "inter_op_num_threads": 2,
    "enable_cpu_mem_arena": False,
    "enable_mem_pattern": False,
    "session.use_device_allocator_for_initializers": "1",
}
SPINNING = "session.intra_op.allow_spinning"
CUDA: dict[str, Value] = {
    "gpu_mem_limit": 1 << 33,
    "arena_extend_strategy": "kSameAsRequested",
    "cudnn_conv_algo_search": "HEURISTIC",
    "use_tf32": False,
}
TENSORRT: dict[str, Value] = {
    "trt_fp16_enable": True,
    "trt_max_workspace_size": 1 << 30,
    "trt_engine_cache_path": "cache",
}
NAMES = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("name", "value"), [("level", 1), ("execution_mode", "fast"), ("enable_mem_pattern", "x")]
)
def test_what_a_session_does_not_take_is_one_message(tmp_path: Path, name: str, value: Value) -> None:
    said = re.escape(f"session: onnxruntime.SessionOptions does not take {name} = {value!r}")
    with pytest.raises(OptionError, match=said):
        loaded(tmp_path, service_models.relu(), session={name: value})


@pytest.mark.parametrize(
    "option",
    [
        'session = { "session.model_external_initializers_file_folder_path" = "/" }',
        'provider_options.tensorrt = { trt_extra_plugin_lib_paths = "evil.so" }',
        "provider_options.cuda = { user_compute_stream = 1 }",
        "provider_options.cuda = { gpu_external_alloc = 1 }",
        "session = { enable_profiling = true }",
        'session = { profile_file_prefix = "x" }',
        'session = { "ep.context_enable" = "1" }',
        'session = { "session.debug_layout_transformation" = "1" }',
        'session = { "session.intra_op_thread_affinities" = "1;2" }',
        'session = { logid = "x" }',
        "session = { log_severity_level = 0 }",
        "session = { use_per_session_threads = false }",
        'session = { "some.option.of.the.future" = "1" }',
        "session = { an_attribute_of_the_future = 1 }",
        "provider_options.tensorrt = { trt_engine_cache_enable = true }",
        "provider_options.tensorrt = { trt_dump_subgraphs = true }",
        "provider_options.tensorrt = { trt_timing_cache_enable = true }",
        "provider_options.cuda = { device_id = 1 }",
    ],
)
def test_a_folder_cannot_name_files_code_or_addresses(tmp_path: Path, option: str) -> None:
    service_models.place(tmp_path, "m", service_models.relu(), settings=option)
    own = scan(tmp_path)["m"].own
    with pytest.raises(SettingsError, match="model m: its folder sets .*which name files, code or addresses"):
        Settings().for_model("m", own)
    assert Settings(models={"m": own}).for_model("m").model_dump(exclude_unset=True) == own


@pytest.mark.parametrize("name", ["intra_op_num_threads", "inter_op_num_threads"])
def test_a_folder_gets_no_more_threads_than_cores(name: str) -> None:
    """Whichever way they are asked for."""
    cores = len(os.sched_getaffinity(0))
    asked = Settings().for_model("m", {"session": {name: 1000}, "intra_op_threads": 1000})
    assert int(asked.session[name]) <= cores and asked.intra_op_threads <= cores
    for count in (100_000, -1, "2500", True, 2.5):
        with pytest.raises(SettingsError, match=f"model m: {name} should be from 0 to 1024, not "):
            Settings().for_model("m", {"session": {name: count}})
    assert Settings(models={"m": {"session": {name: 1000}}}).for_model("m").session == {name: 1000}


def test_what_a_folder_may_set() -> None:
    session = {"session.disable_prepacking": "1", "enable_mem_pattern": False}
    options = {"cuda": {"use_tf32": False}, "tensorrt": {"trt_fp16_enable": True}}
    asked = Settings().for_model("m", {"session": session, "provider_options": options})
    assert asked.session == session and asked.provider_options == options


def test_options_for_all_models_and_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service_models.place(
        tmp_path, "own", service_models.relu(), settings='[session]\nexecution_mode = "ORT_PARALLEL"\n'
    )
    service_models.place(tmp_path, "other", service_models.relu())
    (tmp_path / "twinop.toml").write_text(
        "[model.session]\ninter_op_num_threads = 3\n[models.other.provider_options.cuda]\nuse_tf32 = false\n"
    )
    settings = repository_of(monkeypatch, tmp_path).settings
    own = settings.for_model("own", scan(tmp_path)["own"].own)
    assert own.session == {"execution_mode": "ORT_PARALLEL"}
    other = settings.for_model("other")
    assert other.session == {"inter_op_num_threads": 3}
    assert other.provider_options == {"cuda": {"use_tf32": False}}


def test_the_session_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def opened(*arguments: Any, options: Any, **more: Any) -> Any:
        given.append(options)
        return open_session(*arguments, options=options, **more)

    monkeypatch.setattr("twinop.deploy.service.loading.open_session", opened)
    loaded(tmp_path, service_models.relu(), session=SESSION, intra_op_threads=2)
    for options in given:  # the session, and that of the function bodies
        assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        assert options.inter_op_num_threads == options.intra_op_num_threads == 2
        assert not options.enable_cpu_mem_arena and not options.enable_mem_pattern
        assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
        assert options.get_session_config_entry(SPINNING) == "0"
    assert len(given) == 2
    loaded(tmp_path, service_models.identity("FP32"), session={SPINNING: "1"})
    assert given[2].get_session_config_entry(SPINNING) == "1"


def test_providers_get_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: NAMES)
    cuda = {
        "gpu_mem_limit": str(1 << 33),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }
    assert with_options(NAMES[1:], {"cuda": CUDA}) == [(NAMES[1], cuda), (NAMES[2], {})]
    tensorrt = {
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": str(1 << 30),
        "trt_engine_cache_path": "cache",
    }
    options = {"tensorrt": TENSORRT}
    assert with_options(NAMES[1:], options) == [(NAMES[0], tensorrt), (NAMES[1], {}), (NAMES[2], {})]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: NAMES[1:])
    with pytest.raises(ProviderError, match="TensorrtExecutionProvider is not in this ONNX Runtime"):
        with_options(NAMES[1:], options)


@pytest.mark.cuda
def test_cuda_takes_its_options(tmp_path: Path) -> None:
    model = loaded(tmp_path, service_models.relu(), provider="cuda", provider_options={"cuda": CUDA})
    assert model.session.device == "cuda:0" and model.difference == "none"
