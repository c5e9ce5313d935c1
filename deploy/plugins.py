"""Execution providers that are plugins: packages of their own, such as onnxruntime-ep-openvino."""

import importlib
import importlib.metadata
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from twinop.errors import TwinopWarning

from .cuda import CUDA
from .errors import ProviderError

_PREFIX = "onnxruntime-ep-"
EXAMPLE = f"{_PREFIX}openvino"
_lock = threading.Lock()


@cache
def installed() -> dict[str, Any]:
    """Returns the modules of the installed packages by the name of the provider that they bring."""
    names = {(each.metadata["Name"] or "").lower() for each in importlib.metadata.distributions()}
    found: dict[str, Any] = {}
    for name in sorted(names):
        if name.replace("_", "-").startswith(_PREFIX):
            try:
                module = importlib.import_module(name.replace("-", "_"))
                found |= dict.fromkeys(module.get_ep_names(), module)
            except Exception as error:  # it concerns only those who want its provider
                warnings.warn(f"the package {name} cannot be used: {error}", TwinopWarning, stacklevel=2)
    return found


def is_plugin(provider: str) -> bool:
    """Whether a session takes a provider by its devices. ONNX Runtime also lists plugins that are loaded."""
    import onnxruntime

    if provider == CUDA:  # by its name, also where it is a plugin
        return False
    listed = provider in onnxruntime.get_available_providers()
    return not listed or (provider != "CPUExecutionProvider" and bool(devices_of(provider)))


def devices_of(provider: str) -> list[Any]:
    """Returns the devices of a plugin provider, whose library is loaded first; none: there is no such plugin.

    Raises:
        ProviderError: the plugin cannot be loaded, or finds no device that it runs on.
    """
    import onnxruntime

    if not hasattr(onnxruntime, "get_ep_devices"):  # before 1.23
        return []
    with _lock:
        if (found := _devices(onnxruntime, provider)) or provider not in installed():
            return found
        path = installed()[provider].get_library_path()
        try:
            onnxruntime.register_execution_provider_library(provider, path)
        except Exception as error:
            raise ProviderError(
                f"{provider}: ONNX Runtime does not load its plugin {path}: {error}"
            ) from error
        if found := _devices(onnxruntime, provider):
            return found
        seen = {f"{each.device.type.name} of {each.device.vendor}" for each in onnxruntime.get_ep_devices()}
        raise ProviderError(
            f"{provider} is installed, but supports no device of this machine, which has: "
            f"{', '.join(sorted(seen))}"
        )


def _devices(onnxruntime: Any, provider: str) -> list[Any]:
    return [each for each in onnxruntime.get_ep_devices() if each.ep_name == provider]


def nodes_by_provider(session: Any) -> dict[str, list[tuple[str, str]]]:
    """Returns the name and type of each node by provider; {} where ONNX Runtime is too old."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    found: dict[str, list[tuple[str, str]]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, []).extend((each.name, each.op_type) for each in part.get_nodes())
    return found


def taken_text(taken: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Returns which nodes each provider takes, in words."""
    parts = []
    for provider, nodes in taken.items():
        types = Counter(op_type for _, op_type in nodes)
        listed = ", ".join(f"{op_type} x{count}" for op_type, count in sorted(types.items()))
        parts.append(f"{provider} takes {len(nodes)} nodes: {listed}")
    return "; ".join(parts)
