"""Ops without a CPU kernel run their function bodies on the CPU provider."""

import itertools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from body_library import BodyOp, body_library, body_op
from ort_cases import custom, graph, one_node
from ort_versions import SLOW, SUPPORTED, environment
from samples import RECORDS, Sample, combinations, presence_patterns, samples
from slow_cases import often
from typer.testing import CliRunner

from twinop import deploy
from twinop.cli import app
from twinop.deploy import RunError, run_onnx
from twinop.errors import TwinopWarning
from twinop.export import attach_bodies
from twinop.libraries.library import find_library
from twinop.optimize import optimize
from twinop.record.op_spec import OpSpec

NAMES = ("relu", "gelu", "swiglu", "layer_norm", "add_rms_norm", "pad_affine", "double_and_sum")
OPS = {name: RECORDS[name] for name in NAMES}
FIXED = {"gelu": {"approximate": "none"}}  # its body reads the attribute


def presences(record: OpSpec) -> list[list[str]]:
    patterns = [p for dtypes in record.combinations for p in presence_patterns(record, dtypes)]
    return [
        list(each)
        for each in dict.fromkeys(tuple(n for n, is_there in p.items() if is_there) for p in patterns)
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bodies")
    ops = [body_op(record, presences(record), **FIXED.get(name, {})) for name, record in OPS.items()]
    return body_library(folder, ops)


def session(model: onnx.ModelProto, library: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # with one, ONNX Runtime's reductions have one order
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds_of(sample: Sample) -> dict[str, np.ndarray]:
    return {
        name: (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
        for name, tensor in sample.inputs.items()
        if tensor is not None
    }


def some_samples(record: OpSpec, dtypes: dict[str, str]) -> list[Sample]:
    """One sample for each combination of present inputs, attributes and rank, and empty ones."""
    found: dict[str, Sample] = {}
    for sample in samples(record, dtypes):
        tensors = [tensor for tensor in sample.inputs.values() if tensor is not None]
        if sample.attributes.items() >= FIXED.get(record.name, {}).items() or not sample.attributes:
            present = [tensor is not None for tensor in sample.inputs.values()]
            found[f"{present} {sample.attributes} {tensors[0].dim()} {tensors[0].numel() > 0}"] = sample
    return list(found.values())


# The first and the last: a library has all.
@pytest.mark.parametrize(
    ("record", "dtypes"),
    [each for r in OPS.values() for each in combinations({r.name: r})[:: len(r.combinations) - 1]],
)
def test_results_are_those_of_the_body(record: OpSpec, dtypes: dict[str, str], library: Path) -> None:
    """The results are equal to the bit, with NaN among the inputs, for unknown ranks and for fixed sizes."""
    if (record.name, dtypes.get("x")) == ("gelu", "float64"):
        pytest.skip("ONNX Runtime has no kernel for this body")
    for sample in some_samples(record, dict(dtypes)):
        feeds = feeds_of(sample)
        for array in feeds.values():
            array.reshape(-1)[:1] = np.nan
        expected = session(attach_bodies(one_node(record, dtypes, sample), RECORDS)).run(None, feeds)
        for fixed in (False, True):
            results = session(one_node(record, dtypes, sample, fixed=fixed), library).run(None, feeds)
            for actual, wanted in zip(results, expected, strict=True):
                assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, fixed
                assert actual.tobytes() == wanted.tobytes(), fixed


@pytest.mark.parametrize("fixed", [False, True], ids=["unknown ranks", "fixed sizes"])
def test_a_body_that_this_onnxruntime_cannot_run(fixed: bool, library: Path) -> None:
    """Said when the session is created; where the ranks are not known then, by the first run."""
    record = OPS["gelu"]
    dtypes = record.combinations[-1]
    assert dtypes["x"] == "float64"
    sample = next(sample for sample in samples(record, dict(dtypes)) if sample.inputs["x"].numel() > 0)
    model = one_node(record, dtypes, sample, fixed=fixed, approximate="none")
    said = r"node 'the_gelu_of_x' \(CPU\): its function body: Could not find an implementation for Erf"
    if fixed:
        with pytest.raises(Exception, match=said):
            session(model, library)
    else:
        opened = session(model, library)
        with pytest.raises(Exception, match=said):
            opened.run(None, feeds_of(sample))


def chain(record: OpSpec, count: int, rank: int | None = None) -> onnx.ModelProto:
    dims = None if rank is None else [f"d{i}" for i in range(rank)]
    names = [f"v{i}" for i in range(count + 1)]
    nodes = [custom(record, [a], [b]) for a, b in itertools.pairwise(names)]
    return graph(nodes, {names[0]: ("float32", dims)}, {names[-1]: ("float32", dims)})


def test_one_session_serves_ranks_and_threads(library: Path) -> None:
    opened = session(chain(OPS["relu"], 3), library)
    generator = np.random.default_rng(1)
    arrays = [generator.standard_normal([3] * rank).astype(np.float32) for rank in range(6)] * 8
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda x: opened.run(None, {"v0": x})[0], arrays))
    for x, y in zip(arrays, results, strict=True):
        np.testing.assert_array_equal(y, np.maximum(x, 0))


@pytest.mark.parametrize("name", ["relu", "swiglu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elementwise_bodies_run_in_pieces(name: str, dtype: str, library: Path) -> None:
    record = OPS[name]
    dtypes = next(each for each in record.combinations if set(each.values()) == {dtype})
    generator = torch.Generator().manual_seed(1)
    inputs = {entry.name: torch.randn(3, 1, 70_001, generator=generator) for entry in record.inputs}
    model = one_node(record, dtypes, Sample(inputs, {}))
    feeds = {key: tensor.numpy() for key, tensor in inputs.items()}
    expected = session(attach_bodies(model, RECORDS)).run(None, feeds)[0]
    for threads in (1, 3):
        assert session(model, library, threads).run(None, feeds)[0].tobytes() == expected.tobytes()


def wrapped(nodes: str, op: str = "CustomRelu", outputs: str = "y") -> bytes:
    """A model of fp32 as a library carries it, of nodes in ONNX's text form."""
    typed = ", ".join(f"float[] {name}" for name in outputs.split(", "))
    head = f'<ir_version: 10, opset_import: ["": 20, "custom_domain": 1]> body (float[] x) => ({typed}) {{}}'
    function = f'<domain: "custom_domain", opset_import: ["": 20]> {op} (x) => ({outputs}) {{{nodes}}}'
    return onnx.parser.parse_model(f"{head} {function}").SerializeToString()


def test_no_output_takes_the_memory_of_an_input(tmp_path: Path) -> None:
    """A body may read an input after it has written an output, also where the record says "in place"."""
    record = RECORDS["double_and_sum"]
    nodes_of_body = """doubled = Add(x, x) zero = Sub(doubled, doubled) same = Add(x, zero)
                       axes = Constant<value_ints=[-1]>() total = ReduceSum<keepdims=0>(same, axes)"""
    body = BodyOp(record, {"b": wrapped(nodes_of_body, "CustomDoubleAndSum", "doubled, total")})
    path = body_library(tmp_path, [body_op(OPS["relu"]), body])
    nodes = [custom(OPS["relu"], ["x"], ["v"]), custom(record, ["v"], ["doubled", "total"])]
    dims: tuple[str, ...] = ("rows", "columns")
    outputs = {"doubled": ("float32", dims), "total": ("float32", dims[:1])}
    nodes.append(custom(OPS["relu"], ["doubled"], ["again"]))
    model = graph(nodes, {"x": ("float32", dims)}, {"again": outputs["doubled"], "total": outputs["total"]})
    again, total = session(model, path).run(None, {"x": np.ones((2, 3), np.float32)})
    assert again.tolist() == [[2] * 3] * 2 and total.tolist() == [3, 3]


@pytest.mark.parametrize("size", [1000, 2**18], ids=["whole", "in pieces"])
def test_a_user_binds_an_output_to_the_memory_of_an_input(size: int, tmp_path: Path) -> None:
    record = RECORDS["double_and_sum"]
    record = replace(record, is_elementwise=True, texts={**record.texts, "shapes": "doubled = x; total = x"})
    nodes_of_body = "doubled = Add(x, x) zero = Sub(doubled, doubled) total = Add(x, zero)"
    body = BodyOp(record, {"b": wrapped(nodes_of_body, "CustomDoubleAndSum", "doubled, total")})
    values = dict.fromkeys(("doubled", "total"), ("float32", ("n",)))
    model = graph([custom(record, ["x"], list(values))], {"x": ("float32", ("n",))}, values)
    x, total = np.arange(size, dtype=np.float32), np.empty(size, np.float32)
    opened = session(model, body_library(tmp_path, [body]))
    binding = opened.io_binding()
    binding.bind_input("x", "cpu", 0, x.dtype, x.shape, x.ctypes.data)
    for name, array in (("doubled", x), ("total", total)):
        binding.bind_output(name, "cpu", 0, x.dtype, x.shape, array.ctypes.data)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(total, np.arange(size))
    np.testing.assert_array_equal(x, 2 * total)


def test_an_op_without_a_body_on_the_cpu_runs_that_of_the_model(tmp_path: Path) -> None:
    paths = [body_library(tmp_path, [BodyOp(OPS["relu"], {})]), find_library("test_cube")]
    cube = onnx.helper.make_node("CustomCube", ["v"], ["y"], domain="test_cube")
    nodes = [custom(OPS["relu"], ["x"], ["v"]), cube]
    plain = graph(nodes, {"x": ("float32", ("n",))}, {"y": ("float32", ("n",))})
    plain.opset_import.append(onnx.helper.make_opsetid("test_cube", 1))
    onnx.save(attach_bodies(plain), file := tmp_path / "model.onnx")
    with pytest.warns(TwinopWarning, match="has no CPU kernel of CustomRelu, so the function bodies of"):
        libraries, _, _, outputs, ran, _ = run_onnx._open_and_run(file, "cpu", paths, False, ["x=2"], 0)
    assert [each.path for each in libraries] == paths[1:] and len(outputs) == 1
    assert {"CustomCube", "CustomRelu"} & {each.op_type for each in ran} == {"CustomCube"}
    with pytest.raises(RunError, match="CPU kernel of CustomRelu, and the model lacks function bodies"):
        deploy.session(plain, ["CPUExecutionProvider"], paths)
    report = optimize(file, tmp_path / "out.onnx", device="cpu", library=paths)
    assert {*report.libraries} == {*paths}
    options = [f"--library={path}" for path in paths] + [f"--library-folder={tmp_path}"]
    done = CliRunner().invoke(app, ["check", str(file), "--provider=cpu", *options])
    assert "kernel of CustomRelu, and a service does not run function bodies" in " ".join(done.output.split())


def test_a_body_without_a_model_for_a_call(tmp_path: Path) -> None:
    record = RECORDS["layer_norm"]
    path = body_library(tmp_path, [body_op(record, [["x"]])])
    sample = next(iter(samples(record, dict(record.combinations[0]))))
    opened = session(one_node(record, record.combinations[0], sample), path)
    said = r"\(CPU\): the op has no CPU kernel, and its function body: no body for these inputs"
    with pytest.raises(Exception, match=said):
        opened.run(None, feeds_of(sample))


def test_a_body_that_computes_other_sizes(tmp_path: Path) -> None:
    path = body_library(tmp_path, [BodyOp(OPS["relu"], {"b": wrapped("y = Concat<axis=0>(x, x)")})])
    opened = session(chain(OPS["relu"], 1), path)
    for size in (3, 2**18):  # whole, and in pieces
        with pytest.raises(Exception, match=r"\(CPU\): its function body: .* has shape \{\d+\} but .* is \{"):
            opened.run(None, {"v0": np.ones(size, np.float32)})


@pytest.mark.parametrize("model", [b"no model", wrapped("y = Nonsense(x)")], ids=["bytes", "op"])
def test_a_damaged_body(model: bytes, tmp_path: Path) -> None:
    path = body_library(tmp_path, [BodyOp(OPS["relu"], {"b": model})])
    with pytest.raises(Exception, match=r"CustomRelu node 'the_relu_of_v0' \(CPU\): its function body: ."):
        session(chain(OPS["relu"], 1, rank=1), path)


RUN = """
import sys
import numpy as np
import onnxruntime as ort
options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
options.log_severity_level = 4
try:
    session = ort.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
    print(session.run(None, {"v0": np.array([[-1, 2]], np.float32)})[0].tolist())
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("version", often(SUPPORTED, *({*SUPPORTED} - {*SLOW})))
def test_onnxruntime_versions(version: str, library: Path, tmp_path: Path) -> None:
    onnx.save(chain(OPS["relu"], 2), tmp_path / "model.onnx")
    command = [str(environment(version)), "-c", RUN, str(library), str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    minor = int(version.split(".")[1])
    if minor >= 23:
        assert done.stdout == "[[0.0, 2.0]]\n"
        return
    said = (
        "CustomRelu node 'the_relu_of_v0' (CPU): the op has no CPU kernel, and its function body runs on the "
        f"CPU from ONNX Runtime 1.23 on; this is 1.{minor}. Upgrade with: pip install "
        "'onnxruntime>=1.23', or run the model on CUDA"
    )
    assert said in done.stdout
