"""Tests nms in torch and in ONNX Runtime, with the library and without it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from nms import in_numpy, library_path, nms, samples

from twinop import deploy, export
from twinop.deploy.cuda import runtime_has_cuda
from twinop.libraries.library import read_library

CPU = ["CPUExecutionProvider"]
HAS_CUDA = torch.cuda.is_available() and "cuda" in read_library(library_path()).records["nms"].devices
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no GPU, or a library without CUDA")
CUDA = pytest.param("cuda", marks=needs_cuda)
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


class Net(torch.nn.Module):
    """Detections: the boxes that stay, their scores, and how many these are."""

    def forward(self, boxes, scores):
        keep = nms(boxes, scores, 0.3)
        return boxes[keep], scores[keep]


def crowd(count: int, spread: float = 100.0, levels: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes of which many overlap; scores of which some are equal."""
    generator = torch.Generator().manual_seed(count)
    corners = torch.rand(count, 2, generator=generator) * spread
    boxes = torch.cat([corners, corners + torch.rand(count, 2, generator=generator) * 20 + 1], 1)
    return boxes, torch.randint(0, levels, (count,), generator=generator) / levels


@on_each_device
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 1000, 5000])
def test_values(count: int, threshold: float, device: str) -> None:
    boxes, scores = crowd(count)
    found = nms(boxes.to(device), scores.to(device), threshold)
    expected = in_numpy(boxes, scores, threshold)
    assert found.dtype == torch.int64 and np.array_equal(found.cpu().numpy(), expected)


@on_each_device
def test_chains_of_removals(device: str) -> None:
    """Each box overlaps with the next one only: every second one stays."""
    x = torch.arange(1000.0)
    boxes = torch.stack([x, torch.zeros(1000), x + 2, torch.ones(1000)], 1).to(device)
    keep = nms(boxes, torch.linspace(1, 0, 1000).to(device), 0.2)
    assert keep.tolist() == list(range(0, 1000, 2))


@on_each_device
def test_scores_that_are_equal_or_no_numbers(device: str) -> None:
    boxes = torch.tensor([[float(k), 0.0, k + 1.0, 1.0] for k in range(6)], device=device)
    scores = torch.tensor([0.0, float("-inf"), float("nan"), -0.0, float("inf"), float("nan")], device=device)
    assert nms(boxes, scores).tolist() == [2, 5, 4, 0, 3, 1]


@on_each_device
def test_as_torchvision(device: str) -> None:
    try:
        from torchvision.ops import nms as of_torchvision

        boxes, scores = (each.to(device) for each in crowd(2000))
        expected = of_torchvision(boxes, scores, 0.5)
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"no torchvision for this torch: {error}")
    assert torch.equal(nms(boxes, scores, 0.5), expected)


@needs_cuda
def test_both_devices_keep_the_same_boxes() -> None:
    for spread in (10.0, 300.0, 3000.0):
        boxes, scores = crowd(10_000, spread)
        assert torch.equal(nms(boxes.cuda(), scores.cuda(), 0.5).cpu(), nms(boxes, scores, 0.5))


@needs_cuda
def test_a_cuda_graph_is_refused() -> None:
    boxes, scores = (each.cuda() for each in crowd(100))
    nms(boxes, scores)
    with (
        pytest.raises(RuntimeError, match="come from the data, so the call waits for the GPU"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        nms(boxes, scores)
    assert len(nms(boxes, scores)) > 0


@on_each_device
def test_compiled(device: str) -> None:
    boxes, scores = (each.to(device) for each in crowd(300))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(Net(), fullgraph=True, backend="aot_eager", dynamic=True)
        for found, expected in zip(compiled(boxes, scores), Net()(boxes, scores), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export(exporter: str, tmp_path: Path) -> None:
    path, library = tmp_path / "net.onnx", library_path()
    dynamic = {"boxes": {0: "count"}, "scores": {0: "count"}}
    report = export.export(
        Net(), crowd(70), path, exporter=exporter, dynamic=dynamic, library=library, optimize=False
    )
    assert report.parity.equal and report.without_library.equal
    providers = ["CUDAExecutionProvider"] if HAS_CUDA and runtime_has_cuda() else CPU
    for session in (deploy.session(path, providers, library), deploy.session(path, CPU, False)):
        for inputs in (crowd(70), crowd(500), crowd(1)):
            found = session.run({"boxes": inputs[0].numpy(), "scores": inputs[1].numpy()})
            for value, expected in zip(found.values(), Net()(*inputs), strict=True):
                np.testing.assert_array_equal(value, expected.numpy())


def test_wrong_calls() -> None:
    boxes, scores = crowd(5)
    with pytest.raises(RuntimeError, match=r"boxes has shape \[5, 3\], expected .* = \[5, 4\]"):
        nms(boxes[:, :3], scores)
    with pytest.raises(RuntimeError, match="iou_threshold is 1.5, expected a finite number >= 0 and <= 1"):
        nms(boxes, scores, 1.5)


def test_samples_have_each_kind_of_result() -> None:
    kept = [len(in_numpy(**c)) for c in samples("nms", "float32", 48)]
    assert kept[2] == 0 and kept[3] == 100 and 0 < kept[0] < 48
