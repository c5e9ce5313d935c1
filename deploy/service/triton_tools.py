"""What Triton's own tools (perf_analyzer, Model Analyzer) ask for: a model's configuration and statistics.

The messages: https://github.com/triton-inference-server/server/tree/main/docs/protocol, extensions
model_configuration and statistics.
"""

from collections import defaultdict
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from prometheus_client.registry import Collector

from .errors import invalid
from .loaded_model import LoadedModel
from .settings import SettingsError
from .triton_config import config_of

_WIDE = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
}  # protobuf's JSON has them as texts, Triton's as numbers


def model_config(loaded: LoadedModel) -> Any:
    """Return Triton's ModelConfig of a version; raise ServiceError if Triton has no counterpart of it."""
    try:
        return config_of(loaded)
    except SettingsError as error:
        raise invalid(f"model {loaded.name} has no configuration in Triton's form: {error}") from error


def config_as_json(found: dict[str, Any]) -> dict[str, Any]:
    """Return a ModelConfig as Triton's HTTP interface writes it: all fields, 64-bit integers as numbers."""
    message = found["config"]
    content: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _make_numbers(content, message.DESCRIPTOR)
    return content


def _make_numbers(content: dict[str, Any], descriptor: Descriptor) -> None:
    for field in descriptor.fields:
        value = content.get(field.name)
        if field.type in _WIDE and value is not None:
            content[field.name] = list(map(int, value)) if isinstance(value, list) else int(value)
        elif field.message_type is not None and value:
            inner, each = field.message_type, value if isinstance(value, list) else [value]
            if inner.GetOptions().map_entry:
                inner, each = inner.fields_by_name["value"].message_type, value.values()
            for part in each if inner is not None else ():
                _make_numbers(part, inner)


def statistics(metrics: Collector, model: str = "", version: str = "") -> list[dict[str, Any]]:
    """Return Triton's ModelStatistics of each version that matches, as dicts, from the service's metrics.

    Times are in nanoseconds. All requests of a joined run took the mean time of a run. ONNX Runtime copies
    inputs and outputs within the run, so compute_input and compute_output are 0.
    """
    sums: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for metric in metrics.collect():
        for sample in metric.samples:
            name, number = sample.labels.get("model", ""), sample.labels.get("version", "")
            if name and model in ("", name) and version in ("", number):
                sums[name, number][sample.name] += sample.value
    return [
        {
            "name": name,
            "version": number,
            "inference_count": int(found["twinop_batch_size_sum"]),
            "execution_count": int(found["twinop_batch_size_count"]),
            "inference_stats": _inference_stats(found),
        }
        for (name, number), found in sorted(sums.items())
    ]


def _inference_stats(found: dict[str, float]) -> dict[str, dict[str, int]]:
    answered = found["twinop_request_seconds_count"]
    per_run = found["twinop_compute_seconds_sum"] / max(found["twinop_compute_seconds_count"], 1)
    seconds = {
        "success": (answered, found["twinop_request_seconds_sum"]),
        "fail": (found["twinop_failures_total"], 0.0),
        "queue": (answered, found["twinop_queue_seconds_sum"]),
        "compute_input": (answered, 0.0),
        "compute_infer": (answered, per_run * answered),
        "compute_output": (answered, 0.0),
        "cache_hit": (0, 0.0),
        "cache_miss": (0, 0.0),
    }
    return {name: {"count": int(count), "ns": int(time * 1e9)} for name, (count, time) in seconds.items()}
