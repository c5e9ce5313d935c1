"""Read Triton's config.pbtxt into settings, with Triton's own model_config.proto.

Options that change only speed or order are ignored with a line in the log. Unsupported options that change
results are errors, so that a model never answers differently from what its file says.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from ..tensor_specs import Spec
from . import triton_options
from .datatypes import datatype_of
from .model_settings import Provider
from .settings import SettingsError

FILE = "config.pbtxt"
_log = logging.getLogger(__name__)

_OURS = {"", "onnxruntime", "onnxruntime_onnx"}  # values of backend and platform
_REFUSED = {  # unsupported fields that change the results or what a client must send
    "sequence_batching": "sequences of requests",
    "ensemble_scheduling": "ensembles",
    "batch_input": "batch inputs",
    "batch_output": "batch outputs",
    "model_repository_agents": "repository agents",
    "cc_model_filenames": "a file for each compute capability",
}
THREADS = "intra_op_thread_count"  # a parameter of Triton's ONNX Runtime backend
_READ = {
    "name", "platform", "backend", "version_policy", "max_batch_size", "default_model_filename",
    "model_operations", "model_transaction_policy", f"parameters.{THREADS}",
    "model_warmup.name", "model_warmup.batch_size", "model_warmup.inputs",
    *(f"input.{name}" for name in ("name", "data_type", "dims", "optional")),
    *(f"output.{name}" for name in ("name", "data_type", "dims")),
    *(f"instance_group.{name}" for name in ("kind", "count", "gpus", "passive")),
    *(f"dynamic_batching.{name}" for name in ("preferred_batch_size", "max_queue_delay_microseconds")),
    "dynamic_batching.default_queue_policy.max_queue_size",
    *triton_options.READ,
}  # fmt: skip


@dataclass(frozen=True)
class Declared:
    """An input or output in the file; the shape includes the batch axis, if there is one."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # -1 for any size


@dataclass(frozen=True)
class TritonConfig:
    """The content of a config.pbtxt. `settings` is a layer for `Settings.for_model`."""

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[Declared, ...] = ()
    filename: str = ""

    def require_fit(self, inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]) -> None:
        """Check the model's interface.

        Raises:
            SettingsError: the model's inputs or outputs differ from the file's.
        """
        problems = [
            problem
            for kind, declared, specs in (
                ("input", self.inputs, inputs),
                ("output", self.outputs, outputs),
            )
            for each in declared
            for problem in _differences(kind, each, specs)
        ]
        if problems:
            raise _wrong(self.path, "the model is another one", problems)


