"""torch -> ONNX: models with twinop's ops, and with function bodies for runtimes without the library.

    from twinop.export import export

    report = export(model, (x,), "model.onnx", dynamic={"x": [0]})    # checked and compared before it is kept

For a `torch.onnx.export` of your own: `translation_table()` (dynamo=True) or `register_symbolics()`
(dynamo=False), then `replace_nodes(model, ops)` for standard operators, `fuse_sums(model)` and
`attach_bodies(model)`. An op of your own gets its function body
with `@body`, see `bodies.py`.

Nothing is imported before it is used: `op_schema` and `attach_bodies` need no torch.
"""

if __name__ != "twinop.export":
    raise ImportError(
        f"import twinop.export, not {__name__}: a second copy would have function bodies of its own. "
        "Put the repository root (not its parent folders) on PYTHONPATH"
    )

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinop.export.attach import attach_bodies
    from twinop.export.bodies import Neutral, body
    from twinop.export.dynamo import translation_table
    from twinop.export.exporter import export
    from twinop.export.fuse_add_norm import fuse_sums
    from twinop.export.report import ExportReport
    from twinop.export.schema import op_schema
    from twinop.export.standard_nodes import replace_nodes
    from twinop.export.torchscript import register_symbolics

__all__ = [
    "ExportReport",
    "Neutral",
    "attach_bodies",
    "body",
    "export",
    "fuse_sums",
    "op_schema",
    "register_symbolics",
    "replace_nodes",
    "translation_table",
]

_HOMES = {
    "ExportReport": "report",
    "Neutral": "bodies",
    "attach_bodies": "attach",
    "body": "bodies",
    "export": "exporter",
    "fuse_sums": "fuse_add_norm",
    "op_schema": "schema",
    "register_symbolics": "torchscript",
    "replace_nodes": "standard_nodes",
    "translation_table": "dynamo",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"twinop.export has no attribute {name!r}")
    return getattr(importlib.import_module(f"twinop.export.{_HOMES[name]}"), name)
