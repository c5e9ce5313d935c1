"""twinop: one kernel, two runtimes. Write an op once; run it in PyTorch and in ONNX Runtime.

The parts are `twinop.torch_op`, `twinop.export`, `twinop.deploy` and `twinop.bench`. This module imports
none of them, so that serving a model needs neither torch nor the exporters. Each name below is imported
when it is first used.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bodies import DefaultInput as DefaultInput
    from .building.compile_source import compile as compile
    from .declare import Op as Op
    from .declare import library_beside as library_beside
    from .declare import op as op
    from .declare import second_derivative as second_derivative
    from .deploy.check_nodes import libraries_for as libraries_for
    from .kernel_op import triton_op as triton_op
    from .library import get_cmake_dir as get_cmake_dir
    from .library import get_include as get_include
    from .library import get_library_path as get_library_path

__version__ = "0.3.0"

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reads it at its import

_MODULES = {
    "DefaultInput": "bodies",
    "Op": "declare",
    "compile": "building.compile_source",
    "get_cmake_dir": "library",
    "get_include": "library",
    "get_library_path": "library",
    "libraries_for": "deploy.check_nodes",
    "library_beside": "declare",
    "op": "declare",
    "second_derivative": "declare",
    "triton_op": "kernel_op",
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
