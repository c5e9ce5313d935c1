"""ONNX Runtime's options for sessions and providers, under its own names: handed to it as they are."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinop.errors import TwinopError

from ..errors import ProviderError

if TYPE_CHECKING:  # settings are read without NumPy
    from ..create_session import Provider

_PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_ENUMS = {"graph_optimization_level": "GraphOptimizationLevel", "execution_mode": "ExecutionMode"}
_REACHES_OUT = re.compile(r"file|folder|path|lib|plugin|external|user_")

Value = str | bool | int | float
Options = Mapping[str, Value]


class OptionError(TwinopError):
    """ONNX Runtime does not take an option of a session."""


def reaching_out(*tables: Options) -> list[str]:
    """Return the options that name files, code or addresses in memory."""
    return sorted(name for table in tables for name in table if _REACHES_OUT.search(name))


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
