"""ONNX Runtime's options for sessions and providers, under its own names: handed to it as they are."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinop.errors import TwinopError

from ..errors import ProviderError

if TYPE_CHECKING:  # settings are read without NumPy
    from ..create_session import Provider

_PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_ENUMS = {"graph_optimization_level": "GraphOptimizationLevel", "execution_mode": "ExecutionMode"}
_THREADS = ("intra_op_num_threads", "inter_op_num_threads")
# What a model's own folder may set: how its own runs compute, and nothing that names or writes files, has
# code or addresses, fills logs, or concerns other models. Unknown ones are not among them.
_IN_FOLDERS = frozenset((
    *_ENUMS, *_THREADS, "enable_mem_pattern", "enable_mem_reuse", "enable_cpu_mem_arena",
    "use_deterministic_compute", "session.intra_op.allow_spinning", "session.inter_op.allow_spinning",
    "session.dynamic_block_base", "session.set_denormal_as_zero", "session.disable_prepacking",
    "session.use_device_allocator_for_initializers", "session.disable_quant_qdq",
    "session.disable_double_qdq_remover", "session.enable_quant_qdq_cleanup",
    "session.qdq_matmulnbits_accuracy_level", "optimization.enable_gelu_approximation",
    "optimization.disable_specified_optimizers", "mlas.enable_gemm_fastmath_arm64_bfloat16",
    "ep.cuda.fpa_intb_gemm",
    "gpu_mem_limit", "arena_extend_strategy", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace",
    "cudnn_conv1d_pad_to_nc1d", "do_copy_in_default_stream", "use_tf32", "prefer_nhwc", "fuse_conv_bias",
    "sdpa_kernel", "enable_skip_layer_norm_strict_mode",
    "trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable", "trt_max_workspace_size",
    "trt_max_partition_iterations", "trt_min_subgraph_size", "trt_builder_optimization_level",
    "trt_sparsity_enable", "trt_context_memory_sharing_enable", "trt_layer_norm_fp32_fallback",
    "trt_build_heuristics_enable", "trt_auxiliary_streams", "trt_profile_min_shapes",
    "trt_profile_max_shapes", "trt_profile_opt_shapes",
))  # fmt: skip

MOST_THREADS = 1024
Value = str | bool | int | float
Options = Mapping[str, Value]


class OptionError(TwinopError):
    """ONNX Runtime does not take an option of a session."""


def not_for_folders(*tables: Options) -> list[str]:
    """Return the options that a model's own folder may not set."""
    return sorted({name for table in tables for name in table} - _IN_FOLDERS)


def with_threads(session: Options, most: int) -> dict[str, Value]:
    """Return a folder's session options with at most so many threads; OptionError: a number is impossible."""
    for name in _THREADS:
        count = session.get(name, 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_THREADS:
            raise OptionError(f"{name} should be from 0 to {MOST_THREADS}, not {count!r}")
    return {name: min(int(value), most) if name in _THREADS else value for name, value in session.items()}


def text(value: Value) -> str:
    """Return a value as ONNX Runtime takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def set_options(options: Any, given: Options) -> None:
    """Set attributes of an `onnxruntime.SessionOptions`, and config entries, whose names have a dot.

    Raises:
        OptionError: there is no such attribute, or it does not take the value.
    """
    import onnxruntime

    for name, value in given.items():
        if "." in name:
            options.add_session_config_entry(name, text(value))
            continue
        try:
            enum = getattr(onnxruntime, _ENUMS[name]) if name in _ENUMS else None
            setattr(options, name, getattr(enum, str(value)) if enum is not None else value)
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"session: onnxruntime.SessionOptions does not take {name} = {value!r}: {error}"
            ) from error


def with_options(providers: "Sequence[Provider]", given: Mapping[Any, Options]) -> "list[Provider]":
    """Return the providers with their options; those for TensorRT, if it is installed, put it before CUDA."""
    import onnxruntime

    if "tensorrt" in given:
        available = onnxruntime.get_available_providers()
        if _PROVIDERS["tensorrt"] not in available:
            raise ProviderError(
                f"provider_options.tensorrt: {_PROVIDERS['tensorrt']} is not in this ONNX Runtime; it has: "
                f"{', '.join(available)}"
            )
        providers = [_PROVIDERS["tensorrt"], *providers]
    options = {_PROVIDERS[name]: table for name, table in given.items()}
    names = [each if isinstance(each, str) else each[0] for each in providers]
    return [(name, {key: text(each) for key, each in options.get(name, {}).items()}) for name in names]
