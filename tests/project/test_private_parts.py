"""Names each private part of another package that twinop uses: what for, and that it is there and behaves.

The bounds in pyproject.toml say up to which version of a package this was tried. To raise one, install the
new version, run this file and the tests of what uses the part, and move the bound.
"""

import ast
import importlib.metadata
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from twinop.deploy.service.newer_python import tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "deploy", "export", "model", "optimize", "torch_op", "twinop")
OTHERS = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "triton", "helion", "uvicorn")


@dataclass(frozen=True)
class Part:
    """A part of another package.

    Attributes:
        name: as `parts_in` finds it in the code; one that it cannot find has another form.
        use: what twinop uses it for.
        works: whether it is there and does what twinop expects.
    """

    package: str
    name: str
    use: str
    works: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"


def session(**options: Any) -> Any:
    """A session of y = x + x."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 14]> g (float[2] x) => (float[2] y) {y = Add(x, x)}'
    )
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"], **options
    )


def runs_below_python() -> bool:
    """The C session runs, binds memory by the C device, and outlives the Python session."""
    made = session()
    x, inner = np.ones(2, np.float32), made._sess
    binding = onnxruntime.SessionIOBinding(inner)
    device = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
    binding.bind_input("x", device, np.float32, [2], x.ctypes.data)
    binding.bind_output("y", device)
    weakref.finalize(made, lambda: None)
    del made
    inner.run_with_iobinding(binding, None)
    return [2, 2] == binding.get_outputs()[0].numpy().tolist() == inner.run(["y"], {"x": x}, None)[0].tolist()


def binds_below_python() -> bool:
    made = session()
    binding = made.io_binding()
    binding.bind_cpu_input("x", np.ones(2, np.float32))
    binding.bind_output("y")
    made._sess.run_with_iobinding(binding._iobinding, None)
    return bool(binding.copy_outputs_to_cpu()[0].tolist() == [2, 2])


def infers_shapes() -> bool:
    from twinop.optimize.symbolic_shapes import _symbolic_shapes

    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 14]> g (float[n, 2] x) => (float[m, 4] y) '
        "{a = Relu(x) y = Concat <axis = 1> (a, a)}"
    )
    found, _ = _symbolic_shapes(proto, auto_merge=True)
    assert found is not None  # None hides that a step is gone
    shapes = {each.name: each.type.tensor_type.shape.dim for each in found.graph.value_info}
    return shapes["a"][0].dim_param == "n" and shapes["a"][1].dim_value == 2


def flattens() -> bool:
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten({"a": [1, 2]})
    return leaves == [1, 2] and _pytree.tree_unflatten(leaves, spec) == {"a": [1, 2]}


def limits_rules() -> bool:
    from onnxscript.rewriter.rules.common import successive_relu_rule

    return successive_relu_rule._target_pattern.output_nodes[0].op_identifier() == ("", "Relu", "")


def under_vmap(check: Callable[[torch.Tensor], Any]) -> bool:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(check(x))
        return x

    torch.func.vmap(function)(torch.ones(2, 3))
    return bool(found[0])


def unwraps_and_adds(x: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    level = functorch.peek_interpreter_stack().level()
    inner, dim = functorch._unwrap_batched(x, level)
    again, axis = functorch._unwrap_batched(functorch._add_batch_dim(inner, 1, level), level)
    return inner.shape == (2, 3) and dim == 0 and again.shape == (2, 3) and axis == 1


def knows_transforms(x: torch.Tensor) -> bool:
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    vmap = torch._C._functorch.TransformType.Vmap
    stack = torch._C._functorch.get_interpreter_stack()
    assert stack is not None
    return (
        torch._C._are_functorch_transforms_active()
        and [each.key() for each in stack] == [vmap]
        and retrieve_current_functorch_interpreter().key() == vmap
    )


def sees_forward_mode() -> bool:
    from torch.autograd import forward_ad

    outside = forward_ad._current_level
    with forward_ad.dual_level():
        return outside < 0 <= forward_ad._current_level


def enters(guard: Callable[[], Any]) -> bool:
    with guard():
        return True


def below_autograd() -> bool:
    x = torch.ones(2, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        return not (x * 2).requires_grad


def fakes() -> bool:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    with FakeTensorMode():
        x = torch.ones(2)
    return isinstance(x, FakeTensor) and not is_traceable_wrapper_subclass(x)


def records_dispatch() -> bool:
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1).neg()
        count = len(seen)
        with _disable_current_modes():
            torch.ones(1).neg()
    return "aten.neg.default" in seen and len(seen) == count


def makes_symbols() -> bool:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    symbol = shapes.create_symbol(5, ConstantSource("n"), DimDynamic.DYNAMIC)
    number: Any = shapes.create_symintnode(symbol, hint=5, source=ConstantSource("n"))
    return number.node.hint == 5 and "evaluate_expr" in dir(ShapeEnv)


def keeps_sizes_open() -> bool:
    from torch.fx.experimental import _config

    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        inside = _config.backed_size_oblivious
    return inside and not _config.backed_size_oblivious


def loads_code() -> bool:
    from torch._inductor.codecache import PyCodeCache

    return bool(PyCodeCache.load("number = 7").number == 7)


def exports_layers() -> bool:
    """The exporter caches a decomposed layer where `export/routes.py` clears it."""
    return all(hasattr(op, "_dispatch_cache") for op in (torch.ops.aten.gru.input, torch.ops.aten.lstm.input))


def donates() -> bool:
    from torch._functorch import config

    return isinstance(config.donated_buffer, bool)


def parses_ir() -> bool:
    from twinop.triton.ttir import kernel_uses

    text = (
        "module { tt.func public @f(%p: !tt.ptr<f32>, %v: f32) { tt.store %p, %v : !tt.ptr<f32> tt.return } }"
    )
    return kernel_uses(text).written == {0}


def stands_in_for_the_driver() -> bool:
    from triton.runtime.driver import driver

    class Other:
        pass

    other = Other()
    driver.set_active(other)
    try:
        return driver.active is other
    finally:
        driver.set_active(None)


def has_parameters(function: Callable[..., Any], *names: str) -> bool:
    return [*names] == [*inspect.signature(function).parameters][: len(names)]


def packs_arguments() -> bool:
    from triton.runtime.jit import JITFunction

    names = ("self", "backend", "kwargs", "bound_args", "specialization", "options")
    return has_parameters(JITFunction._pack_args, *names)


@cache
def helion_kernel() -> Any:
    import helion

    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    return helion.kernel(function, config=helion.Config(), static_shapes=False)


def binds_helion() -> bool:
    kernel = helion_kernel()
    source = inspect.getsource(type(kernel))
    with kernel._bind_lock:
        return (
            "_base_spec_key" in source
            and hasattr(kernel, "_specialize_extra")
            and len(kernel._annotations) == 1
        )


def closes_silent_connections() -> bool:
    """`deploy/service/rest.py` sets the timer of a connection on which nothing has arrived."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    source = inspect.getsource(HttpToolsProtocol)
    return "timeout_keep_alive_task" in source and callable(HttpToolsProtocol.timeout_keep_alive_handler)


