"""One declaration gives an op to every layer. No layer repeats the op's arguments."""

import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import op_bodies  # noqa: F401 (registers the test ops' bodies)
import pytest
import torch
from record_driver import ROOT
from samples import RECORDS, has_derivative

from twinop import torch_op
from twinop.export import op_schema, translation_table
from twinop.export.bodies import find_body
from twinop.library import find_library, read_library
from twinop.record import DOMAIN, DOMAIN_VERSION, Record
from twinop.testing.one_node import make_session, one_node_model

ALL = torch_op.records()  # with the backward ops
CPU = ["CPUExecutionProvider"]
each_op = pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))


@pytest.mark.parametrize("record", ALL.values(), ids=list(ALL))
def test_torch_has_the_op(record: Record) -> None:
    name = f"{DOMAIN}::{record.name}"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ["CPU", "CUDA", "Autograd", "Meta", "FuncTorchBatched", "SparseCPU", "QuantizedCPU", "MkldnnCPU"]
    assert {key: has_kernel(name, key) for key in keys} == dict.fromkeys(keys, True)
    parameters = inspect.signature(getattr(torch_op, record.name)).parameters.values()
    declared = [entry.name for entry in record.inputs] + [entry.name for entry in record.attributes]
    assert [parameter.name for parameter in parameters] == declared
    assert (has_derivative(record) or record.is_backward) and record.devices[0] == "cpu"


def test_backward_ops_are_torchs_only() -> None:
    backward = {name: record for name, record in ALL.items() if record.is_backward}
    assert backward and set(backward) | set(RECORDS) == set(ALL)
    model = one_node_model(
        backward["relu_backward"], {"grad_y": "float32", "y": "float32", "grad_x": "float32"}, [True] * 2, {}
    )
    with pytest.raises(Exception, match="CustomReluBackward"):
        make_session(model, find_library("custom_ops"), "cpu")
    table: dict[Any, Any] = translation_table()
    assert {op.name() for op in table if op.namespace == DOMAIN} == {f"{DOMAIN}::{name}" for name in RECORDS}


@each_op
def test_onnx_declares_the_op_like_the_record(record: Record) -> None:
    schema: Any = op_schema(record)  # onnx's enumerations have no types
    assert (schema.name, schema.domain, schema.since_version) == (record.onnx_name, DOMAIN, DOMAIN_VERSION)
    assert [(entry.name, entry.option.name == "Optional") for entry in schema.inputs] == [
        (entry.name, entry.optional) for entry in record.inputs
    ]
    assert [entry.name for entry in schema.outputs] == list(record.outputs)
    kinds = {"int": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING", "int[]": "INTS"}
    assert {
        name: (attribute.type.name, attribute.required) for name, attribute in schema.attributes.items()
    } == {entry.name: (kinds[entry.kind], entry.required) for entry in record.attributes}
    body = find_body(record.name)
    assert body is not None
    body.check(record)


# ---------------------------------------------------------------------------- declared once

FOLDERS = ("kernels", "torch_op", "ort_customop", "export", "deploy", "twinop", "cmake")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):  # does not follow the links in twinop/
            if "templates" in path.parts:  # files of other projects
                continue
            if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".cmake"} and path.is_file():
                yield path


@cache
def header(record: Record) -> Path | None:
    """Returns the header that registers the op, or None for an op of the tests."""
    name = record.name.removesuffix("_backward")
    registers = re.compile(rf"^TWINOP_(?!FUNCTION)\w+\({name}\b", re.MULTILINE)
    found = [path for path in (ROOT / "kernels").rglob("*.h") if registers.search(path.read_text())]
    assert len(found) <= 1, f"{record.name} is registered in {found}"
    return found[0] if found else None


def arguments(record: Record) -> set[str]:
    return {entry.name for entry in record.inputs} | {entry.name for entry in record.attributes}


def may_name() -> set[Path]:
    """Returns the files that may list an op's arguments.

    These are the headers of records, the function bodies and the modules. Other tests compare the bodies and
    the modules with the records.
    """
    return {*(ROOT / "kernels/ops").glob("*.h")} | {
        ROOT / "kernels/rowwise/norm.h",
        ROOT / "export/bodies.py",
        ROOT / "torch_op/second_derivatives.py",
        ROOT / "torch_op/modules.py",
        ROOT / "torch_op/attention_rules.py",
        ROOT / "torch_op/linear_rules.py",
        ROOT / "torch_op/norm_rules.py",
        ROOT / "kernels/attention/body.h",  # a model of other operators
        ROOT / "kernels/linear/body.h",
        ROOT / "twinop/testing/builtin_references.py",
        ROOT / "twinop/testing/matrix/test_results.py",  # dim and x of any row-wise op
    }


