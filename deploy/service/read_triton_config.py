"""Read Triton's config.pbtxt into settings, with Triton's own model_config.proto.

Options that change only speed or order are ignored with a line in the log. Unsupported options that change
results are errors, so that a model never answers differently from what its file says.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from twinop.regular_file import read_regular

from ..tensor_specs import Spec
from . import triton_options
from .model_settings import Provider
from .protocol import model_config_pb2
from .settings import MOST_BYTES, SettingsError
from .triton_tensors import differences, is_vector, shape_of

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
KINDS = {Provider.AUTO: "KIND_AUTO", Provider.CPU: "KIND_CPU", Provider.CUDA: "KIND_GPU"}
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
class TritonConfig:
    """A config.pbtxt: Triton's ModelConfig, and its settings as a layer for `Settings.for_model`."""

    path: Path
    message: Any
    settings: Mapping[str, Any]

    def require_fit(self, inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]) -> None:
        """Check the model's interface.

        Raises:
            SettingsError: the model's inputs or outputs differ from the file's.
        """
        batched = self.message.max_batch_size > 0
        problems = [
            problem
            for kind, given, specs in (
                ("input", self.message.input, inputs),
                ("output", self.message.output, outputs),
            )
            for each in given
            for problem in differences(kind, each, specs, batched)
        ]
        if problems:
            raise _wrong(self.path, "the model is another one", problems)


def read_config(path: Path, model: str) -> TritonConfig:
    """Read the config.pbtxt of the folder named `model`.

    Raises:
        SettingsError: the file cannot be read or parsed, or asks for an unsupported feature.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode()
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    except text_format.ParseError as error:
        raise SettingsError(f"{path}: does not parse as Triton's model configuration: {error}") from error
    problems = list(_refused(config, model))
    settings = _settings(config, problems)
    if problems:
        raise _wrong(path, "asks for what this service does not do", problems)
    if ignored := sorted(set(_ignored(config))):
        _log.info("%s: without effect here: %s", path, ", ".join(ignored))
    return TritonConfig(path, config, settings)


def _wrong(path: Path, what: str, problems: Sequence[str]) -> SettingsError:
    return SettingsError(f"{path}: {what}:" + "".join(f"\n  - {problem}" for problem in problems))


def _refused(config: Any, model: str) -> Iterator[str]:
    for each, _ in config.ListFields():
        if each.name in _REFUSED:
            yield f"{each.name}: {_REFUSED[each.name]}"
    if config.name not in ("", model):
        yield f"name: the model is called {config.name!r}, its folder {model!r}: rename one of them"
    for name in ("backend", "platform"):
        if getattr(config, name) not in _OURS:
            yield f"{name}: {getattr(config, name)!r}, expected onnxruntime"
    if config.model_transaction_policy.decoupled:
        yield "model_transaction_policy: decoupled answers"
    for each in (*config.input, *config.output):
        if each.data_type not in model_config_pb2.DataType.values():
            yield f"data_type of {each.name}: {each.data_type} is not one of Triton's"
        if each.HasField("reshape") and not is_vector(each, config.max_batch_size > 0):
            yield f"reshape of {each.name}: clients send what the model takes"
        if each.is_shape_tensor:
            yield f"is_shape_tensor of {each.name}: that is TensorRT's"
    for each in config.input:
        if each.allow_ragged_batch:
            yield f"allow_ragged_batch of {each.name}: rows of different shapes"


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


def _settings(config: Any, problems: list[str]) -> dict[str, Any]:
    """Return what the file sets, and add to `problems` what cannot be set here."""
    batching, batched = config.dynamic_batching, config.max_batch_size > 0
    given = {  # 0 is also the value of a missing field
        "max_batch_size": config.max_batch_size,
        "preferred_batch_sizes": tuple(batching.preferred_batch_size),
        "max_queue_delay_us": batching.max_queue_delay_microseconds,
        "max_queue": batching.default_queue_policy.max_queue_size,
        "intra_op_threads": config.parameters[THREADS].string_value if THREADS in config.parameters else "",
        "warm_up": _fixed_shapes(config, batched),
    }
    settings = {name: value for name, value in given.items() if value}
    if config.HasField("version_policy"):
        settings["versions"] = _versions(config.version_policy)
    settings |= _instances(config.instance_group, problems)
    settings |= _library(config.model_operations.op_library_filename)
    try:
        options = triton_options.read(config)
    except ValueError as error:
        problems.append(str(error))
    else:
        if settings.get("provider") == Provider.CPU:  # Triton does not use them there either
            options.pop("provider_options", None)
        settings |= options
    if config.model_warmup:
        sample = config.model_warmup[0]
        rows = (max(sample.batch_size, 1),) if batched else ()
        settings["warm_up"] = {name: (*rows, *each.dims) for name, each in sample.inputs.items()}
    return settings


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
    kinds = {group.Kind.Name(group.kind) for group in active} - {KINDS[Provider.AUTO], "KIND_MODEL"}
    if len(kinds) > 1:
        problems.append("instance_group: instances on the CPU and on GPUs at once")
    for group in active:
        if group.secondary_devices or set(group.gpus) - {0}:
            problems.append("instance_group: devices other than GPU 0; choose it with CUDA_VISIBLE_DEVICES")
    found: dict[str, Any] = {"instances": sum(group.count or 1 for group in active)}
    for provider, kind in KINDS.items():
        if kinds == {kind}:
            found["provider"] = provider
    return found


def _library(names: Sequence[str]) -> dict[str, Any]:
    """Return the libraries' paths. One that is missing here is the container's: search for its file name."""
    paths = map(Path, names)
    libraries = [path if path.is_absolute() and path.is_file() else Path(path.name) for path in paths]
    return {"library": tuple(libraries)} if libraries else {}


def _fixed_shapes(config: Any, batched: bool) -> dict[str, tuple[int, ...]]:
    """Return shapes to warm up with if the file fixes every dimension."""
    fixed = all(size > 0 for each in config.input for size in each.dims)
    return {each.name: shape_of(each, batched) for each in config.input} if fixed else {}
