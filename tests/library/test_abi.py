"""The C interface of libraries (kernels/abi.h): a library in C99, other versions, the call of a launcher."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from abi_files import CPU, ROOT, X, c_library, in_torch, negate_model
from abi_structures import launch_unary, read_table
from record_driver import compiler

from twinop import deploy
from twinop.errors import LibraryError


def test_headers_of_ops_need_no_runtime() -> None:
    """Nothing that an op's author compiles includes a header of torch or ONNX Runtime."""
    for header in ("twinop/abi.h", "twinop/record/registry.h", "twinop/library.h", "tests/ops/abi_ops.h"):
        command = [compiler(), "-std=c++17", f"-I{ROOT}", f"-I{ROOT}/twinop/include", "-M", "-x", "c++", "-"]
        command += ['-DTWINOP_VERSION="0"', '-DTWINOP_CUDA_ARCHS="none"', '-DTWINOP_CUDA_VERSION=""']
        done = subprocess.run(command, input=f'#include "{header}"\n', text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert "include/twinop/" in done.stdout
        assert not any(word in done.stdout for word in ("onnxruntime", "ort_customop", "torch/", "torch_op"))


def test_a_library_in_c() -> None:
    path = c_library("plain_c")
    opened = deploy.session(negate_model(times=2.0), CPU, path)
    np.testing.assert_array_equal(opened.run({"x": X})["y"], -2 * X)
    many = np.arange(100_000, dtype=np.float32)  # several pieces on the pool
    np.testing.assert_array_equal(opened.run({"x": many})["y"], -2 * many)
    with pytest.raises(deploy.RunError, match=r"test_c::negate\(x: float32\[3\]\): times is 0"):
        deploy.session(negate_model(times=0.0), CPU, path).run({"x": X})
    code = (
        "ops = torch_op.load(sys.argv[1])\n"
        "assert ops is torch_op.load(sys.argv[1])\n"
        "x = torch.tensor([1.0, -2.0, 3.0])\n"
        "print(ops.negate(x, 2.0).tolist(), torch.ops.test_c.negate(x).tolist())\n"
        "try:\n    ops.negate(x, 0.0)\nexcept RuntimeError as error:\n    print(error)\n"
    )
    lines = in_torch(code, path).splitlines()
    assert lines[0] == "[-2.0, 4.0, -6.0] [-1.0, 2.0, -3.0]"
    assert "test_c::negate(x: float32[3]): times is 0: nothing is left to negate" in lines[1]


def test_a_library_of_another_version() -> None:
    """Both adapters refuse a library of another version."""
    path = c_library("other_version", "-DTABLE_VERSION=7")
    said = r"the library's ops have version 7 of twinop's binary interface, {} reads version 3"
    options = ort.SessionOptions()
    with pytest.raises(Exception, match=said.format("its ONNX Runtime adapter")):
        options.register_custom_ops_library(str(path))
    with pytest.raises(LibraryError, match=said.format("its ONNX Runtime adapter")):
        deploy.session(negate_model(), CPU, path)
    code = (
        "from twinop.errors import LibraryError\n"
        "try:\n    torch_op.load(sys.argv[1])\nexcept LibraryError as error:\n    print(error)\n"
        "print(hasattr(torch.ops.test_c, 'negate'))\n"
    )
    refused, registered = in_torch(code, path).splitlines()
    assert refused.startswith(f"{path}: the library's ops have version 7") and registered == "False"
    assert "libtwinop_torch.so reads version 3" in refused


def ops_of(library: Path) -> list[Any]:
    table = read_table(library)
    return [table.ops[i].contents for i in range(table.op_count)]


def test_a_launcher_through_the_c_interface(libraries: dict[str, Path]) -> None:
    """The same call on the CPU, which needs no GPU: the structures are those of kernels/abi.h."""
    import torch

    from twinop import torch_op

    x = torch.randn(1024)
    y = torch.empty_like(x)
    exp = next(op for op in ops_of(libraries["custom_ops"]) if op.schema.startswith(b"exp("))
    assert launch_unary(exp, x, y) == ""
    assert torch.equal(y, torch_op.exp(x))
