"""Ops that write into inputs, those of tests/ops/written.h: in torch, exported, in ONNX Runtime."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from abi_files import CPU, FLOAT, INT64, model
from onnx import TensorProto, helper, parser
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from twinop import deploy, export, torch_op
from twinop.deploy import FeedError, RunError, node_parity, torch_binding
from twinop.deploy.custom_nodes import Model
from twinop.deploy.inference_session import _shareable
from twinop.deploy.torch_binding import TensorRunner
from twinop.errors import ExportError, RecordError
from twinop.libraries.library import find_library
from twinop.record.schema_text import record_of
from twinop.torch_op.mutation import _check_written

LIBRARY = find_library("test_written")
raw = torch.ops.test_written
DOUBLE = TensorProto.DOUBLE
ROWS, POSITION = torch.randn(2, 3), torch.tensor([4, 1])


@pytest.fixture(scope="module", autouse=True)
def ops() -> torch_op.Ops:
    return torch_op.load(LIBRARY)


@export.body(domain="test.written")
def put(op: Any, cache: Any, rows: Any, position: Any) -> Any:
    return op.ScatterND(cache, op.Unsqueeze(position, -1), rows)


def expected(cache: torch.Tensor, rows: torch.Tensor = ROWS) -> torch.Tensor:
    return cache.index_copy(0, POSITION, rows)


def test_the_op_writes_into_its_input_and_the_twin_does_not(ops: torch_op.Ops) -> None:
    cache = torch.randn(6, 3)
    wanted, address, version = expected(cache), cache.data_ptr(), cache._version
    assert torch.equal(raw.put_functional(cache, ROWS, POSITION), wanted) and not torch.equal(cache, wanted)
    assert ops.put(cache, ROWS, POSITION) is None
    assert torch.equal(cache, wanted) and cache.data_ptr() == address and cache._version > version
    a, b = torch.randn(4), torch.randn(4)
    before = a.clone(), b.clone()
    total = raw.exchange(a, b, 2.0)  # two are written, one is returned
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(a, 2 * before[1]) and torch.equal(b, before[0])
    assert [len(op.default._schema.returns) for op in (raw.put, raw.exchange_functional)] == [0, 3]
    record = torch_op.records()["test.written::exchange"]
    assert record.outputs == ("sum", "a_out", "b_out") and record.written == {"a_out": "a", "b_out": "b"}


def test_views() -> None:
    wide = torch.zeros(6, 6)
    raw.put(wide[:, ::2], ROWS, POSITION)  # copied to the kernel and back
    assert torch.equal(wide[:, ::2], expected(torch.zeros(6, 3))) and not wide[:, 1::2].any()
    turned, other = torch.randn(4, 5).t(), torch.randn(5, 4)
    wanted = turned + other
    raw.bump(turned, other)  # an elementwise kernel takes any strides
    assert torch.equal(turned, wanted)
    keys_and_values = torch.randn(6, 2, 3)
    halves = keys_and_values.unbind(1)
    wanted = torch.stack([halves[1], halves[0]], 1)
    raw.exchange(*halves)  # in one range of memory, without an element in common
    assert torch.equal(keys_and_values, wanted)
    shape = (2, 4, 3, 5)
    for axis in range(5):  # halves of any axis, and parts of halves
        whole = torch.randn(*shape[:axis], 2, *shape[axis:])
        for cut in (slice(None), slice(0, 1), slice(1, 2)):
            first, second = (half[:, :, :, cut] for half in whole.unbind(axis))
            expected_first, expected_second = second.clone(), first.clone()
            raw.exchange(first, second)
            assert torch.equal(first, expected_first) and torch.equal(second, expected_second)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: raw.put(c[:1].expand(6, 3), ROWS, POSITION), "elements of it share their memory"),
        (lambda c: raw.put(c, c[:2], POSITION), "cache is written, and shares its memory with rows"),
        (lambda c: raw.exchange(c, c), "a is written, and shares its memory with b; pass a copy"),
        (lambda c: raw.put(c.requires_grad_(), ROWS, POSITION), "Call torch.ops.test_written.put_functional"),
        (lambda c: raw.put(c, ROWS.clone().requires_grad_(), POSITION), "has no derivative"),
        (lambda c: torch.vmap(lambda r: raw.put(c, r, POSITION))(ROWS[None]), "does not work under vmap"),
        (lambda c: raw.put(c.to_sparse(), ROWS, POSITION), "the op takes dense tensors"),
    ],
)
def test_refused_in_torch(call: Callable[[torch.Tensor], Any], message: str) -> None:
    cache = torch.zeros(6, 3)
    with pytest.raises((RuntimeError, RecordError), match=message):
        call(cache)
    assert not cache.detach().any()


def test_memory_is_judged_as_for_ops_without_a_kernel() -> None:
    """Of two views of one buffer, mutation.py refuses what shares memory, and so does the library."""
    buffer, random, record = torch.zeros(64), Random(0), torch_op.records()["test.written::exchange"]

    def verdict(call: Callable[..., Any], *arguments: Any) -> str:
        try:
            call(*arguments)
        except (RuntimeError, RecordError) as error:
            return str(error).partition(" is written, and ")[2][:30]
        return ""

    def elements(view: torch.Tensor) -> list[int]:
        places = torch.arange(64).as_strided(view.shape, view.stride(), view.storage_offset())
        return places.flatten().tolist()

    seen = Counter[str]()
    for _ in range(1000):
        shape = [*random.choices([1, 2, 3], k=random.randint(1, 3)), random.choice([0, 1, 2, 2])]
        strides = ([random.choice([0, 1, 2, 4, 6]) for _ in shape] for _ in "ab")
        a, b = (buffer.as_strided(shape, each, random.randint(0, 30)) for each in strides)
        ours = verdict(_check_written, record, {"a": a, "b": b})
        assert not ours or verdict(raw.exchange, a, b), (shape, a.stride(), b.stride())
        own, other = elements(a), elements(b)
        shares = len({*own}) < len(own) or len({*other}) < len(other) or bool({*own} & {*other})
        assert ours or not shares, (shape, a.stride(), b.stride())
        seen[ours[:6]] += 1
    assert len(seen) == 3 and min(seen.values()) > 10, seen


def test_opcheck_of_both_ops() -> None:
    arguments = (torch.randn(6, 3), ROWS, POSITION)
    opcheck(raw.put.default, arguments)
    opcheck(raw.exchange.default, (torch.randn(4), torch.randn(4)))
    opcheck(raw.exchange_functional.default, (torch.randn(4), torch.randn(4)))
    differentiable = tuple(t.clone().requires_grad_() for t in arguments[:2])
    opcheck(raw.put_functional.default, (*differentiable, POSITION))


def test_derivative_and_vmap_of_the_twin(ops: torch_op.Ops) -> None:
    cache, rows = torch.randn(6, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    weight = torch.randn(6, 3)
    result = (ops.put_functional(cache, rows, POSITION) * weight).sum()
    of_cache, of_rows = torch.autograd.grad(result, (cache, rows))
    assert torch.equal(of_cache, weight.index_fill(0, POSITION, 0)) and torch.equal(of_rows, weight[POSITION])
    batch = torch.randn(3, 2, 3)
    found = torch.vmap(ops.put_functional, (None, 0, None))(cache.detach(), batch, POSITION)
    assert torch.equal(found, torch.stack([expected(cache.detach(), each) for each in batch]))


def test_compiled_without_a_copy() -> None:
    def step(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        raw.put(cache, rows, POSITION)
        return cache.T @ cache  # which no C++ compiler is needed for

    cache = torch.randn(6, 3)
    wanted, address = expected(cache, ROWS), cache.data_ptr()
    result, (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), cache, ROWS)
    assert torch.equal(cache, wanted) and cache.data_ptr() == address
    torch.testing.assert_close(result, wanted.T @ wanted)
    assert "test_written.put.default(arg" in code  # the kernel gets the input itself
    assert "put_functional" not in code and "clone" not in code and "copy_" not in code


class Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(3, 3)

    def forward(self, cache: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> Any:
        raw.put(cache, self.scale(rows), position)
        return cache.sum(0), cache


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_has_the_twin(exporter: str, tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    cache = torch.randn(6, 3)
    report = export.export(
        Step(), (cache, ROWS, POSITION), path, exporter=exporter, library=LIBRARY, optimize=False
    )
    assert report.nodes["test.written.CustomPut"] == 1
    assert report.parity is not None and report.parity.error < 1e-5
    assert report.without_library is not None and report.without_library.error < 1e-5
    assert deploy.session(path, CPU, LIBRARY).shareable == {"y_1": "cache"}


class ForgetsTheCache(Step):
    def forward(self, cache: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> Any:
        return super().forward(cache, rows, position)[0]


class OwnCache(Step):
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(6, 3))

    def forward(self, cache: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> Any:
        return super().forward(self.own, rows, position)[0] + cache


def test_a_write_that_the_file_does_not_have_is_noted(tmp_path: Path) -> None:
    arguments = (torch.randn(6, 3), ROWS, POSITION)
    nets = (Step(), ""), (ForgetsTheCache(), "input cache, and does"), (OwnCache(), "buffer own. In")
    for net, noted in nets:
        report = export.export(net, arguments, tmp_path / "step.onnx", bodies=False, verify=False)
        notes = [note for note in report.notes if "the model writes into its" in note]
        assert len(notes) == bool(noted) and all(noted in note for note in notes)


class Counts(torch.nn.Module):
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.ones(4))

    def forward(self, total: torch.Tensor, x: torch.Tensor) -> Any:
        raw.bump(total, x)
        raw.bump(self.own, x)
        return total, self.own * 1, self.own[1:], x + 1


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_each_run_of_an_export_begins_with_the_same_values(exporter: str, tmp_path: Path) -> None:
    """Also where a second run would give other results, and of what the model itself keeps."""
    net, total = Counts(), torch.randn(4)
    before = total.clone()
    given: Any = {"exporter": exporter, "library": LIBRARY, "bodies": False}
    report = export.export(net, (total, torch.randn(4)), tmp_path / "counts.onnx", **given)
    assert report.parity is not None and report.parity.equal
    assert torch.equal(total, before) and torch.equal(net.own, torch.ones(4))


class WritesViews(torch.nn.Module):
    def forward(self, both: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        raw.put(both[0], rows, POSITION)
        raw.put(both[1], rows + 1, POSITION)
        return both


def test_export_of_writes_into_views(tmp_path: Path) -> None:
    arguments = (torch.randn(2, 6, 3), ROWS)
    report = export.export(WritesViews(), arguments, tmp_path / "views.onnx", library=LIBRARY, optimize=False)
    assert report.parity is not None and report.parity.equal
    assert report.nodes["test.written.CustomPut"] == 2
    with pytest.raises(ExportError, match="writes into a view, which the TorchScript exporter loses"):
        export.export(WritesViews(), arguments, tmp_path / "v.onnx", exporter="torchscript", optimize=False)


def put_model(*, others: tuple[Any, ...] = (), **outputs: int) -> bytes:
    node = helper.make_node("CustomPut", ["cache", "rows", "position"], ["cache_out"], domain="test.written")
    inputs = {"cache": FLOAT, "rows": FLOAT, "position": INT64}
    made = model([node, *others], inputs, {"cache_out": FLOAT, **outputs}, test__written=1)
    return made.SerializeToString()


def ort_session(
    data: bytes, providers: list[str] = CPU, libraries: tuple[Path, ...] = (LIBRARY,)
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    for library in libraries:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(data, options, providers=providers)


def test_onnx_runtime_copies_only_where_the_memory_differs() -> None:
    session = ort_session(put_model())
    cache = np.random.default_rng(0).standard_normal((6, 3), np.float32)
    kept, wanted = cache.copy(), expected(torch.from_numpy(cache)).numpy()
    feeds = {"rows": ROWS.numpy(), "position": POSITION.numpy()}
    (found,) = session.run(None, {"cache": cache, **feeds})
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(cache, kept)  # an input that nobody bound to the output stays as it is
    shared = ort.OrtValue.ortvalue_from_numpy(cache.copy())
    binding = session.io_binding()
    binding.bind_ortvalue_input("cache", shared)
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    binding.bind_ortvalue_output("cache_out", shared)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(shared.numpy(), wanted)


def test_onnx_runtime_plans_one_memory() -> None:
    """Between two nodes the planner itself gives each written input and its output one memory."""

    def probe(source: str, to: str) -> Any:
        return helper.make_node("CustomProbe", [source], [to, f"at_{source}"], domain="custom_domain")

    exchange = helper.make_node("CustomExchange", ["x", "z"], ["sum", "c", "d"], domain="test.written")
    nodes = [probe("a", "x"), probe("b", "z"), exchange, probe("c", "u"), probe("d", "v")]
    results = dict.fromkeys(("sum", "u", "v"), FLOAT) | {f"at_{name}": DOUBLE for name in "abcd"}
    graph = model(nodes, {"a": FLOAT, "b": FLOAT}, results, test__written=1, custom_domain=1)
    for given in graph.graph.input:
        given.type.tensor_type.shape.dim.add().dim_value = 3  # it plans for sizes that it knows
    session = ort_session(graph.SerializeToString(), libraries=(LIBRARY, find_library("test_probe")))
    a, b = np.array([1, 2, 3], np.float32), np.array([5, 6, 7], np.float32)
    total, u, v, *places = session.run(None, {"a": a, "b": b})
    assert (total.tolist(), u.tolist(), v.tolist()) == ((a + b).tolist(), b.tolist(), a.tolist())
    written, read = [at[1] for at in places[:2]], [at[0] for at in places[2:]]
    assert written == read


def test_a_session_refuses_one_memory_that_another_node_reads() -> None:
    cache = torch.randn(6, 3)
    feeds = {"cache": cache, "rows": ROWS, "position": POSITION}
    wanted = expected(cache)
    opened = deploy.session(put_model(), CPU, LIBRARY)
    assert opened.shareable == {"cache_out": "cache"}
    result = opened.run(feeds, {"cache_out": cache})["cache_out"]
    assert result is cache and torch.equal(cache, wanted)
    with pytest.raises(FeedError, match="output cache_out shares memory with input rows"):
        opened.run(feeds | {"rows": cache[:2]}, {"cache_out": cache})
    with pytest.raises(FeedError, match="expected a contiguous torch tensor, float32"):
        opened.run(feeds, {"cache_out": cache.T})
    with pytest.raises(FeedError, match="output tensors need torch tensors as inputs"):
        opened.run({name: each.numpy() for name, each in feeds.items()}, {"cache_out": cache})
    late = helper.make_node("Neg", ["cache"], ["late"])
    opened = deploy.session(put_model(others=(late,), late=FLOAT), CPU, LIBRARY)
    with pytest.raises(FeedError, match="or another node reads cache as well. Give the output its own"):
        opened.run(feeds, {"cache_out": cache})
    assert not deploy.session(put_model(cache=FLOAT), CPU, LIBRARY).shareable  # it is an output, too
    found = opened.run(feeds, {"cache_out": torch.empty(6, 3), "late": torch.empty(6, 3)})
    assert torch.equal(found["late"], -cache) and torch.equal(found["cache_out"], wanted)


def test_an_absent_input_lends_no_memory() -> None:
    record = record_of("f(Tensor x, Tensor? w=None) -> Tensor", "d", in_place="y = w")
    clip = helper.make_node("Clip", ["x", "", "x"], ["z"])
    nodes = helper.make_node("CustomF", ["x"], ["y"], domain="d"), clip
    proto = model([*nodes], {"x": FLOAT}, {"y": FLOAT, "z": FLOAT}, d=1)
    library: Any = SimpleNamespace(by_onnx_name={"CustomF": record})
    assert _shareable(Model("f", proto), [library]) == {}


def test_twinop_run_compares_a_node_with_the_twin() -> None:
    cache = torch.randn(6, 3)
    values = {"cache": cache, "rows": ROWS, "position": POSITION, "cache_out": expected(cache)}
    records = {record.node_type: record for record in torch_op.records().values()}
    found = node_parity.compare(node_parity.observed(onnx.load_from_string(put_model())), values, records)
    assert [each.equal for each in found] == [True]


def test_the_memory_of_outputs() -> None:
    graph = parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "test.written": 1]>
        g (float[N,3] x, float[N,3] y, int64[2] to) => (float[N,3] x_out, float[N,3] y, float[2,3] z) {
          x_out = test.written.CustomBump(x, y)
          z = Reshape(x_out, to)
        }""")
    opened = deploy.session(graph, CPU, LIBRARY)
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    feeds, memory = {"x": x, "y": y, "to": torch.tensor([2, 3])}, torch.empty(3, 3)
    for given, message in (
        ({"x_out": memory[:2], "y": memory[1:]}, "outputs y and x_out share memory"),
        ({"x_out": memory}, r"torch.float32 \(3, 3\) on cpu\); expected .*, float32 \(2, 3\) on cpu"),
        ({"z": [1]}, "memory of output z is a list; expected"),
    ):
        with pytest.raises(FeedError, match=message):
            opened.run(feeds, given)
    assert opened.run(feeds, {"y": memory[:2]})["y"].data_ptr() == memory.data_ptr()
    assert torch.equal(memory[:2], y)  # an output that is an input
    # Where the file declares a wrong shape, a run is repeated; not if it has written into an input.
    feeds["to"] = torch.tensor([3, 2])
    with pytest.raises(RunError, match="shape"):
        opened.run(feeds, {"x_out": x, "z": None})
    assert torch.equal(x, y)
    assert opened.run(feeds, ["z"])["z"].shape == (3, 2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_steps_in_graphs_of_a_session(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is captured for each place of what is written in place. On the CPU a stand-in captures."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "test.written": 1]>
        g (float[R,C] cache, float[R,C] total, float[N,C] rows, int64[N] position, float[R,C] more)
          => (float[R,C] cache_out, float[R,C] total_out, float[N,C] y) {
          cache_out = test.written.CustomPut(cache, rows, position)
          total_out = test.written.CustomBump(total, more)
          y = Gather(cache_out, position)
        }""")
    on_cuda = device == "cuda"
    opened = deploy.session(proto, [f"{device.upper()}ExecutionProvider"], LIBRARY, enable_cuda_graph=on_cuda)
    runner: Any = opened._tensors if on_cuda else TensorRunner(opened, opened._inner, cuda_graph=True)
    run = opened.run if on_cuda else partial(runner._run_cuda, device=torch.device(device))
    captured, fails = set(), False

    def guarded(call: Callable[..., Any], binding: Any, options: Any) -> None:
        graph = options.get_run_config_entry("gpu_graph_id"), threading.get_ident()
        if graph[0] != "-1" and graph not in captured:  # ONNX Runtime runs a model before it captures it
            captured.add(graph)
            call(binding, options)
            if fails:
                captured.remove(graph)
                raise RunError("the capture failed")
        call(binding, options)

    if not on_cuda:
        monkeypatch.setattr(torch_binding, "guarded", guarded)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch_binding, "_MAX_GRAPHS", 4)
    numbers, position, y = count(2), POSITION.to(device), torch.empty(2, 3, device=device)

    def step(cache: torch.Tensor, total: torch.Tensor, shares: bool = True, graphs: int = 1) -> int:
        rows, more = ROWS.to(device) * next(numbers), torch.ones_like(total)
        wanted, before = (cache.index_copy(0, position, rows), total + more), (cache.clone(), total.clone())
        feeds = {"cache": cache, "total": total, "rows": rows, "position": position, "more": more}
        outputs = {"cache_out": cache if shares else None, "total_out": total if shares else None, "y": y}
        torch.cuda.reset_peak_memory_stats() if on_cuda else None
        allocated = torch.cuda.memory_allocated()
        found = run(feeds, outputs)
        allocated = torch.cuda.max_memory_allocated() - allocated
        assert list(found) == list(outputs) and found["y"] is y and torch.equal(y, rows)
        assert torch.equal(found["cache_out"], wanted[0]) and torch.equal(found["total_out"], wanted[1])
        assert (found["cache_out"] is cache, found["total_out"] is total) == (shares, shares)
        assert shares or (torch.equal(cache, before[0]) and torch.equal(total, before[1]))
        assert len(runner._graphs) == graphs
        return allocated

    caches, totals = torch.randn(2, 2, 1 << 16, 3, device=device)
    address = caches.data_ptr()
    if not on_cuda:  # a capture that fails leaves what was written in place as it was
        before, fails = totals[0].clone(), True
        with pytest.raises(RunError, match="the capture failed"):
            step(caches[0], totals[0])
        assert torch.equal(totals[0], before)
        fails = False
    steps = [step(caches[0], totals[0]) for _ in range(5)]
    assert caches.data_ptr() == address and max(steps[1:]) < 4096  # nothing is copied
    step(caches[1], totals[1], graphs=2)
    step(caches[1, :9], totals[1, :9], graphs=3)  # other shapes in the memory of the second
    kept = [{*graph.buffers} for graph in runner._graphs.values()]
    assert kept == [{"rows", "position", "more", "y"}] * 3
    step(caches[0], totals[0], shares=False, graphs=4)
    for cache, total in ((caches[0, :8], totals[1, :8]), (caches[0], totals[0]), (caches[1], totals[1])):
        step(cache, total, graphs=4)  # the first of them without a graph
    with ThreadPoolExecutor(1) as other:  # which captures again
        assert other.submit(step, caches[0], totals[0], graphs=4).exception() is None
