"""nms beside torchvision's.

python examples/nms/measure_nms.py --output lab/results
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nms import in_numpy  # type: ignore[import-not-found]

from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.measure import IN_ORT, IN_TORCH, Subject, side_by_side
from twinop.bench.measurements import BenchError, Device, Output, measuring
from twinop.bench.timing import DeviceTimer
from twinop.libraries.library import find_library

THRESHOLD = 0.5
SIZES = {"sparse": 3000.0, "crowded": 300.0}
"""The width of the picture: few boxes overlap, or most."""


def crowd(count: int, spread: float, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    corners = torch.rand(count, 2, generator=generator) * spread
    boxes = torch.cat([corners, corners + torch.rand(count, 2, generator=generator) * 60 + 4], 1)
    return {"boxes": boxes.to(device), "scores": torch.rand(count, generator=generator).to(device)}


def of_torchvision(tensors: dict[str, Tensor]) -> Subject:
    from torchvision.ops import nms  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return Subject(partial(nms, tensors["boxes"], tensors["scores"], THRESHOLD))


def in_ort(tensors: dict[str, Tensor], library: Path, timer: DeviceTimer | None) -> Subject:
    """ONNX Runtime allocates the output, whose size it does not know before."""
    record = torch_op.load(library).records["nms"]
    node = runtime.custom_node(record, tensors, {"iou_threshold": THRESHOLD})
    keep = torch.empty(0, dtype=torch.int64, device=tensors["boxes"].device)
    run = runtime.run_of([node], tensors, {"keep": keep}, timer, library=library)
    (binding, *_) = run.args  # type: ignore[attr-defined]
    run()
    return Subject(run, facts={"keep": torch.from_numpy(binding.copy_outputs_to_cpu()[0])})


def measure(
    tensors: dict[str, Tensor], library: Path, timer: DeviceTimer | None, rounds: int
) -> dict[str, Any]:
    expected = torch.from_numpy(in_numpy(*(each.cpu() for each in tensors.values()), THRESHOLD))
    makers: dict[str, Callable[[], Subject]] = {
        IN_TORCH: lambda: Subject(partial(torch_op.load(library).nms, **tensors, iou_threshold=THRESHOLD)),
        IN_ORT: partial(in_ort, tensors, library, timer),
        "torchvision": partial(of_torchvision, tensors),
    }

    def check(name: str, subject: Subject) -> None:
        found = subject.facts.get("keep")
        found = subject.result()[0].cpu() if found is None else found
        # torchvision's CUDA kernel rounds once less: a box at the threshold may stay, and then change others.
        others = len({*found.tolist()} ^ {*expected.tolist()})
        if others > (len(expected) // 1000 if name == "torchvision" else 0):
            raise BenchError(f"wrong result: {others} other boxes stay")

    found = side_by_side(makers, check, timer, rounds=rounds, again=("torchvision",))
    return {"kept": len(expected)} | found


def main(
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: fewer boxes, few runs.")] = False,
    output: Output = None,
) -> None:
    """Measure nms beside torchvision's: the time of the device, in which it also waits for the host.

    On a CPU it is wall time with one thread.
    """
    with measuring("nms", device, output, quick) as (measured, where, timer):
        library = find_library("nms")
        for count in (500,) if quick else (1000, 10_000, 30_000) if timer is not None else (1000, 10_000):
            for kind, spread in SIZES.items():
                tensors = crowd(count, spread, where)
                line = measure(tensors, library, timer, 7 if quick else 41)
                measured.say({"op": "nms", "boxes": count, "kind": kind} | line)


if __name__ == "__main__":
    typer.run(main)
