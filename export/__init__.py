"""Exports torch models to ONNX with twinop's ops, and with function bodies for runtimes without the library.

    from twinop.export import export

    report = export(model, (x,), "model.onnx", dynamic={"x": [0]})    # checked and compared before it is kept

For a `torch.onnx.export` of your own: `translation_table()` (dynamo=True) or `register_symbolics()`
(dynamo=False), then `attach_bodies(model)`. `@body` gives an op of your own its function body, see
`twinop/model/bodies.py`.

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
    from twinop.model.attach import attach_bodies as attach_bodies
    from twinop.model.bodies import DefaultInput as DefaultInput
    from twinop.model.bodies import body as body
    from twinop.record.op_schema import op_schema as op_schema

    from .dynamo import translation_table as translation_table
    from .exporter import export as export
    from .report import ExportReport as ExportReport
    from .torchscript import register_symbolics as register_symbolics

_MODULES = {
    "DefaultInput": "twinop.model.bodies",
    "ExportReport": "twinop.export.report",
    "attach_bodies": "twinop.model.attach",
    "body": "twinop.model.bodies",
    "export": "twinop.export.exporter",
    "op_schema": "twinop.record.op_schema",
    "register_symbolics": "twinop.export.torchscript",
    "translation_table": "twinop.export.dynamo",
}


def __dir__() -> list[str]:
    return sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"twinop.export has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
