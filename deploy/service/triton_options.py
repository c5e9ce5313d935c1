"""ONNX Runtime's options in Triton's config.pbtxt, under the names of its ONNX Runtime backend."""

from collections.abc import Mapping
from typing import Any

from .runtime_options import Options, text

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


def write(config: Any, session: Options, providers: Mapping[Any, Options]) -> None:
    """Write the options into a ModelConfig.

    Raises:
        ValueError: Triton has no counterpart of an option.
    """
    for name, value in session.items():
        if name == "graph_optimization_level" and value in _LEVELS:
            config.optimization.graph.level = _LEVELS[str(value)]
        elif name == "execution_mode" and value in _MODES:
            config.parameters[name].string_value = _MODES[str(value)]
        elif name in _PARAMETERS:
            config.parameters[_PARAMETERS[name]].string_value = text(value)
        else:
            raise ValueError(f"{name} = {value!r}: Triton's ONNX Runtime backend has no counterpart of it")
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
