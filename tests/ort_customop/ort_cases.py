"""The cases that every supported onnxruntime release runs: models, inputs, and torch's results for them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from samples import RECORDS, Sample, samples, torch_dtype, values

from twinop import torch_op
from twinop.libraries.declare import CPU_FUNCTIONS
from twinop.libraries.library import find_library
from twinop.record.dtypes import ELEMENT_TYPES
from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION, OpSpec

Dims = Sequence[int | str | None] | None
DIMS: dict[str, Dims] = {
    "fixed": (3, 5),
    "named": ("rows", "columns"),
    "nameless": (None, None),
    "mixed": (3, None),
    "rank unknown": None,
}
OUTSIDE = {"bfloat16": "float32", "float8_e4m3fn": "float32"}
"""NumPy does not have these: such models cast from and to another."""


class Cases:
    """Collects cases and writes them as a folder for ort_matrix.py."""

    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []
        self.models: dict[str, onnx.ModelProto] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, name: str, model: onnx.ModelProto, runs: Sequence[Any] = (), **fields: Any) -> None:
        """`runs`: pairs of feeds and expected outputs, tensors by name."""
        file = f"{len(self.models)}.onnx"
        self.models[file] = model
        keyed = [[self._keep(feeds), self._keep(expected)] for feeds, expected in runs]
        library = str(find_library("test_probe"))
        self.cases.append({"name": name, "model": file, "library": library, "runs": keyed} | fields)

    def _keep(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        keys = {}
        for name, tensor in tensors.items():
            keys[name] = f"a{len(self.arrays)}"
            is_outside = str(tensor.dtype).removeprefix("torch.") in OUTSIDE
            self.arrays[keys[name]] = (tensor.float() if is_outside else tensor).numpy()
        return keys

    def write(self, folder: Path) -> None:
        for file, model in self.models.items():
            onnx.save(model, folder / file)
        places, memory = dict[str, Any](), bytearray()  # to read thousands of files took most of the time
        for key, array in self.arrays.items():
            memory += bytes(-len(memory) % 64)
            places[key] = array.dtype.str, array.shape, len(memory)
            memory += array.tobytes()
        (folder / "arrays").write_bytes(memory)
        (folder / "cases.json").write_text(json.dumps({"cases": self.cases, "arrays": places}))


def graph(
    nodes: Sequence[Any], inputs: Mapping[str, tuple[str, Dims]], outputs: Mapping[str, tuple[str, Dims]]
) -> onnx.ModelProto:
    """Inputs and outputs by name: dtype and dimensions. Those of `OUTSIDE` are cast."""
    # Copies, whose names may change.
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    for name, (dtype, _) in inputs.items():
        if dtype in OUTSIDE:
            nodes.insert(0, helper.make_node("Cast", [f"{name}"], [f"{name}_cast"], to=ELEMENT_TYPES[dtype]))
    casts = {n: f"{n}_cast" for n, (dtype, _) in (*inputs.items(), *outputs.items()) if dtype in OUTSIDE}
    for node in nodes:
        if node.op_type != "Cast":
            for names in (node.input, node.output):
                names[:] = [casts.get(name, name) for name in names]
    for name, (dtype, _) in outputs.items():
        if dtype in OUTSIDE:
            nodes.append(helper.make_node("Cast", [f"{name}_cast"], [name], to=ELEMENT_TYPES[OUTSIDE[dtype]]))
    given, made = (
        [
            helper.make_tensor_value_info(name, ELEMENT_TYPES[OUTSIDE.get(dtype, dtype)], dims)
            for name, (dtype, dims) in tensors.items()
        ]
        for tensors in (inputs, outputs)
    )
    return helper.make_model(
        helper.make_graph(nodes, "case", given, made),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )


def custom(record: OpSpec, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    while inputs and not inputs[-1]:
        inputs = inputs[:-1]
    name = f"the_{record.name}_of_{inputs[0]}"
    return helper.make_node(record.onnx_name, inputs, outputs, name=name, domain=DOMAIN, **attributes)


def one_node(
    record: OpSpec, dtypes: Mapping[str, str], sample: Sample, fixed: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """The op alone, as the sample gives it; sizes fixed to the sample's, or no dimensions at all."""
    given = {name: tensor for name, tensor in sample.inputs.items() if tensor is not None}
    names = [name if name in given else "" for name in sample.inputs]
    node = custom(record, names, record.outputs, **sample.attributes | attributes)
    inputs = {name: (dtypes[name], tuple(tensor.shape) if fixed else None) for name, tensor in given.items()}
    return graph([node], inputs, {name: (dtypes[name], None) for name in record.outputs})


