"""Models and libraries for the tests of the libraries' C interface."""

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import warm_python
from onnx import TensorProto, helper
from record_driver import ROOT, compiler, precompiled

from twinop.libraries.library import find_library

CPU = ["CPUExecutionProvider"]
FLOAT, INT64, INT32, INT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.INT8
X = np.array([1, -2, 3], np.float32)


def model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    initializers: Mapping[str, np.ndarray] | None = None,
    **domains: int,
) -> onnx.ModelProto:
    def values(types: Mapping[str, int]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, dtype, None) for name, dtype in types.items()]

    constants = [onnx.numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()]
    graph = helper.make_graph(nodes, "g", values(inputs), values(outputs), constants)
    opsets = [helper.make_opsetid(domain.replace("__", "."), version) for domain, version in domains.items()]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), *opsets], ir_version=10)


def in_torch(code: str, *arguments: Path) -> str:
    """The output of a process that has torch and `torch_op`."""
    start = "import sys\nimport torch\nfrom twinop import torch_op\n"
    done = warm_python.run(["-c", start + code, *arguments], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def archive() -> Path:
    for folder in (find_library("custom_relu").parent, ROOT / "build"):
        if (folder / "libtwinop_ort.a").is_file():
            return folder / "libtwinop_ort.a"
    pytest.skip("libtwinop_ort.a is not here: only libraries came to this machine")


def c_compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler on this machine")
    return found


@cache
def c_library(name: str, *definitions: str, link: str = "") -> Path:
    """Builds a library of tests/ops/plain_c.c from a C compiler and the archive only.

    Args:
        link: a further option of the linker.
    """
    folder = Path(tempfile.mkdtemp(prefix="twinop-c-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_c(ROOT / "tests/ops/plain_c.c", folder / f"lib{name}.so", *definitions, link=link)


def build_c(
    source: Path, library: Path, *definitions: str, link: str = "", headers: tuple[str, ...] = ()
) -> Path:
    """Builds a library of a file in C, or C++, and the archive, without optimization.

    Args:
        headers: what the file includes; it is compiled once.
    """
    of_c = [c_compiler(), "-x", "c", "-std=c99", "-pedantic"]
    language = of_c if source.suffix == ".c" else [compiler(), "-std=c++17"]
    strict = [*language, "-Wall", "-Wextra", "-Werror", f"-I{ROOT}", f"-I{ROOT}/twinop/include"]
    command = [*strict, "-fPIC", "-fvisibility=hidden", *definitions]
    included = ["-include", str(precompiled(headers, *command))] if headers else []
    compiled = library.with_suffix(".o")
    subprocess.run([*command, *included, "-c", source, "-o", compiled], check=True)
    hidden = f"-Wl,--version-script={ROOT}/ort_customop/exports.map"
    options = f"{hidden},--undefined=RegisterCustomOps,-Bsymbolic,--no-undefined {link}".split()
    subprocess.run([compiler(), "-shared", compiled, archive(), *options, "-o", library], check=True)
    return library


def negate_model(domain: str = "test_c", times: float = 1.0) -> onnx.ModelProto:
    node = helper.make_node("CustomNegate", ["x"], ["y"], "negate", domain=domain, times=times)
    return model([node], {"x": FLOAT}, {"y": FLOAT}, None, **{domain: 1})