def read_config(path: Path, model: str) -> TritonConfig:
    """Read the config.pbtxt of the folder named `model`.

    Raises:
        SettingsError: the file cannot be read or parsed, or asks for an unsupported feature.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    try:
        config = text_format.Parse(text, protocol().ModelConfig())
    except text_format.ParseError as error:
        raise SettingsError(f"{path}: does not parse as Triton's model configuration: {error}") from error
    problems = list(_refused(config, model))
    try:
        settings = _settings(config, path)
    except ValueError as error:
        problems += error.args
    if problems:
        raise _wrong(path, "asks for what this service does not do", problems)
    if ignored := sorted(set(_ignored(config))):
        _log.info("%s: without effect here: %s", path, ", ".join(ignored))
    batched = config.max_batch_size > 0
    return TritonConfig(
        path,
        settings,
        tuple(_declared(each, batched) for each in config.input),
        tuple(_declared(each, batched) for each in config.output),
        config.default_model_filename,
    )


@cache
def protocol() -> Any:
    """Return tritonclient's compiled model_config.proto.

    Raises:
        SettingsError: tritonclient is not installed, or does not fit the installed protobuf.
    """
    try:
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise SettingsError(
            "config.pbtxt is read with Triton's model_config.proto, from a package that is not installed: "
            "pip install 'tritonclient[grpc]', or put the settings into a twinop.toml"
        ) from error
    except Exception as error:  # protobuf raises its own types for incompatible versions
        raise SettingsError(
            f"config.pbtxt needs another version of protobuf or tritonclient: {error}"
        ) from error
    return model_config_pb2


def _wrong(path: Path, what: str, problems: Sequence[str]) -> SettingsError:
    return SettingsError(f"{path}: {what}:" + "".join(f"\n  - {problem}" for problem in problems))


# ------------------------------------------------------------------------------------------------ reading


def _refused(config: Any, model: str) -> list[str]:
    found = [
        f"{each.name}: {_REFUSED[each.name]}" for each, _ in config.ListFields() if each.name in _REFUSED
    ]
    if config.name and config.name != model:
        found.append(f"name: the model is called {config.name!r}, its folder {model!r}: rename one of them")
    for name in ("backend", "platform"):
        if getattr(config, name) not in _OURS:
            found.append(f"{name}: {getattr(config, name)!r}, expected onnxruntime")
    if config.model_transaction_policy.decoupled:
        found.append("model_transaction_policy: decoupled answers")
    for each in (*config.input, *config.output):
        if each.data_type not in protocol().DataType.values():
            found.append(f"data_type of {each.name}: {each.data_type} is none of Triton's")
        if each.HasField("reshape") and not _is_vector(each, config.max_batch_size > 0):
            found.append(f"reshape of {each.name}: clients send what the model takes")
        if each.is_shape_tensor:
            found.append(f"is_shape_tensor of {each.name}: that is TensorRT's")
    for each in config.input:
        if each.allow_ragged_batch:
            found.append(f"allow_ragged_batch of {each.name}: rows of different shapes")
    return found


def _ignored(message: Any, prefix: str = "") -> Iterator[str]:
    """Yield the fields that are set in the file but have no effect here, such as optimization.graph."""
    for each, value in message.ListFields():
        path = prefix + each.name
        if path == "parameters":
            yield from {f"{path}.{key}" for key in value} - _READ
        elif any(read.startswith(f"{path}.") for read in _READ):
            for part in (value,) if isinstance(value, Message) else value:
                yield from _ignored(part, f"{path}.")
        elif path not in _READ:
            yield path
    if not prefix and len(message.model_warmup) > 1:
        yield "model_warmup but its first sample"


def _settings(config: Any, path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: has one argument for each problem.
    """
    settings: dict[str, Any] = {}
    if config.max_batch_size > 0:  # 0 is also the value of a missing field
        settings["max_batch_size"] = config.max_batch_size
    problems: list[str] = []
    if config.HasField("dynamic_batching"):
        settings |= _batching(config.dynamic_batching)
    if config.HasField("version_policy"):
        settings["versions"] = _versions(config.version_policy)
    settings |= _instances(config.instance_group, problems)
    settings |= _library(config.model_operations.op_library_filename, problems)
    try:
        options = triton_options.read(config)
    except ValueError as error:
        problems.append(str(error))
    else:
        if settings.get("provider") == Provider.CPU:  # Triton does not use them there either
            options.pop("provider_options", None)
        settings |= options
    if THREADS in config.parameters:
        settings["intra_op_threads"] = config.parameters[THREADS].string_value  # pydantic converts it to int
    if config.model_warmup:
        settings["warm_up"] = _warm_up(config.model_warmup[0], config.max_batch_size > 0)
    elif shapes := _fixed_shapes(config):
        settings["warm_up"] = shapes
    if problems:
        raise ValueError(*problems)
    return settings


