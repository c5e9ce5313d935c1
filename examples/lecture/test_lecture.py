"""Tests the lecture's kernels against torch, in torch and in ONNX Runtime."""

from pathlib import Path

import lecture
import pytest
import torch
from lecture import library_path

from twinop import export

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])
THEIRS = {
    "relu_scalar": torch.relu,
    "relu_float4": torch.relu,
    "square": torch.square,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "softmax": lambda x: torch.softmax(x, -1),
}


@on_each_device
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("columns", [1, 5, 255, 1000])
def test_values(name: str, columns: int, device: str) -> None:
    x = torch.randn(7, columns, device=device)
    torch.testing.assert_close(getattr(lecture, name)(x), THEIRS[name](x))
    (row,) = x[3:4, columns // 2 :]  # begins at any address
    torch.testing.assert_close(getattr(lecture, name)(row), THEIRS[name](row))


@on_each_device
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (33, 31, 17), (64, 64, 64), (3, 5, 0)])
def test_tiles_have_the_same_bits(m: int, n: int, k: int, device: str) -> None:
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    naive = lecture.matmul(a, b, 0)
    torch.testing.assert_close(naive.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    for tile in (8, 16, 32):
        assert torch.equal(lecture.matmul(a, b, tile), naive)


class Net(torch.nn.Module):
    def forward(self, x):
        y = lecture.relu_float4(lecture.matmul(x, x.transpose(0, 1), 8))
        return lecture.softmax(lecture.gelu(lecture.square(lecture.relu_scalar(y))))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export(exporter: str, tmp_path: Path) -> None:
    x, library = torch.randn(6, 10), library_path()
    report = export.export(
        Net(), (x,), tmp_path / "net.onnx", exporter=exporter, library=library, optimize=False
    )
    assert report.parity.equal
