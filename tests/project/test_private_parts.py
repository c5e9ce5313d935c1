"""Names each private part of another package that twinop uses, and what for: the package has an upper bound.

The bounds in pyproject.toml say up to which version of a package this was tried. To raise one, install the
new version, run the tests, and move the bound.
"""

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from twinop.deploy.service.newer_python import tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "deploy", "export", "model", "optimize", "torch_op", "twinop")
OTHERS = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "triton", "helion", "uvicorn")
PARTS = {
    "onnxruntime": {
        "._sess": "runs 2 us faster; what is freed at a session's end",
        "._get_c_device": "binds tensors below the Python class",
        "._iobinding": "runs once more at a session's end (bench)",
        "._infer_impl": "symbolic shapes that onnx does not infer",
        "._pass_on_shape_and_type": "symbolic shapes that onnx does not infer",
        "._preprocess": "symbolic shapes that onnx does not infer",
        "._get_shape": "symbolic shapes that onnx does not infer",
        "._new_symbolic_dim_from_output": "symbolic shapes that onnx does not infer",
        "onnxruntime.tools.symbolic_shape_infer": "symbolic shapes that onnx does not infer",
    },
    "onnxscript": {
        "._target_pattern": "tries a rule at nodes of its type only",
    },
    "torch": {
        "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter": "torch.func transforms of ops",
        "torch._C._functorch.TransformType": "torch.func transforms of ops",
        "torch._C._functorch.get_interpreter_stack": "torch.func transforms of ops",
        "torch._C._are_functorch_transforms_active": "torch.func transforms of ops",
        "torch._C._functorch": "batches of the kernels' vmap rule",
        "._unwrap_batched": "batches of the kernels' vmap rule",
        "._add_batch_dim": "batches of the kernels' vmap rule",
        "torch._C._ExcludeDispatchKeyGuard": "calls an op below its vmap rule",
        "torch._C.DispatchKeySet": "the keys of that guard",
        "torch._C.DispatchKey": "the keys of that guard",
        "torch.utils._pytree": "the tensors in an example input's containers",
        "torch._C.TensorType": "the types of outputs in a traced graph",
        "torch._C._AutoDispatchBelowAutograd": "calls an op below its formula",
        "._current_level": "refuses forward-mode derivatives without a formula",
        "torch._C._dispatch_has_kernel_for_dispatch_key": "whether a library has a CPU kernel",
        "torch._library.triton.is_wrap_triton_enabled": "launches go into a traced graph",
        "torch._subclasses.fake_tensor.FakeTensor": "tensors of a trace",
        "torch._subclasses.fake_tensor.FakeTensorMode": "tensors of a trace",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "tensors of a trace",
        "torch.utils._python_dispatch.TorchDispatchMode": "records what a launcher calls",
        "torch.utils._python_dispatch._disable_current_modes": "records what a launcher calls",
        "torch._dynamo.source.ConstantSource": "symbolic sizes of a launcher",
        "torch._dynamo.graph_break": "leaves a compiled graph",
        "torch._inductor.codecache.PyCodeCache": "loads what Helion writes",
        "torch._guards": "Helion's code is written outside of torch's tracing",
        "torch._C.DisableTorchFunction": "Helion's code is written without the recorder",
        "torch.fx.experimental._config": "sizes of 0 and 1 stay open in an export",
        "torch._functorch.config": "repeated backward runs (bench)",
        "torch._check": "checks of symbolic sizes",
        "torch.cuda._sleep": "a kernel that takes long (tests)",
        "._is_view": "refuses to export a write into a view",
        "._cdata": "which tensors share memory in a trace",
    },
    "triton": {
        "triton._C.libtriton.ir": "reads what a kernel writes",
        "triton.runtime.driver.driver": "compiles without a GPU",
        "._pack_args": "Triton's own specialisation of arguments",
    },
    "helion": {
        "._bind_lock": "the function that Helion writes for a kernel",
        "._base_spec_key": "the function that Helion writes for a kernel",
        "._annotations": "the function that Helion writes for a kernel",
        "._specialize_extra": "the function that Helion writes for a kernel",
    },
    "uvicorn": {
        "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol": "closes silent connections",
    },
}
"""By package: each part as `parts_in` finds it in the code, and its use."""


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


@pytest.mark.parametrize("package", sorted({*PARTS, "onnx-ir"}))
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
    named = {name for parts in PARTS.values() for name in parts}
    used = {each for each in parts_in(ROOT) if not any(each.startswith(f"{name}.") for name in named)}
    assert sorted(used - named - {"torch._C"}) == []  # alone it only holds the others
