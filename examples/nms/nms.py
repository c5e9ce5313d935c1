"""The op nms: the boxes that stay of boxes that overlap, as torchvision.ops.nms."""

import numpy as np
import torch

import twinop
from twinop.testing.references import Reference

library_path = twinop.library_beside(__file__)


@twinop.op
def nms(op, boxes, scores, *, iou_threshold):
    """Its meaning in ONNX's standard operators."""
    low, high = op.Slice(boxes, [0], [2], [1]), op.Slice(boxes, [2], [4], [1])
    # A box without width overlaps with none. ONNX Runtime would swap its corners.
    found = op.NonMaxSuppression(
        op.Unsqueeze(op.Concat(low, op.Max(low, high), axis=1), [0]),
        op.Unsqueeze(scores, [0, 1]),
        op.Slice(op.Shape(scores), [0], [1]),
        op.Reshape(iou_threshold, [1]),
    )
    return op.Gather(found, 2, axis=1)


def reference(op):
    """Its meaning for `twinop test`, which computes in float64: NonMaxSuppression takes float32 only."""
    return Reference(
        compute=lambda *args, **given: torch.from_numpy(in_numpy(*args, **given)), ulps={"int64": 0}
    )


def samples(op, dtype, size):
    """Calls for `twinop test`: crowded boxes with equal scores, no box, and boxes that are all kept."""
    generator = torch.Generator().manual_seed(size)
    calls = []
    for count, spread in ((size, 10.0), (3 * size + 70, 30.0), (0, 1.0), (100, 1e6)):
        corners = torch.rand(count, 2, generator=generator) * spread
        boxes = torch.cat([corners, corners + torch.rand(count, 2, generator=generator) * 9 + 1], 1)
        scores = torch.randint(0, 50, (count,), generator=generator) / 50
        calls.append({"boxes": boxes, "scores": scores, "iou_threshold": 0.3})
    return calls


def in_numpy(boxes, scores, iou_threshold=0.5):
    """The op in numpy, in the dtype of the boxes."""
    boxes, scores = np.asarray(boxes), np.asarray(scores)
    order = np.argsort(-scores, kind="stable")
    low, high, keep = boxes[order, :2], boxes[order, 2:], []
    area = (high - low).prod(1)
    left = np.ones(len(order), dtype=bool)
    for i in range(len(order)):
        if left[i]:
            keep.append(order[i])
            both = (np.minimum(high[i], high) - np.maximum(low[i], low)).clip(0).prod(1)
            left &= ~(both / (area[i] + area - both) > boxes.dtype.type(iou_threshold))
    return np.array(keep, dtype=np.int64)