PARTS = [
    Part("onnxruntime", "._sess", "runs 2 us faster; what is freed at a session's end", runs_below_python),
    Part("onnxruntime", "._get_c_device", "binds tensors below the Python class", runs_below_python),
    Part("onnxruntime", "._iobinding", "runs once more at a session's end (bench)", binds_below_python),
    Part(
        "onnxruntime",
        "InferenceSession(enable_fallback=0)",
        "no retry on the CPU, which only prints",
        lambda: session(enable_fallback=0)._enable_fallback is False,
    ),
    *(
        Part("onnxruntime", name, "symbolic shapes that onnx does not infer", infers_shapes)
        for name in (
            "._infer_impl",
            "._pass_on_shape_and_type",
            "._preprocess",
            "._get_shape",
            "._new_symbolic_dim_from_output",
            "onnxruntime.tools.symbolic_shape_infer",
        )
    ),
    Part("onnxscript", "._target_pattern", "tries a rule at nodes of its type only", limits_rules),
    *(
        Part("torch", name, "torch.func transforms of ops", lambda: under_vmap(knows_transforms))
        for name in (
            "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter",
            "torch._C._functorch.TransformType",
            "torch._C._functorch.get_interpreter_stack",
            "torch._C._are_functorch_transforms_active",
        )
    ),
    *(
        Part("torch", name, "batches of the kernels' vmap rule", lambda: under_vmap(unwraps_and_adds))
        for name in ("torch._C._functorch", "._unwrap_batched", "._add_batch_dim")
    ),
    Part(
        "torch",
        "torch._C._ExcludeDispatchKeyGuard",
        "calls an op below its vmap rule",
        lambda: enters(
            lambda: torch._C._ExcludeDispatchKeyGuard(
                torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
            )
        ),
    ),
    Part(
        "torch",
        "torch._C.DispatchKeySet",
        "the keys of that guard",
        lambda: torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).has(torch._C.DispatchKey.CPU),
    ),
    Part(
        "torch",
        "torch._C.DispatchKey",
        "the keys of that guard",
        lambda: torch._C.DispatchKey.FuncTorchBatched,
    ),
    Part("torch", "torch.utils._pytree", "the tensors in an example input's containers", flattens),
    Part(
        "torch",
        "torch._C.TensorType",
        "the types of outputs in a traced graph",
        lambda: torch._C.TensorType.get().with_dtype(torch.half).dtype() is torch.half,
    ),
    Part(
        "torch",
        "mock of torch._C._jit_onnx_log",
        "silences the exporter's log",
        lambda: hasattr(torch._C, "_jit_onnx_log"),
    ),
    Part("torch", "torch._C._AutoDispatchBelowAutograd", "calls an op below its formula", below_autograd),
    Part("torch", "._current_level", "refuses forward-mode derivatives without a formula", sees_forward_mode),
    Part(
        "torch",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "whether a library has a CPU kernel",
        lambda: (
            torch._C._dispatch_has_kernel_for_dispatch_key("aten::relu", "CPU")
            and not torch._C._dispatch_has_kernel_for_dispatch_key("aten::relu", "Lazy")
        ),
    ),
    Part(
        "torch",
        "torch._library.triton.is_wrap_triton_enabled",
        "launches go into a traced graph",
        lambda: isinstance(torch._library.triton.is_wrap_triton_enabled(), bool),
    ),
    *(
        Part("torch", name, "tensors of a trace", fakes)
        for name in (
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        )
    ),
    *(
        Part(
            "torch", f"torch.utils._python_dispatch.{name}", "records what a launcher calls", records_dispatch
        )
        for name in ("TorchDispatchMode", "_disable_current_modes")
    ),
    Part("torch", "torch._dynamo.source.ConstantSource", "symbolic sizes of a launcher", makes_symbols),
    Part(
        "torch",
        "torch._dynamo.graph_break",
        "leaves a compiled graph",
        lambda: callable(torch._dynamo.graph_break),
    ),
    Part("torch", "torch._inductor.codecache.PyCodeCache", "loads what Helion writes", loads_code),
    Part(
        "torch",
        "torch._guards",
        "Helion's code is written outside of torch's tracing",
        lambda: enters(lambda: torch._guards.tracing(None)),
    ),
    Part(
        "torch",
        "torch._C.DisableTorchFunction",
        "Helion's code is written without the recorder",
        lambda: enters(torch._C.DisableTorchFunction),
    ),
    Part(
        "torch", "torch.fx.experimental._config", "sizes of 0 and 1 stay open in an export", keeps_sizes_open
    ),
    Part("torch", "torch._functorch.config", "repeated backward runs (bench)", donates),
    Part("torch", "torch._check", "checks of symbolic sizes", lambda: torch._check(True) is None),
    Part(
        "torch", "torch.cuda._sleep", "a kernel that takes long (tests)", lambda: callable(torch.cuda._sleep)
    ),
    Part(
        "torch",
        "._is_view",
        "refuses to export a write into a view",
        lambda: torch.ones(2)[:1]._is_view() and not torch.ones(2)._is_view(),
    ),
    Part(
        "torch",
        "._cdata",
        "which tensors share memory in a trace",
        lambda: (lambda x: x.untyped_storage()._cdata == x[1:].untyped_storage()._cdata)(torch.ones(2)),
    ),
    Part(
        "torch",
        "aten op._dispatch_cache",
        "the exporter's cache would change the next export",
        exports_layers,
    ),
    Part("triton", "triton._C.libtriton.ir", "reads what a kernel writes", parses_ir),
    Part("triton", "triton.runtime.driver.driver", "compiles without a GPU", stands_in_for_the_driver),
    Part("triton", "._pack_args", "Triton's own specialisation of arguments", packs_arguments),
    *(
        Part("helion", name, "the function that Helion writes for a kernel", binds_helion)
        for name in ("._bind_lock", "._base_spec_key", "._annotations", "._specialize_extra")
    ),
    Part(
        "uvicorn",
        "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol",
        "closes connections on which nothing arrives",
        closes_silent_connections,
    ),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_private_part_is_there_and_behaves(part: Part) -> None:
    if part.package in ("triton", "helion"):
        pytest.importorskip(part.package)
    works = part.works()
    assert works, f"{part.package} {importlib.metadata.version(part.package)}: {part.name} ({part.use})"


