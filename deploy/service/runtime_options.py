"""ONNX Runtime's options for sessions and providers, under its own names: checked, then handed to it.

ONNX Runtime takes every value as a text, ignores unknown entries of a session, and reports a wrong option of
a provider only where the provider is installed. So names and types are checked here.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ProviderError

_CUDA, _TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"

if TYPE_CHECKING:  # the supervisor of several processes checks the settings, and imports no NumPy
    from ..create_session import Provider


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class SessionOptions(_Options):
    """Attributes of `onnxruntime.SessionOptions`. Names that begin with "session." are its config entries."""

    model_config = ConfigDict(extra="allow")

    graph_optimization_level: Literal[
        "ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL"
    ] = "ORT_ENABLE_ALL"
    execution_mode: Literal["ORT_SEQUENTIAL", "ORT_PARALLEL"] = "ORT_SEQUENTIAL"
    inter_op_num_threads: int = Field(0, ge=0, le=1024)
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True

    @model_validator(mode="after")
    def _entries(self) -> "SessionOptions":
        for name, value in (self.model_extra or {}).items():
            if not name.startswith("session."):
                known = ", ".join(type(self).model_fields)
                raise ValueError(f'no such option: {name}. There are: {known}, "session.…"')
            if "file" in name or "folder" in name:
                raise ValueError(
                    f"{name} names files, which settings cannot: a model has its own folder only"
                )
            if not isinstance(value, str | int):
                raise ValueError(f"{name} must be a text, a number or true or false, not {value!r}")
        return self


class CudaOptions(_Options):
    """Options of ONNX Runtime's CUDA provider."""

    gpu_mem_limit: int = 0
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kNextPowerOfTwo"
    cudnn_conv_algo_search: Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT"] = "EXHAUSTIVE"
    cudnn_conv_use_max_workspace: bool = True
    cudnn_conv1d_pad_to_nc1d: bool = False
    do_copy_in_default_stream: bool = True
    enable_skip_layer_norm_strict_mode: bool = False
    fuse_conv_bias: bool = False
    prefer_nhwc: bool = False
    sdpa_kernel: int = 0
    use_ep_level_unified_stream: bool = False
    use_tf32: bool = True


class TensorrtOptions(_Options):
    """Options of ONNX Runtime's TensorRT provider, but for those that load code."""

    trt_auxiliary_streams: int = -1
    trt_bf16_enable: bool = False
    trt_builder_optimization_level: int = 3
    trt_context_memory_sharing_enable: bool = False
    trt_cuda_graph_enable: bool = False
    trt_engine_cache_enable: bool = False
    trt_engine_cache_path: str = ""
    trt_engine_cache_prefix: str = ""
    trt_force_sequential_engine_build: bool = False
    trt_fp16_enable: bool = False
    trt_int8_calibration_table_name: str = ""
    trt_int8_enable: bool = False
    trt_int8_use_native_calibration_table: bool = False
    trt_layer_norm_fp32_fallback: bool = False
    trt_max_partition_iterations: int = 1000
    trt_max_workspace_size: int = 0
    trt_min_subgraph_size: int = 1
    trt_profile_max_shapes: str = ""
    trt_profile_min_shapes: str = ""
    trt_profile_opt_shapes: str = ""
    trt_timing_cache_enable: bool = False
    trt_timing_cache_path: str = ""


class ProviderOptions(_Options):
    cuda: CudaOptions = CudaOptions()
    tensorrt: TensorrtOptions = TensorrtOptions()


def text(value: bool | int | str) -> str:
    """Return a value as ONNX Runtime takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def apply(session: SessionOptions, options: Any) -> None:
    """Set the session's options on an `onnxruntime.SessionOptions`."""
    import onnxruntime

    enums = {
        "graph_optimization_level": onnxruntime.GraphOptimizationLevel,
        "execution_mode": onnxruntime.ExecutionMode,
    }
    for name, value in session.given().items():
        if name.startswith("session."):
            options.add_session_config_entry(name, text(value))
        else:
            setattr(options, name, getattr(enums[name], value) if name in enums else value)


def with_options(providers: "Sequence[Provider]", given: ProviderOptions) -> "list[Provider]":
    """Return the providers with their options. Options for TensorRT put it before CUDA.

    Raises:
        ProviderError: TensorRT is not installed.
    """
    import onnxruntime

    options = {_CUDA: given.cuda.given()}
    if "tensorrt" in given.model_fields_set:
        available = onnxruntime.get_available_providers()
        if _TENSORRT not in available:
            raise ProviderError(
                f"provider_options.tensorrt: {_TENSORRT} is not in this ONNX Runtime; it has: "
                f"{', '.join(available)}"
            )
        options[_TENSORRT] = given.tensorrt.given()
        providers = [_TENSORRT, *providers]
    names = [each if isinstance(each, str) else each[0] for each in providers]
    return [(name, {key: text(each) for key, each in options.get(name, {}).items()}) for name in names]