def _batching(batching: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if batching.preferred_batch_size:
        found["preferred_batch_sizes"] = tuple(batching.preferred_batch_size)
    if batching.max_queue_delay_microseconds:
        found["max_queue_delay_us"] = batching.max_queue_delay_microseconds
    if batching.default_queue_policy.max_queue_size:
        found["max_queue"] = batching.default_queue_policy.max_queue_size
    return found


def _versions(policy: Any) -> Any:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return "all"
    if choice == "specific":
        return tuple(policy.specific.versions)
    count = policy.latest.num_versions or 1
    return "latest" if count == 1 else f"latest:{count}"


def _instances(groups: Any, problems: list[str]) -> dict[str, Any]:
    active = [group for group in groups if not group.passive]
    if not active:
        return {}
    kinds = {group.Kind.Name(group.kind) for group in active} - {"KIND_AUTO", "KIND_MODEL"}
    if len(kinds) > 1:
        problems.append("instance_group: instances on the CPU and on GPUs at once")
    for group in active:
        if group.secondary_devices or set(group.gpus) - {0}:
            problems.append("instance_group: devices other than GPU 0; choose it with CUDA_VISIBLE_DEVICES")
    found: dict[str, Any] = {"instances": sum(group.count or 1 for group in active)}
    if kinds == {"KIND_GPU"}:
        found["provider"] = Provider.CUDA
    elif kinds == {"KIND_CPU"}:
        found["provider"] = Provider.CPU
    return found


def _library(names: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Return the library's path. A path that is missing here is the container's: search for its file name."""
    if len(names) > 1:
        problems.append(
            f"op_library_filename: {', '.join(names)}; ONNX Runtime takes one library per domain and "
            "session, so link their ops into one (twinop_add_library in CMake)"
        )
    if not names:
        return {}
    path = Path(names[0])
    return {"library": path if path.is_absolute() and path.is_file() else Path(path.name)}


def _warm_up(sample: Any, batched: bool) -> dict[str, tuple[int, ...]]:
    rows = (max(sample.batch_size, 1),) if batched else ()
    return {name: (*rows, *each.dims) for name, each in sample.inputs.items()}


def _is_vector(tensor: Any, batched: bool) -> bool:
    """Return whether a reshape denotes a batched vector, whose dims would otherwise be empty."""
    return batched and list(tensor.dims) == [1] and not tensor.reshape.shape


def _dims(tensor: Any) -> Sequence[int]:
    """Return the model's dims without the batch axis."""
    dims: Sequence[int] = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    return dims


def _fixed_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes to warm up with if the file fixes every dimension."""
    rows = (1,) if config.max_batch_size > 0 else ()
    fixed = {each.name: (*rows, *_dims(each)) for each in config.input if all(size > 0 for size in each.dims)}
    return fixed if len(fixed) == len(config.input) else {}


def _declared(tensor: Any, batched: bool) -> Declared:
    datatype = protocol().DataType.Name(tensor.data_type).removeprefix("TYPE_")
    shape = (-1, *_dims(tensor)) if batched else tuple(tensor.dims)
    return Declared(tensor.name, "BYTES" if datatype == "STRING" else datatype, shape)


def _differences(kind: str, declared: Declared, specs: Mapping[str, Spec]) -> list[str]:
    spec = specs.get(declared.name)
    if spec is None:
        return [f"{kind} {declared.name!r}: the model has {', '.join(specs)}"]
    found = []
    datatype = datatype_of(spec.numpy_dtype) or spec.type
    if declared.datatype not in ("INVALID", datatype):  # INVALID: not given in the file
        found.append(f"data_type of {kind} {declared.name}: {declared.datatype}, the model has {datatype}")
    if spec.shape is not None and not _fits(declared.shape, spec.shape):
        shape = [size if isinstance(size, int) else -1 for size in spec.shape]
        found.append(
            f"dims of {kind} {declared.name}: {list(declared.shape)} with the batch axis, if any; "
            f"the model has {shape}"
        )
    return found


def _fits(declared: Sequence[int], shape: Sequence[int | str | None]) -> bool:
    """Return whether the file's sizes are the model's or narrower. [1] stands for a scalar."""
    if not shape and tuple(declared) == (1,):
        return True
    return len(declared) == len(shape) and all(
        size == given or not isinstance(size, int) for given, size in zip(declared, shape, strict=True)
    )
