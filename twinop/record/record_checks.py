"""Checks of a library's records that no compiler makes: `twinop build` and the torch adapter run them."""

import ast
import builtins
from collections.abc import Iterable
from typing import Any

from ..errors import RecordError
from .call_checks import check_attributes
from .names import refuse_keyword
from .op_spec import OpSpec


def check_record(record: OpSpec, ops: Iterable[str]) -> None:
    """Checks what follows from a record alone: names, formulas, defaults, which kernel a call selects.

    `ops` are those that a formula may call. TwinopError: a name cannot be that of an argument in Python.
    RecordError: a formula is wrong, a default is outside its limits, or two combinations of dtypes have the
    same inputs, so that no call reaches the second one.
    """
    attributes = [entry.name for entry in record.attributes]
    for name in (*(entry.name for entry in record.inputs), *attributes):
        refuse_keyword(f"{record.qualified_name}: argument", name)
    if "self" in attributes:
        raise RecordError(
            f"{record.qualified_name}: an attribute is called self, which exporters use; rename it"
        )
    check_formulas(record, ops)
    try:
        check_attributes(record, {each.name: each.default for each in record.attributes})
    except RecordError as error:
        raise RecordError(f"{record.qualified_name}: the default of {error}") from error
    for wanted in record.combinations:
        selected = record.combination_of({each.name: wanted[each.name] for each in record.inputs})
        if selected is not None and selected != wanted:
            given, gives = (
                [f"{name} {each[name]}" for name in wanted if (name in record.outputs) == is_output]
                for each, is_output in ((wanted, False), (wanted, True))
            )
            other = [f"{name} {selected[name]}" for name in record.outputs if name in selected]
            raise RecordError(
                f"{record.qualified_name}: dtypes: {', '.join(given)} gives both {', '.join(other)} and "
                f"{', '.join(gives)}; expected combinations that differ in their inputs"
            )


def check_formulas(record: OpSpec, ops: Iterable[str], torch: Any = None) -> None:
    """Checks that the record's formulas are Python, give gradients of its inputs, and use only what there is.

    `ops` are those that a formula may call; with the module `torch`, the functions that it takes of it are
    checked, too. RecordError: a formula does not parse, or one of its names is unknown.
    """
    inputs = [entry.name for entry in record.inputs]
    outputs = [f"grad_{name}" for name in record.outputs] if len(record.outputs) > 1 else ["grad"]
    attributes = [entry.name for entry in record.attributes]
    known = [*inputs, *record.outputs, *attributes, *outputs]  # in the order of the message
    for gradient in record.gradients:
        where = f"{record.domain}::{record.name}: derivative `{', '.join(gradient.names)} = {gradient.text}`"
        try:
            tree = ast.parse(gradient.text, mode="eval")
        except SyntaxError as error:
            raise RecordError(f"{where} is not a Python expression: {error.msg}") from error
        if wrong := [name for name in gradient.inputs if name not in inputs]:
            raise RecordError(
                f"{where} is of {', '.join(wrong)}, expected inputs of the op: {', '.join(inputs)}"
            )
        if twice := sorted(_free_names(tree) & {*outputs, "torch"} & {*inputs, *attributes, *record.outputs}):
            raise RecordError(
                f"{where} uses {', '.join(twice)}, which is also an argument or an output of the op. "
                "Rename that one"
            )
        if unknown := sorted(_free_names(tree) - {*known, *ops, "torch", *dir(builtins)}):
            raise RecordError(
                f"{where} uses {', '.join(unknown)}, expected {', '.join(known)}, torch, or an op by its name"
            )
        attributes_used = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for node in attributes_used if torch else ():
            if ast.unparse(node.value) == "torch" and not hasattr(torch, node.attr):
                raise RecordError(f"{where} uses torch.{node.attr}, which this torch has not")
        known += [f"grad_{name}" for name in gradient.inputs]


def _free_names(tree: ast.AST) -> set[str]:
    """The names that an expression takes from outside, without those of its lambdas and comprehensions."""
    own = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return names_in(tree) - own


def names_in(tree: ast.AST, but_shapes: bool = False) -> set[str]:
    """The names that an expression uses; with `but_shapes`, other than as `name.shape`."""
    shapes = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "shape" and but_shapes
    }
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in shapes}
