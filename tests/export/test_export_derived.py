"""Tests that the exporters follow from the records: no file repeats an op's arguments, which bind by name."""

import warnings
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from export_models import each_exporter
from samples import RECORDS
from torch.onnx._internal.torchscript_exporter import registration

from twinop.errors import ExportError
from twinop.export import attach_bodies, register_symbolics, translation_table
from twinop.model.schema import onnx_value
from twinop.record.op_spec import DOMAIN, Attribute


def test_every_op_has_a_translation_and_a_symbolic() -> None:
    """The ops of backward passes have none."""
    table: dict[Any, Any] = translation_table()
    register_symbolics()
    names = {f"{DOMAIN}::{record.functional_name}" for record in RECORDS.values()}
    assert {op.name() for op in table if op.namespace == DOMAIN} == names
    assert all(registration.registry.is_registered_op(name, 20) for name in names)


class Calls(torch.nn.Module):
    """Passes attributes by position, by name and in another order."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        op = torch.ops.custom_domain.pad_affine
        by_position = op(x, None, w, 2.5, "minus", [1, 2])
        return by_position, op(x, None, w, pads=[3, 4], scale=0.5), op(x, bias=w, sign="minus")


WANTED = [
    (["x", None, "w"], {"scale": 2.5, "sign": "minus", "pads": (1, 2)}),
    (["x", None, "w"], {"scale": 0.5, "pads": (3, 4), "sign": "plus"}),
    (["x", None, "w"], {"scale": pytest.approx(0.1), "sign": "minus", "pads": (0, 1)}),
]


@each_exporter
def test_torchs_own_export_with_our_tables(exporter: str, tmp_path: Path) -> None:
    """A user calls torch.onnx.export; a bare op in the table would take 2.5 for an input or a string."""
    inputs = (torch.randn(2, 3), torch.randn(3))
    model = Calls().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            options: dict[str, Any] = {"custom_translation_table": translation_table(), "verbose": False}
            program = torch.onnx.export(model, inputs, dynamo=True, **options)
            assert program is not None
            exported = program.model
        else:
            register_symbolics()
            path = str(tmp_path / "m.onnx")
            torch.onnx.export(model, inputs, path, dynamo=False, opset_version=20, input_names=["x", "w"])
            exported = ir.load(path)
    attach_bodies(exported)
    nodes = [node for node in exported.graph if node.domain == DOMAIN]
    found = [
        ([v and v.name for v in node.inputs], {k: _plain(a.value) for k, a in node.attributes.items()})
        for node in nodes
    ]
    assert found == WANTED


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def test_values_that_are_not_constants() -> None:
    for kind in ("int", "float", "int[]"):
        value = [ir.val("size")] if kind == "int[]" else ir.val("size")
        said = r"attribute n depends on the input.*ONNX attributes are constants"
        with pytest.raises(ExportError, match=said):
            onnx_value(Attribute("n", kind), value)
