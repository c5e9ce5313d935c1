"""Every error that a user of twinop.torch_op can cause is one clear message."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import samples  # noqa: F401  (registers the ops that only the tests use)
import torch

from twinop import torch_op
from twinop.errors import LibraryError, RecordError
from twinop.library import find_library

ops = torch.ops.custom_domain
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda d: torch.ones(3, dtype=torch.int64, device=d),
            r"x: int64\[3\].*no kernel takes these dtypes",
        ),
        (lambda d: torch.ones(3, dtype=torch.bool, device=d), r"x: bool\[3\].*no kernel takes these dtypes"),
        (lambda d: torch.ones(2, 3, dtype=torch.complex64, device=d), r"x: complex64\[2, 3\].*no kernel"),
        (lambda d: torch.eye(3, device=d).to_sparse(), r"a sparse tensor.*\.to_dense\(\)"),
        (lambda d: torch.eye(3, device=d).to_sparse_csr(), r"a sparse compressed tensor.*\.to_dense\(\)"),
        (lambda d: torch.ones((1,) * 33, device=d), r"33 dimensions, at most 32 are supported"),
    ],
    ids=["int", "bool", "complex", "sparse", "csr", "rank"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrong_tensors(make: Callable[[str], torch.Tensor], message: str, device: str) -> None:
    for relu in (ops.relu, torch_op.relu):
        with pytest.raises((RuntimeError, RecordError), match=message):
            relu(make(device))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensor() -> None:
    with pytest.raises(RecordError, match=r"a quantized tensor.*\.dequantize\(\)"):
        ops.relu(torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8))


def test_wrong_attributes() -> None:
    x = torch.randn(3)
    with pytest.raises(RuntimeError, match=r"variant is 'fast', expected one of auto \| scalar \| vec4"):
        torch_op.relu(x, "fast")
    with pytest.raises(RuntimeError, match="pads has 9 entries, at most 8"):
        ops.pad_affine(x, pads=list(range(9)))
    with pytest.raises(RuntimeError, match=r"pad_affine\(x: float32\[3\].*too short"):
        ops.pad_affine(x, pads=[1])


def test_wrong_shapes() -> None:
    with pytest.raises(
        RuntimeError, match=r"relu_backward\(grad_y: float32\[3\], y: float32\[4\]\).*one shape"
    ):
        ops.relu_backward(torch.randn(3), torch.randn(4))
    with pytest.raises(RuntimeError, match=r"bias: float32\[4\]\).*as long as the last one of x"):
        ops.pad_affine(torch.randn(2, 3), None, torch.randn(4))
    for op in (ops.pad_affine, ops.double_and_sum):
        with pytest.raises(RuntimeError, match="dimension"):
            op(torch.tensor(1.0))


def test_mixed_devices() -> None:
    with pytest.raises(
        RecordError, match="all tensors must be on one device; weight is on meta, the first on cpu"
    ):
        ops.pad_affine(torch.randn(2, 3), torch.randn(3, device="meta"))


@pytest.mark.cuda
def test_mixed_devices_cuda() -> None:
    with pytest.raises(
        RuntimeError, match="all tensors must be on one device; weight is on cpu, the first on cuda:0"
    ):
        ops.pad_affine(torch.randn(2, 3, device="cuda"), torch.randn(3))


def test_an_op_name_in_two_libraries(tmp_path: Path) -> None:
    copy = tmp_path / "libsecond.so"
    copy.write_bytes(find_library("test_ops_torch").read_bytes())
    with pytest.raises(
        LibraryError, match=r"libsecond.so: op custom_domain::double_and_sum is registered already, by .*"
    ):
        torch_op.load_library(copy)
    assert torch_op.load_library(
        find_library("test_ops_torch")
    ).records  # the same file again: nothing happens


def test_an_op_name_defined_elsewhere() -> None:
    code = (
        "import torch\n"
        "library = torch.library.Library('custom_domain', 'FRAGMENT')\n"
        "library.define('relu(Tensor x) -> Tensor')\n"
        "from twinop.errors import LibraryError\n"
        "try:\n    from twinop import torch_op\n"
        "except LibraryError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "custom_domain::relu is registered already, by code outside twinop" in result.stdout


def test_an_ort_library_is_no_torch_library() -> None:
    with pytest.raises(LibraryError, match="is registered already"):  # relu is
        torch_op.load_library(find_library("custom_relu"))


def test_a_second_copy_of_the_package_is_refused() -> None:
    code = "import sys; sys.path.insert(0, '.'); import torch_op"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0 and "import twinop.torch_op, not torch_op" in result.stderr
