"""Tests that exported models give torch's results: both exporters, with and without the library, any size."""

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import op_bodies  # noqa: F401 (the test ops)
import pytest
import torch
from export_models import CPU, EXPORTERS, Numbers, each_exporter, plain
from samples import RECORDS, torch_dtype, values
from torch.utils import _pytree

import twinop
from twinop import deploy, torch_op
from twinop.errors import ExportError
from twinop.export import export
from twinop.libraries.library import checksum
from twinop.record.op_spec import DOMAIN
from twinop.record.tolerance import same_bits


class Relus(torch.nn.Module):
    """Calls the op as a module, as a function and through torch.ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch_op.CustomReLU()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.first(x)
        z = torch_op.relu(y)
        return y, z, torch.ops.custom_domain.relu(z)


class Affines(torch.nn.Module):
    """Calls ops with some and with all optional inputs, by name and by position, and uses both outputs."""

    def __init__(self, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(columns, generator=generator).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(columns, generator=generator).to(dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        op = torch_op.pad_affine
        y = op(x, None, self.bias, 1.7, pads=[2, 0], sign="minus")  # absent in the middle
        doubled, total = torch_op.double_and_sum(y)
        _, last = torch_op.double_and_sum(op(x, self.weight))  # absent at the end, defaults; one unused
        return doubled, total, last, op(x, self.weight, self.bias, 0.3, "minus", [0, 3])


def outputs(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def run(path: Path, library: bool | None, **feeds: torch.Tensor) -> list[torch.Tensor]:
    session = deploy.session(path, CPU, library)
    assert (session.library is None) == (library is False)
    return list(session.run(feeds).values())


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        found, expected, rtol=2e-2 if found.element_size() == 2 else 1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize(("exporter", "dtype"), [("dynamo", "bfloat16"), ("torchscript", "float16")])
def test_relu(exporter: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "relu.onnx"
    model = Relus()
    x = values((3, 17), torch_dtype(dtype), 1)
    report = plain(model, x, path, exporter=exporter, dynamic={"x": [0, 1]})
    assert report.parity is not None and report.parity.equal and report.parity.outputs == 3
    assert report.without_library is not None and report.without_library.equal
    assert report.nodes[f"{DOMAIN}.CustomRelu"] == 3 and report.custom_ops == ["CustomRelu"]
    # Sizes that the export has not seen: 0, 1, more than one vector, more than one thread.
    with_library, without = deploy.session(path, CPU), deploy.session(path, CPU, library=False)
    for shape in ((0, 5), (1, 1), (2, 1025), (7, 10007)):
        x = values(shape, torch_dtype(dtype), 2)
        for session in (with_library, without):
            for found, expected in zip(session.run({"x": x}).values(), model(x), strict=True):
                assert same_bits(found, expected), f"{shape}, library: {session.library}"


def test_optional_inputs_attributes_and_several_outputs(tmp_path: Path) -> None:
    path, dtype = tmp_path / "affine.onnx", torch.float16
    model = Affines(9, dtype)
    x = torch.randn(4, 9).to(dtype)
    report = plain(model, (x,), path, exporter="torchscript", dynamic={"x": {0: "rows"}})
    assert report.parity is not None and report.parity.equal and report.without_library is not None
    assert report.outputs["y_0"].endswith("[rows,11]") and report.outputs["y_1"].endswith("[rows]")
    for rows in (0, 1, 1000):
        x = torch.randn(rows, 9).to(dtype)
        expected = outputs(model(x))
        for found, wanted in zip(run(path, None, x=x), expected, strict=True):
            assert same_bits(found, wanted.detach())
        for found, wanted in zip(run(path, False, x=x), expected, strict=True):
            check_close(found, wanted.detach())
    nodes = [node for node in onnx.load(path).graph.node if node.domain == DOMAIN]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    written = [a for a in attributes if a]
    assert attributes.count({}) == 2  # those of the op without attributes; defaults are written
    assert sorted(sorted(a) for a in written) == [["pads", "scale", "sign"]] * 3
    assert {(a["sign"], tuple(a["pads"]), round(a["scale"], 3)) for a in written} == {
        (b"minus", (2, 0), 1.7),
        (b"minus", (0, 3), 0.3),
        (b"plus", (0, 1), 0.1),
    }


class LayersAndOps(torch.nn.Module):
    """Has weights and operators of torch's own beside twinop's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 9), torch_op.CustomReLU(), torch.nn.LayerNorm(9), torch.nn.GELU()
        )
        self.ops = Affines(6, torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layers(x), *self.ops(x)


def test_both_exporters_agree_at_the_highest_opset(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, larger, opset = LayersAndOps(), torch.randn(4, 6), torch.randn(31, 6), 25
    found: dict[str, list[torch.Tensor]] = {}
    for exporter in EXPORTERS:
        path = tmp_path / f"{exporter}.onnx"
        report = plain(model, x, path, exporter=exporter, opset=opset, dynamic={"x": [0]})
        proto = onnx.load(path)
        versions = {entry.domain: entry.version for entry in proto.opset_import}
        assert report.opset == opset and versions == {"": opset, DOMAIN: 1}
        assert {f.opset_import[0].version for f in proto.functions} == {opset}
        found[exporter] = run(path, None, x=larger) + run(path, False, x=larger)
    assert all(map(same_bits, found["dynamo"], found["torchscript"])) and len(found["dynamo"]) == 10


def test_metadata_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "relu.onnx"
    options: dict[str, Any] = {"exporter": "torchscript", "dynamic": {"x": {0: "batch"}}}
    report = plain(torch_op.CustomReLU(), torch.randn(2, 3), path, **options)
    proto = onnx.load(path)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    schema = {"twinop.schema.CustomRelu": RECORDS["relu"].schema_hash}
    assert metadata == {"twinop.version": twinop.__version__} | schema
    onnx.checker.check_model(proto, full_check=True)
    assert report.size == path.stat().st_size and report.opset == 20 and report.path == path
    assert report.inputs == {"x": "float [batch,3]"} and report.outputs == {"y": "float [batch,3]"}
    assert str(Path(__file__).parent).encode() not in path.read_bytes()  # no traces of this machine
    assert [file.name for file in tmp_path.iterdir()] == ["relu.onnx"]


def test_external_data(tmp_path: Path) -> None:
    """Weights over the limit get a file of their own. The two files can be moved together."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch_op.CustomReLU())
    x = torch.randn(2, 64)
    path = tmp_path / "a" / "big.onnx"
    path.parent.mkdir()
    report = plain(model, x, path, exporter="torchscript", external_data_bytes=1000)
    data = report.data_path
    assert data is not None and data.name == f"big.{checksum(data)[:16]}.data"
    assert data.parent == path.parent and data.stat().st_size >= 64 * 64 * 4
    assert path.stat().st_size < 4000 and report.size > 64 * 64 * 4
    moved = path.parent.rename(tmp_path / "b") / "big.onnx"
    onnx.checker.check_model(str(moved), full_check=True)
    (found,) = run(moved, None, **{next(iter(report.inputs)): x})
    check_close(found, model(x).detach())
    assert sorted(file.name for file in moved.parent.iterdir()) == [data.name, "big.onnx"]


class Nested(torch.nn.Module):
    def forward(self, pair: Any, times: int, *, extra: dict[str, torch.Tensor]) -> Any:
        first, second = pair
        return {"sum": torch_op.relu(first + second) * times, "extra": torch_op.relu(extra["bias"])}


@each_exporter
def test_nested_inputs_constants_and_dicts(exporter: str, tmp_path: Path) -> None:
    path = tmp_path / "nested.onnx"
    a, b, c = torch.randn(4, 3), torch.randn(4, 3), torch.randn(3)
    dynamic = {"pair_0": {0: "rows"}, "pair_1": {0: "rows"}}
    report = plain(
        Nested(), ((a, b), 3), path, kwargs={"extra": {"bias": c}}, exporter=exporter, dynamic=dynamic
    )
    assert [*report.inputs] == ["pair_0", "pair_1", "extra_bias"] and [*report.outputs] == ["sum", "extra"]
    a, b = torch.randn(6, 3), torch.randn(6, 3)
    found = run(path, None, pair_0=a, pair_1=b, extra_bias=c)
    assert same_bits(found[0], torch_op.relu(a + b) * 3) and same_bits(found[1], torch_op.relu(c))


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    factor: float = 2.0


torch.export.register_dataclass(Pair)
Named = collections.namedtuple("Named", "k v")


class Cache:
    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v


_pytree.register_pytree_node(
    Cache,
    lambda each: ([each.k, each.v], None),
    lambda entries, _: Cache(*entries),
    flatten_with_keys_fn=lambda c: ([(_pytree.GetAttrKey("k"), c.k), (_pytree.GetAttrKey("v"), c.v)], None),
)
A, B = torch.randn(4, 3), torch.randn(4, 3)
CONTAINERS: dict[str, tuple[Any, Callable[[Any], torch.Tensor], list[str]]] = {
    "dataclass": (Pair(A, B), lambda b: b.x * b.factor + b.y, ["b_x", "b_y"]),
    "class": (Cache(A, B), lambda b: b.k * 2 + b.v, ["b_k", "b_v"]),
    "deque": (collections.deque([A, B]), lambda b: b[0] * 2 + b[-1], ["b_0", "b_1"]),
    "namedtuple": (Named(A, B), lambda b: b.k * 2 + b.v, ["b_k", "b_v"]),
    "nested": ({"p": [Pair(A, B)]}, lambda b: b["p"][0].x * 2 + b["p"][0].y, ["b_p_0_x", "b_p_0_y"]),
    "user's dict": (collections.UserDict(k=A, v=B), lambda b: b["k"] * 2 + b["v"], ["b_k", "b_v"]),
}


class Reads(torch.nn.Module):
    def __init__(self, read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, u: torch.Tensor, b: Any) -> torch.Tensor:
        return self.read(b) + u


@pytest.mark.parametrize(
    ("kind", "exporter"), [*((kind, "torchscript") for kind in CONTAINERS), ("nested", "dynamo")]
)
def test_tensors_in_containers_are_inputs(kind: str, exporter: str, tmp_path: Path) -> None:
    container, read, names = CONTAINERS[kind]
    path, u = tmp_path / "m.onnx", torch.randn(4, 3)
    dynamic = {name: {0: "rows"} for name in ("u", *names)}
    report = plain(Reads(read), (u, container), path, exporter=exporter, dynamic=dynamic)
    assert report.inputs == dict.fromkeys(("u", *names), "float [rows,3]") and report.resized
    fresh = {name: torch.randn(6, 3) for name in ("u", *names)}
    first, second = (fresh[name] for name in names)
    check_close(run(path, False, **fresh)[0], first * 2 + second + fresh["u"])


class Unknown:
    __slots__ = ("t",)

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


def test_tensors_that_torch_promotes_when_it_joins_them(tmp_path: Path) -> None:
    class Joined(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.stack([x, x.long()]), torch.concat([x, x.float()]), torch.cat([x, x.long()])

    report = plain(Joined(), (torch.randn(3, 4).half(),), tmp_path / "m.onnx")
    assert report.parity is not None and report.parity.equal


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_norm_under_autocast(exporter: str, tmp_path: Path) -> None:
    """Its x has 16 bits and its gain fp32, which torch takes, and onnx does not."""

    class Autocast(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return super().forward(x)

    layers = (torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    report = plain(Autocast(*layers), (torch.randn(3, 4),), tmp_path / "m.onnx", exporter=exporter)
    assert report.parity is not None and report.nodes["LayerNormalization"] == 2
    assert report.outputs == {"y": "float16 [3,4]"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Unknown(A), r"b is Unknown, which .*register_dataclass.Unknown.*register_pytree_node"),
        ([1, {"c": Unknown(A)}], r"b_1_c is Unknown"),
        ({A}, r"b is set"),
        (torch.distributions.Normal(A, 1.0), r"b is Normal"),
        (A.numpy(), r"b is a numpy array; expected a tensor"),
    ],
    ids=["object", "inside", "set", "distribution", "array"],
)
def test_tensors_that_would_become_constants_are_refused(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        plain(Reads(lambda b: A), (A, given), tmp_path / "m.onnx")


def test_outputs_of_unknown_classes_and_equal_names_are_refused(tmp_path: Path) -> None:
    model: Any = Numbers(lambda x: (x, Unknown(x)))
    with pytest.raises(ExportError, match="^output 1 is Unknown, .* return the tensors themselves"):
        plain(model, A, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="two inputs would be named z_b"):
        plain(CatchAll(), (A, A), tmp_path / "m.onnx", kwargs={"z": {"b": A}, "z_b": A})


@each_exporter
def test_inputs_weights_and_equal_tensors_as_outputs(exporter: str, tmp_path: Path) -> None:
    """The dynamo exporter renames what it returns: an input would lose its name, an output another's."""

    def compute(x: torch.Tensor) -> Any:
        y = x + 1
        return (y, y), x, model.dropout(x), x.detach(), model.weight, torch.ones(2)

    model, path = Numbers(compute).eval(), tmp_path / "m.onnx"
    report = plain(model, A, path, exporter=exporter, dynamic={"x": [0]})
    assert list(report.inputs) == ["x"] and report.resized and len(report.outputs) == 7
    x = torch.randn(6, 3)
    for found, expected in zip(run(path, False, x=x), (x + 1, x + 1, *compute(x)[1:]), strict=True):
        assert torch.equal(found, expected)


class CatchAll(torch.nn.Module):
    def forward(self, *xs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return torch_op.relu(xs[0] + xs[1] + named["z"])


@each_exporter
def test_inputs_without_names_of_their_own(exporter: str, tmp_path: Path) -> None:
    a, b, z = (torch.randn(4, 3) for _ in range(3))
    dynamic = {name: {0: "rows"} for name in ("xs_0", "xs_1", "z")}
    path = tmp_path / "m.onnx"
    report = plain(CatchAll(), (a, b), path, kwargs={"z": z}, exporter=exporter, dynamic=dynamic)
    assert report.inputs == dict.fromkeys(("xs_0", "xs_1", "z"), "float [rows,3]") and report.resized


class SizeDependent(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_op.relu(x + 1 if x.shape[0] > 1 else x)


def test_warnings_about_tracing_reach_the_user(tmp_path: Path) -> None:
    report = plain(SizeDependent(), torch.randn(4, 3), tmp_path / "m.onnx", exporter="torchscript")
    assert any("Converting a tensor to a Python boolean" in note for note in report.notes)


class Both(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_op.relu(x), torch_op.relu(x.half())


def test_float64_beside_narrower_types(tmp_path: Path) -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    report = plain(Both(), x, tmp_path / "both.onnx", exporter="torchscript")
    assert report.without_library is not None and report.without_library.equal


def test_a_number_as_input(tmp_path: Path) -> None:
    """It has rank 0. The special inputs are made of it, too."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * scale)

    given = (torch.randn(2, 3), torch.tensor(0.5))
    path = tmp_path / "model.onnx"
    report = export(Scaled(), given, path, optimize=True, device="cpu")
    assert report.parity is not None and report.parity.error == 0.0 and not report.notes
    assert deploy.session(path, CPU).inputs["scale"].shape == ()
