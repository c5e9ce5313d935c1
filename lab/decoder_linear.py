"""The products of a decoder's step, few rows at a time, beside cuBLAS and ONNX Runtime.

python lab/decoder_linear.py --output lab/results
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.cases import relative_error
from twinop.bench.measure import IN_ORT, IN_TORCH, Subject, captured, require, side_by_side
from twinop.bench.measurements import Device, Output, measuring
from twinop.bench.timing import DeviceTimer

TORCH, ORT = "torch", "ORT"
Weight = dict[str, Tensor]
SHAPES = {  # [N, K] of a Llama of 1.2 billion weights
    "qkv": (3072, 2048),
    "o": (2048, 2048),
    "gate and up": (16384, 2048),
    "down": (2048, 8192),
    "logits": (128256, 2048),
}
BLOCK = 32
FORMS = {"float16": 2.0, "int4": 0.5 + 2 / BLOCK, "float8": 1.0}  # bytes of a weight
NODES = {
    ("float16", IN_ORT): "y{i} = custom_domain.CustomLinear(x, dense{i})",
    ("float16", ORT): "y{i} = Gemm<transB = 1>(x, dense{i})",
    ("int4", IN_ORT): "y{i} = custom_domain.CustomLinearQ<block = {block}>(x, weight{i}, scale{i})",
    ("int4", ORT): "y{i} = com.microsoft.MatMulNBits<K = {k}, N = {n}, bits = 4, block_size = {block}>"
    "(x, weight{i}, scale{i})",
    ("float8", IN_ORT): "y{i} = custom_domain.CustomLinearW8<few_rows = 64>(x, weight{i}, scale{i}, bias{i})",
}


def weight_of(form: str, n: int, k: int, device: torch.device) -> Weight:
    """Draws a weight: `dense` in fp16; of others also what their ops read."""
    if form != "int4":
        dense = torch.randn(n, k, device=device).div_(k**0.5).half()
        if form == "float16":
            return {"dense": dense}
        weight, scale = torch_op.quantize_rows(dense)
        dense = (weight.float() * scale.unsqueeze(-1)).half()
        return {"dense": dense, "weight": weight, "scale": scale, "bias": dense.new_zeros(n)}
    blocks = k // BLOCK
    weight = torch.randint(256, (n, blocks, BLOCK // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(n, blocks, device=device) + 0.5).mul_(0.3 / k**0.5).half()
    both = torch.stack([weight & 15, weight >> 4], -1).reshape(n, blocks, BLOCK)
    dense = ((both.float() - 8) * scale.float().unsqueeze(-1)).half().view(n, k)
    return {"dense": dense, "weight": weight, "scale": scale}


def in_ort(form: str, provider: str, x: Tensor, weights: list[Weight], timer: DeviceTimer | None) -> Subject:
    """Opens a session of a product for each weight; on a GPU a run is the replay of a CUDA graph."""
    n, k = weights[0]["dense"].shape
    names = [name for name in weights[0] if (name == "dense") == (form == "float16")]
    constants = {f"{name}{i}": weight[name] for i, weight in enumerate(weights) for name in names}
    outputs = {f"y{i}": x.new_empty(len(x), n) for i in range(len(weights))}
    texts = (NODES[form, provider].format(i=i, n=n, k=k, block=BLOCK) for i in range(len(weights)))
    options: dict[str, Any] = {"constants": constants, "cuda_graph": timer is not None}
    run = runtime.run_of(runtime.parse_nodes("; ".join(texts)), {"x": x}, outputs, timer, **options)
    return Subject(run, tuple(outputs.values()))


def in_torch(multiply: Callable[[Mapping[str, Tensor]], Tensor], weights: list[Weight]) -> Subject:
    """Multiplies by each weight; on a GPU in a CUDA graph."""

    def run() -> list[Tensor]:
        return [multiply(weight) for weight in weights]

    is_cuda = weights[0]["dense"].is_cuda
    return captured(run, torch.cuda.current_stream()) if is_cuda else Subject(run)


def measure(
    form: str, m: int, x: Tensor, weights: list[Weight], timer: DeviceTimer | None, rounds: int
) -> dict[str, Any]:
    """Returns the times of one product, and why a provider is missing."""
    expected = x.double() @ weights[-1]["dense"].double().mT

    def ours(weight: Mapping[str, Tensor]) -> Tensor:
        if form == "float16":
            return torch_op.linear(x, weight["dense"])
        if form == "float8":
            return torch_op.linear_w8(x, weight["weight"], weight["scale"], weight["bias"], few_rows=64)
        return torch_op.linear_q(x, weight["weight"], weight["scale"], block=BLOCK)

    makers: dict[str, Callable[[], Subject]] = {
        IN_ORT: partial(in_ort, form, IN_ORT, x, weights, timer),
        IN_TORCH: partial(in_torch, ours, weights),
        ORT: partial(in_ort, form, ORT, x, weights, timer),
        TORCH: partial(in_torch, lambda weight: x @ weight["dense"].mT, weights),
    }
    if (form, ORT) not in NODES:
        del makers[ORT]

    def check(_: str, each: Subject) -> None:
        require(relative_error(each.result()[-1], expected), 4e-3)

    found = side_by_side(makers, check, timer, rounds=rounds, again=(TORCH,), seconds=0.3)
    for time, field in product(found["times"].values(), ("median_us", "low_us")):
        time[field] = round(time[field] / len(weights), 3)
    return found


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows of x.")] = "1,2,4,8,16,32,64",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: a small product.")] = False,
    output: Output = None,
) -> None:
    """Measure products of few rows: on a GPU in CUDA graphs with an empty L2, on a CPU wall time."""
    with measuring("decoder-linear", device, output, quick) as (measured, where, timer):
        torch.manual_seed(0)
        for name, (n, k) in ({"small": (64, 128)} if quick else SHAPES).items():
            for form, size in FORMS.items():
                copies = 1 if quick else max(2, int(6e8 / (n * k * size)))
                weights = [weight_of(form, n, k, where) for _ in range(copies)]
                for m in map(int, rows.split(",")):
                    x = torch.randn(m, k, device=where).half()
                    label = {"op": name, "dtype": form, "shape": f"{m}x{k}x{n}"}
                    measured.say(label | measure(form, m, x, weights, timer, 5 if quick else 21))


if __name__ == "__main__":
    typer.run(main)