def result(record: OpSpec, sample: Sample, **attributes: Any) -> tuple[Any, Any]:
    """Feeds and what torch makes of them."""
    function = getattr(torch_op, record.functional_name)
    outputs = function(*sample.inputs.values(), **sample.attributes, **attributes)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    feeds = {name: tensor for name, tensor in sample.inputs.items() if tensor is not None}
    return feeds, dict(zip(record.outputs, outputs, strict=True))


def op_cases(cases: Cases, record: OpSpec) -> None:
    """Every presence pattern and attribute, at half of the op's sample sizes.

    The first and the last combination of dtypes stand for all, which the matrix of all ops has. Sizes
    that the graph fixes are shown for the first one.
    """
    for dtypes in record.combinations[:: max(len(record.combinations) - 1, 1)]:
        groups: dict[str, list[Sample]] = {}
        for sample in samples(record, dict(dtypes)):
            present = "".join("x" if tensor is not None else "-" for tensor in sample.inputs.values())
            groups.setdefault(f"{present} {sample.attributes or ''}", []).append(sample)
        for group, members in groups.items():
            name = " ".join([record.name, *dict.fromkeys(dtypes.values()), group]).strip()
            cast = not OUTSIDE.keys().isdisjoint(dtypes.values())
            runs = [result(record, sample) for sample in members[::2]]
            cases.add(name, one_node(record, dtypes, members[0]), runs, cast=cast)
            if dtypes is record.combinations[0]:
                fixed = one_node(record, dtypes, members[-1], fixed=True)
                cases.add(f"{name} fixed sizes", fixed, [result(record, members[-1])], cast=cast)


def chain_cases(cases: Cases, relu: OpSpec) -> None:
    """Dimensions of every sort, through a chain in which ORT plans to reuse buffers."""
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        for sort, dims in DIMS.items():
            nodes = [custom(relu, [a], [b]) for a, b in zip("xabc", "abcy", strict=True)]
            model = graph(nodes, {"x": (dtype, dims)}, {"y": (dtype, dims)})
            shapes = {"fixed": [(3, 5)], "mixed": [(3, 5), (3, 0), (3, 700)]}.get(
                sort, [(3, 5), (0, 2), (70, 31)]
            )
            feeds = [values(shape, torch_dtype(dtype), 3) for shape in shapes]
            runs = [({"x": x}, {"y": torch_op.relu(x)}) for x in feeds]
            cases.add(f"chain {dtype} {sort}", model, runs, cast=dtype == "bfloat16")
    for fields in (
        {"options": {"enable_mem_pattern": False}},
        {"options": {"enable_cpu_mem_arena": False}},
        {"options": {"intra_op_num_threads": 1}},
        {"options": {"intra_op_num_threads": 3}},
        {"execution_mode": "ORT_PARALLEL"},
    ):
        x = values((300, 301), torch.float32, 4)
        cases.add(f"chain {fields}", models_chain(relu), [({"x": x}, {"y": torch_op.relu(x)})], **fields)


def models_chain(relu: OpSpec) -> onnx.ModelProto:
    nodes = [custom(relu, [a], [b]) for a, b in zip("xabc", "abcy", strict=True)]
    dims = ("rows", "columns")
    return graph(nodes, {"x": ("float32", dims)}, {"y": ("float32", dims)})