def words(path: Path) -> list[str]:
    """Returns identifiers and the words of strings in order, without comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".cmake":
        return re.findall(r"\w+", re.sub(r"#.*", "", text))
    if path.suffix != ".py":
        return re.findall(r"\w+", re.sub(r"//.*|/\*.*?\*/", "", text, flags=re.DOTALL if "/*" in text else 0))
    found: list[str] = []
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        if token.type not in (tokenize.COMMENT, tokenize.NL) and not docstring:
            found += re.findall(r"\w+", token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return found


def repeats(text: list[str], names: set[str]) -> bool:
    """Returns whether all names occur within a few words, as in a list of arguments."""
    if not names <= set(text):
        return False
    reach = 3 * len(names) + 4  # each name may have a kind and a default
    where = [(i, word) for i, word in enumerate(text) if word in names]
    return any(names == {word for j, word in where[at:] if j - i < reach} for at, (i, _) in enumerate(where))


def test_one_header_registers_an_op() -> None:
    own = read_library(find_library("custom_ops")).records
    assert all(header(record) for record in own.values())
    assert {name for name, record in ALL.items() if not header(record)} == set(ALL) - set(own)


def test_no_second_place_repeats_an_argument_list() -> None:
    files = {path: words(path) for path in sources()}
    assert len(files) > 40
    allowed = may_name()
    generic = {ROOT / "kernels/rowwise.h": {"x", "dim"}}  # RowsAlong(x, dim) is for any op
    for record in ALL.values():
        names = arguments(record)
        # Single letters, as in add(a, b), are common variable names.
        telling = len(names) > 1 and any(len(name) > 1 for name in names)
        for path, text in files.items():
            if path not in allowed:
                assert not telling or names == generic.get(path) or not repeats(text, names), (
                    f"{path} repeats the arguments of {record.schema}"
                )
                if record.onnx_name not in torch_op.__all__ or path.parent != ROOT / "torch_op":  # a module
                    assert record.onnx_name not in text, f"{path} names {record.onnx_name}"


def test_the_search_finds_repeated_arguments(tmp_path: Path) -> None:
    names = {"x", "weight", "scale", "pads"}
    found = {
        "a.py": 'def f(x, weight=None, scale: float = 0.1, pads=(0, 1)):\n    """Does."""\n',
        "b.py": 'node = make("N", ["x", "weight"], scale=scale, pads=pads)\n',
        "c.cpp": 'Def("f(Tensor x, Tensor? weight=None, float scale=0.1, int[] pads=[0, 1])");\n',
        "d.h": "Launch(const float* x, const float* weight, float scale, std::vector<long> pads);\n",
    }
    not_found = {
        "e.py": 'def f():\n    """x weight scale pads"""\n    # x weight scale pads\n    return x + weight\n',
        "f.cpp": "// x weight scale pads\nreturn x * scale;  // weight, pads\n",
        "g.py": "x = weight\n" + "other = thing\n" * 30 + "scale = pads\n",
    }
    for name, text in (found | not_found).items():
        (tmp_path / name).write_text(text)
        assert repeats(words(tmp_path / name), names) == (name in found), name
    named = (ROOT / "export/bodies.py", ROOT / "torch_op/modules.py")
    assert all(repeats(words(path), {"x", "approximate"}) for path in named)


MODULES = {
    torch_op.CustomGELU: "gelu",
    torch_op.CustomSoftmax: "softmax",
    torch_op.CustomLayerNorm: "layer_norm",
    torch_op.CustomRMSNorm: "rms_norm",
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_have_the_ops_defaults(module: type[torch.nn.Module]) -> None:
    """Parameters that a module shares with its op have the op's defaults."""
    op = RECORDS[MODULES[module]]
    parameters = inspect.signature(module).parameters
    shared = {entry.name: entry.default for entry in op.attributes if entry.name in parameters}
    if module is torch_op.CustomRMSNorm:
        shared["eps"] = None  # torch's own: it depends on the dtype
    assert shared and {name: parameters[name].default for name in shared} == shared