def bounds() -> dict[str, SpecifierSet]:
    """What pyproject.toml asks of each package, in all its lists together."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, works = settings["project"], settings["dependency-groups"]["works"]
    found: dict[str, SpecifierSet] = {}
    for text in (
        *project["dependencies"],
        *works,
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ):
        asked = Requirement(text)
        found[asked.name] = found.get(asked.name, SpecifierSet()) & asked.specifier
    return found


@pytest.mark.parametrize("package", sorted({part.package for part in PARTS} | {"onnx-ir"}))
def test_a_package_whose_private_parts_are_used_is_bounded(package: str) -> None:
    """Fails for a version that was not tried: run the tests with it, then raise the bound."""
    asked = bounds()[package]
    assert any(each.operator in ("<", "<=") for each in asked), (
        f"{package} has no upper bound in pyproject.toml"
    )
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert asked.contains(version, prereleases=True), (
        f"{package} {version} is not in {asked} of pyproject.toml"
    )


def parts_in(folder: Path) -> Iterator[str]:
    """Yields private names: imports, chains from another package, attributes that nothing here sets."""
    trees = [ast.parse(path.read_text()) for name in FOLDERS for path in (folder / name).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = re.findall(r"^[\w.]+", ast.unparse(node))
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first in OTHERS and any(map(_is_private, rest)):
                yield name
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr) or node.attr in own:
            continue
        if ast.unparse(node).partition(".")[0] not in (*OTHERS, "os", "sys"):
            yield f".{node.attr}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_private_part_that_the_code_uses_is_in_the_table() -> None:
    named = {part.name for part in PARTS}
    used = {each for each in parts_in(ROOT) if not any(each.startswith(f"{name}.") for name in named)}
    assert sorted(used - named - {"torch._C"}) == []  # alone it only holds the others
