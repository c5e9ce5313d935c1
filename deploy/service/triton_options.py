"""ONNX Runtime's options in Triton's config.pbtxt, under the names of its ONNX Runtime backend."""

from collections.abc import Mapping
from typing import Any

from .runtime_options import ProviderOptions, SessionOptions, text

_PARAMETERS = {
    "inter_op_num_threads": "inter_op_thread_count",
    "enable_cpu_mem_arena": "enable_mem_arena",
    "enable_mem_pattern": "enable_mem_pattern",
    "session.use_device_allocator_for_initializers": "session.use_device_allocator_for_initializers",
}
_MODES = {"ORT_SEQUENTIAL": "0", "ORT_PARALLEL": "1"}  # the parameter execution_mode
_LEVELS = {"ORT_ENABLE_BASIC": -1, "ORT_ENABLE_ALL": 0, "ORT_ENABLE_EXTENDED": 1, "ORT_DISABLE_ALL": 2}
_TENSORRT = {  # other names are the same
    "trt_max_workspace_size": "max_workspace_size_bytes",
    "trt_int8_calibration_table_name": "int8_calibration_table_name",
    "trt_int8_use_native_calibration_table": "int8_use_native_calibration_table",
}
_PRECISIONS = {"trt_fp16_enable": "FP16", "trt_bf16_enable": "BF16", "trt_int8_enable": "INT8"}
READ = {
    *(f"parameters.{name}" for name in (*_PARAMETERS.values(), "execution_mode")),
    "optimization.graph.level",
    *(f"optimization.execution_accelerators.gpu_execution_accelerator.{x}" for x in ("name", "parameters")),
}
"""The fields of config.pbtxt that `read` evaluates."""


def write(config: Any, session: SessionOptions, options: ProviderOptions) -> None:
    """Write the options into a ModelConfig.

    Raises:
        ValueError: Triton has no counterpart of an option.
    """
    for name, value in session.given().items():
        if name == "graph_optimization_level" and value in _LEVELS:
            config.optimization.graph.level = _LEVELS[value]
        elif name == "execution_mode":
            config.parameters[name].string_value = _MODES[value]
        elif name in _PARAMETERS:
            config.parameters[_PARAMETERS[name]].string_value = text(value)
        else:
            raise ValueError(f"{name} = {value!r}: Triton's ONNX Runtime backend has no counterpart of it")
    providers = options.given()
    for provider in sorted(providers, reverse=True):  # the first has precedence
        accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name=provider)
        precisions = [name for name in _PRECISIONS if providers[provider].get(name)]
        if len(precisions) > 1:
            raise ValueError(f"{' and '.join(precisions)}: Triton's TensorRT has one precision_mode")
        for name, value in providers[provider].items():
            if name in precisions:
                accelerator.parameters["precision_mode"] = _PRECISIONS[name]
            elif name not in _PRECISIONS:
                accelerator.parameters[_TENSORRT.get(name, name)] = text(value)


def read(config: Any) -> dict[str, Any]:
    """Return the settings `session` and `provider_options`, unchecked.

    Raises:
        ValueError: an accelerator, a level, a mode or a precision is not one of Triton's.
    """
    session = {
        name: config.parameters[ours].string_value
        for name, ours in _PARAMETERS.items()
        if ours in config.parameters
    }
    if "execution_mode" in config.parameters:
        session["execution_mode"] = _name_of(
            "execution_mode", config.parameters["execution_mode"].string_value, _MODES
        )
    if config.optimization.HasField("graph"):
        session["graph_optimization_level"] = _name_of(
            "optimization.graph.level", config.optimization.graph.level, _LEVELS
        )
    providers = {}
    for each in config.optimization.execution_accelerators.gpu_execution_accelerator:
        if each.name not in (known := ProviderOptions.model_fields):
            raise ValueError(f"gpu_execution_accelerator {each.name!r}: there are {', '.join(known)}")
        names = {theirs: name for name, theirs in _TENSORRT.items()} if each.name == "tensorrt" else {}
        providers[each.name] = {
            names.get(key, key): value for key, value in each.parameters.items() if key != "precision_mode"
        }
        if (precision := each.parameters.get("precision_mode", "FP32")) != "FP32":
            providers[each.name][_name_of("precision_mode", precision, _PRECISIONS)] = True
    found = {"session": session, "provider_options": providers}
    return {name: options for name, options in found.items() if options}


def _name_of(what: str, value: Any, values: Mapping[str, Any]) -> str:
    names = {theirs: name for name, theirs in values.items()}
    if value not in names:
        raise ValueError(f"{what}: {value!r} is not one of {', '.join(map(str, names))}")
    return names[value]
