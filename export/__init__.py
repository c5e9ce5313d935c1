"""Exports torch models to ONNX with twinop's ops, and with function bodies for runtimes without the library.

    from twinop.export import export

    report = export(model, (x,), "model.onnx", dynamic={"x": [0]})    # checked and compared before it is kept

For a `torch.onnx.export` of your own: `translation_table()` (dynamo=True) or `register_symbolics()`
(dynamo=False), then `attach_bodies(model)`. `@body` gives an op of your own its function body, see
`bodies.py`.

Each name is imported when it is first used: `op_schema` and `attach_bodies` need no torch.
"""

if __name__ != "twinop.export":
    raise ImportError(
        f"import twinop.export, not {__name__}: a second copy would have function bodies of its own. "
        "Put the repository root (not its parent folders) on PYTHONPATH"
    )

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinop.op_schema import op_schema as op_schema

    from .attach import attach_bodies as attach_bodies
    from .bodies import DefaultInput as DefaultInput
    from .bodies import body as body
    from .dynamo import translation_table as translation_table
    from .exporter import export as export
    from .report import ExportReport as ExportReport
    from .torchscript import register_symbolics as register_symbolics

_MODULES = {
    "DefaultInput": "bodies",
    "ExportReport": "report",
    "attach_bodies": "attach",
    "body": "bodies",
    "export": "exporter",
    "op_schema": "schema",
    "register_symbolics": "torchscript",
    "translation_table": "dynamo",
}


def __dir__() -> list[str]:
    return sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"twinop.export has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
