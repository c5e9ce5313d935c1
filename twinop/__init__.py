"""twinop: one kernel, two runtimes. Write an op once; run it in PyTorch and in ONNX Runtime.

The parts are `twinop.torch_op`, `twinop.export`, `twinop.deploy` and `twinop.bench`. This module imports
none of them, so that serving a model needs neither torch nor the exporters. Each name below is imported
when it is first used.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .building.compile_source import compile as compile
    from .deploy.check_nodes import libraries_for as libraries_for
    from .libraries.declare import Op as Op
    from .libraries.declare import library_beside as library_beside
    from .libraries.declare import op as op
    from .libraries.declare import second_derivative as second_derivative
    from .libraries.kernel_op import triton_op as triton_op
    from .libraries.library import get_cmake_dir as get_cmake_dir
    from .libraries.library import get_include as get_include
    from .libraries.library import get_library_path as get_library_path
    from .record.body_registry import DefaultInput as DefaultInput

__version__ = "0.3.0"

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reads it at its import

_MODULES = {
    "DefaultInput": "record.body_registry",
    "Op": "libraries.declare",
    "compile": "building.compile_source",
    "get_cmake_dir": "libraries.library",
    "get_include": "libraries.library",
    "get_library_path": "libraries.library",
    "libraries_for": "deploy.check_nodes",
    "library_beside": "libraries.declare",
    "op": "libraries.declare",
    "second_derivative": "libraries.declare",
    "triton_op": "libraries.kernel_op",
}
_PACKAGES = ("bench", "deploy", "export", "torch_op")


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"twinop has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