def broadcast_cases(cases: Cases, records: Mapping[str, OpSpec]) -> None:
    """Operands of two shapes, whose dimensions the graph knows to different degrees."""
    a, b = values((3, 1, 5), torch.float32, 1), values((4, 1), torch.float32, 2)
    wholes = {"a": a, "b": b}
    for name in ("add", "mul"):
        record = records[name]
        sorts: dict[str, tuple[Dims, Dims]] = {
            "fixed": ((3, 1, 5), (4, 1)),
            "named": (("i", 1, "k"), ("j", 1)),
            "nameless": ((None, 1, None), (None, None)),
            "rank unknown": (None, None),
        }
        for sort, dims in sorts.items():
            # A node reads what the one before it wrote: the buffer may be reused where the sizes allow it.
            nodes = [custom(record, ["a", "b"], ["c"]), custom(record, ["c", "b"], ["d"])]
            nodes.append(custom(record, ["d", "c"], ["y"]))
            inputs = {"a": ("float32", dims[0]), "b": ("float32", dims[1])}
            op = getattr(torch_op, name)
            c = op(a, b)
            model = graph(nodes, inputs, {"y": ("float32", None)})
            cases.add(f"{name} broadcasts, dimensions {sort}", model, [(wholes, {"y": op(op(c, b), c)})])
    mismatched: dict[str, tuple[Dims, Dims]] = {"fixed": ((2, 3), (4,)), "named": (("i", "j"), ("k",))}
    for sort, dims in mismatched.items():
        inputs = {"a": ("float32", dims[0]), "b": ("float32", dims[1])}
        model = graph([custom(records["add"], ["a", "b"], ["y"])], inputs, {"y": ("float32", None)})
        feeds = {"a": torch.ones(2, 3), "b": torch.ones(4)}
        error = "the inputs' shapes do not broadcast"
        if sort == "named":
            error = rf"the_add_of_a.*{error}: a has \[2, 3\], b has \[4\]"
        cases.add(f"add of shapes that do not broadcast, {sort}", model, [(feeds, {})], error=error)


def in_place_cases(cases: Cases, records: Mapping[str, OpSpec]) -> None:
    """Probes before and after an op say whether it wrote over its input."""
    probe = records["probe"]
    last = custom(probe, ["b"], ["y", "after"])

    def add(name: str, nodes: list[Any], in_place: bool, dtype: str = "float32", dims: Dims = (3, 5)) -> None:
        first = custom(probe, ["x"], ["a", "before"], tag=5, mark=False)
        reports: dict[str, tuple[str, Dims]] = dict.fromkeys(("before", "after"), ("float64", (4,)))
        outputs = {"y": (dtype, dims)} | reports
        for node in nodes:
            outputs |= {name: (dtype, None) for name in node.output if name.startswith("out")}
        model = graph([first, *nodes, last], {"x": (dtype, dims)}, outputs)
        feeds = {"x": values((3, 5), torch_dtype(dtype), 1)}
        cases.add(f"in place: {name}", model, [(feeds, {})] * 2, in_place=in_place)

    relu = custom(records["relu"], ["a"], ["b"])
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        add(f"relu {dtype}", [relu], True, dtype)
    add("relu, named dimensions", [relu], True, dims=("rows", "columns"))
    add("relu, nameless dimensions", [relu], False, dims=(None, None))
    add("first of two outputs", [custom(records["double_and_sum"], ["a"], ["b", "out"])], True)
    add("pad_affine declares none", [custom(records["pad_affine"], ["a"], ["b"], pads=[0, 0])], False)
    add("input with a second reader", [relu, helper.make_node("Neg", ["a"], ["out"])], False)


