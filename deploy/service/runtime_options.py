"""ONNX Runtime's options for sessions and providers, under its own names: checked, then handed to it.

ONNX Runtime takes every value as a text, ignores unknown entries of a session, and reports a wrong option of
a provider only where the provider is installed. So names and types are checked here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..create_session import Provider
from ..errors import ProviderError

Kind = type[bool] | type[int] | type[str] | tuple[str, ...]

SESSION: dict[str, Kind] = {
    "graph_optimization_level": (
        "ORT_DISABLE_ALL",
        "ORT_ENABLE_BASIC",
        "ORT_ENABLE_EXTENDED",
        "ORT_ENABLE_LAYOUT",
        "ORT_ENABLE_ALL",
    ),
    "execution_mode": ("ORT_SEQUENTIAL", "ORT_PARALLEL"),
    "inter_op_num_threads": int,
    "enable_cpu_mem_arena": bool,
    "enable_mem_pattern": bool,
}
"""The attributes of `onnxruntime.SessionOptions`. Names that begin with "session." are its config entries."""

PROVIDERS: dict[str, dict[str, Kind]] = {
    "cuda": {
        "gpu_mem_limit": int,
        "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
        "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "cudnn_conv_use_max_workspace": bool,
        "cudnn_conv1d_pad_to_nc1d": bool,
        "do_copy_in_default_stream": bool,
        "enable_skip_layer_norm_strict_mode": bool,
        "fuse_conv_bias": bool,
        "prefer_nhwc": bool,
        "sdpa_kernel": int,
        "tunable_op_enable": bool,
        "tunable_op_max_tuning_duration_ms": int,
        "tunable_op_tuning_enable": bool,
        "use_ep_level_unified_stream": bool,
        "use_tf32": bool,
    },
    "tensorrt": {
        "trt_auxiliary_streams": int,
        "trt_bf16_enable": bool,
        "trt_build_heuristics_enable": bool,
        "trt_builder_optimization_level": int,
        "trt_context_memory_sharing_enable": bool,
        "trt_cuda_graph_enable": bool,
        "trt_engine_cache_enable": bool,
        "trt_engine_cache_path": str,
        "trt_engine_cache_prefix": str,
        "trt_force_sequential_engine_build": bool,
        "trt_fp16_enable": bool,
        "trt_int8_calibration_table_name": str,
        "trt_int8_enable": bool,
        "trt_int8_use_native_calibration_table": bool,
        "trt_layer_norm_fp32_fallback": bool,
        "trt_max_partition_iterations": int,
        "trt_max_workspace_size": int,
        "trt_min_subgraph_size": int,
        "trt_profile_max_shapes": str,
        "trt_profile_min_shapes": str,
        "trt_profile_opt_shapes": str,
        "trt_sparsity_enable": bool,
        "trt_tactic_sources": str,
        "trt_timing_cache_enable": bool,
        "trt_timing_cache_path": str,
    },
}
_EXECUTION = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_BOOLEANS = {"0": False, "false": False, "1": True, "true": True}


def check_session(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session's options with their types.

    Raises:
        ValueError: an option is unknown or has another type.
    """
    entries = {name: value for name, value in given.items() if name.startswith("session.")}
    if named := [name for name in entries if "file" in name or "folder" in name]:
        raise ValueError(f"{named[0]} names files, which settings cannot: a model has its own folder only")
    if "intra_op_num_threads" in given:
        raise ValueError("intra_op_num_threads: it is the setting intra_op_threads of the model")
    found = _checked({name: given[name] for name in given.keys() - entries.keys()}, SESSION, '"session.…"')
    for name, value in entries.items():
        if not isinstance(value, str | int):
            raise ValueError(f"{name} must be a text, a number or true or false, not {value!r}")
        found[name] = value
    return found


def check_providers(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each provider with their types.

    Raises:
        ValueError: a provider or an option is unknown, or has another type.
    """
    found = {}
    for name, options in given.items():
        if name not in PROVIDERS:
            raise ValueError(f"no such provider: {name}. There are: {', '.join(PROVIDERS)}")
        if not isinstance(options, Mapping):
            raise ValueError(f"{name} must be a table of options, not {options!r}")
        found[name] = _checked(options, PROVIDERS[name])
    return found


def _checked(given: Mapping[str, Any], known: Mapping[str, Kind], *more: str) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"no such option: {name}. There are: {', '.join((*known, *more))}")
        found[name] = _value(name, value, known[name])
    return found


def _value(name: str, value: Any, kind: Kind) -> bool | int | str:
    """Return the value in its type; config.pbtxt has texts only."""
    if isinstance(kind, tuple):
        if value not in kind:
            raise ValueError(f"{name} must be one of {', '.join(kind)}, not {value!r}")
        return str(value)
    if kind is bool and isinstance(value, str):
        value = _BOOLEANS.get(value.lower(), value)
    if kind is int and isinstance(value, str) and value.removeprefix("-").isdecimal():
        value = int(value)
    if type(value) is not kind:
        words = {bool: "true or false", int: "an integer", str: "a text"}
        raise ValueError(f"{name} must be {words[kind]}, not {value!r}")
    return value


def text(value: bool | int | str) -> str:
    """Return a value as ONNX Runtime takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def apply(given: Mapping[str, Any], options: Any) -> None:
    """Set the checked options on an `onnxruntime.SessionOptions`."""
    import onnxruntime

    enums = {
        "graph_optimization_level": onnxruntime.GraphOptimizationLevel,
        "execution_mode": onnxruntime.ExecutionMode,
    }
    for name, value in given.items():
        if name in enums:
            setattr(options, name, getattr(enums[name], value))
        elif name in SESSION:
            setattr(options, name, value)
        else:
            options.add_session_config_entry(name, text(value))


def with_options(providers: Sequence[Provider], given: Mapping[str, Mapping[str, Any]]) -> list[Provider]:
    """Return the providers with their checked options. Options for TensorRT put it before CUDA.

    Raises:
        ProviderError: TensorRT is not installed.
    """
    import onnxruntime

    texts = {
        _EXECUTION[name]: {key: text(value) for key, value in options.items()}
        for name, options in given.items()
    }
    first = _EXECUTION["tensorrt"]
    available = onnxruntime.get_available_providers()
    if first in texts and first not in available:
        raise ProviderError(
            f"provider_options.tensorrt: {first} is not in this ONNX Runtime; it has: {', '.join(available)}"
        )
    names = [each if isinstance(each, str) else each[0] for each in providers]
    names = [first, *names] if first in texts and _EXECUTION["cuda"] in names else names
    return [(name, texts[name]) if name in texts else name for name in names]