def attribute_cases(cases: Cases, records: Mapping[str, OpSpec]) -> None:
    """Attributes that are not what the schema says, and values of each kind that are."""
    x = values((3, 5), torch.float32, 1)
    wrong: list[tuple[str, str, Any, str]] = [
        ("gelu", "approximate", 1, "attribute approximate is an int, expected a string"),
        ("pad_affine", "scale", "x", "attribute scale is a string, expected a float"),
        ("pad_affine", "pads", 1.5, "attribute pads is a float, expected a list of ints"),
        ("pad_affine", "pads", [1] * 9, "attribute pads has 9 entries, at most 8 are taken"),
        ("probe", "tag", 1.5, "attribute tag is a float, expected an int"),
        ("gelu", "approximate", "fast", r"attribute approximate is 'fast', expected one of none \| tanh"),
        ("layer_norm", "eps", float("nan"), "attribute eps is nan, expected a finite number >= 0"),
        ("softmax", "dim", 2, r"\(x: float32\[3, 5\]\): attribute dim is 2, expected a dimension of x: -2"),
    ]
    for op, name, value, message in wrong:
        record = records[op]
        dtypes = record.combinations[0]
        absent = dict.fromkeys(entry.name for entry in record.inputs)
        model = one_node(record, dtypes, Sample(absent | {"x": x}, {name: value}))
        cases.add(f"{op} {name}={value}", model, [({"x": x}, {})], error=f"the_{op}.*{message}")
    record = records["pad_affine"]
    model = one_node(record, record.combinations[0], Sample({"x": x}, {"pads": [1, 1]}))
    del model.graph.node[0].attribute[0].ints[:]
    cases.add("pad_affine pads=[]", model, [({"x": x}, {})], error=r"int\[\] attribute is too short")
    for attributes, report in (({}, [-7, 1]), ({"tag": -(2**40), "mark": 0}, [-(2**40), 0])):
        probe = records["probe"]
        nodes = [custom(probe, ["x"], ["y", "report"], **attributes)]
        nodes.append(helper.make_node("Slice", ["report", "from", "to"], ["kinds"]))
        model = graph(nodes, {"x": ("float32", None)}, {})
        for name, number in (("from", 2), ("to", 4)):
            model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
        for name, kind in (("y", TensorProto.FLOAT), ("kinds", TensorProto.DOUBLE)):
            model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        kinds = torch.tensor(report, dtype=torch.float64)
        cases.add(f"int and bool attributes {attributes}", model, [({"x": x}, {"y": x, "kinds": kinds})])


def error_cases(cases: Cases, records: Mapping[str, OpSpec]) -> None:
    """Failures while a model runs: the op, its inputs with dtype and shape, and the reason."""
    x = values((2, 3), torch.float32, 1)
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "double_and_sum": (
            {"x": x[0, 0]},
            r"'the_double_and_sum_of_x' .*\(x: float32\[\]\): .*at least one",
        ),
        "layer_norm": (
            {"x": x, "weight": x[0, :2], "bias": None},
            r"the_layer_norm_of_x.*\(x: float32\[2, 3\], weight: float32\[2\], bias: absent\): weight has "
            r"shape \[2\], expected x\[axis:\] = \[3\]",
        ),
    }
    for op, (inputs, message) in wrong.items():
        sample = Sample(inputs)
        model = one_node(records[op], records[op].combinations[0], sample)
        cases.add(f"{op} of wrong inputs", model, [(sample.tensors(), {})], error=message)
    record, x = records["double_and_sum"], torch.ones(100_000, 1)
    model = one_node(record, record.combinations[0], Sample({"x": x}))
    cases.add("scratch memory is given back", model, [({"x": x}, {})], repeat=True)


def all_cases() -> Cases:
    """Everything; needs the torch ops loaded (torch gives the expected bits)."""
    records = dict(torch_op.records()) | dict(_probe())
    cases = Cases()
    for record in RECORDS.values():
        if record.key not in CPU_FUNCTIONS:  # their bodies' bits are those of each release, from 1.23 on
            op_cases(cases, record)
    broadcast_cases(cases, records)
    chain_cases(cases, records["relu"])
    in_place_cases(cases, records)
    attribute_cases(cases, records)
    error_cases(cases, records)
    return cases


def _probe() -> Iterator[tuple[str, OpSpec]]:
    from twinop.libraries.library import read_library

    yield "probe", read_library(find_library("test_probe")).records["probe"]
