"""What models of real sizes take to be optimised: memory of all processes, time, and disk beyond the result.

    python lab/real_sizes.py --output lab/results
    python lab/real_sizes.py --rows llama-8b-int4,export --work /tmp/twinop-sizes

The models have random weights, other ones in each layer. A line has the command and the bars of two cores.
A file on the disk of --work takes three times the size of its model. unet needs diffusers (pip install
--no-deps diffusers).
"""

import importlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))
from decoder_graphs import Sizes, write

from lab.model_zoo import ROWS as ZOO
from lab.model_zoo import normal
from lab.models import torch_export
from twinop.bench.measurements import Measurements, Output, chosen
from twinop.cli.console import out, program
from twinop.system.memory import tree_bytes

_POLL = 0.25  # seconds; to look takes 18 ms for each GB
_DISK = 0.2  # the bar of all rows, in GB
_EXPORT = """
import sys, torch
from twinop.export import export
torch.manual_seed(0)
count, width = map(int, sys.argv[2:])
layers = [torch.nn.Linear(width, width, bias=False) for _ in range(count)]
export(torch.nn.Sequential(*layers).eval(), (torch.randn(2, width),), sys.argv[1])
"""
Command = Sequence[str]


@dataclass(frozen=True)
class Row:
    """A command and its bars, for two cores."""

    # Writes the source, a tiny one for a quick look, into a folder that lacks it; returns the arguments of
    # Python that write what `new` in it is named.
    make: Callable[[Path, bool], Command]
    seconds: float = 0.0  # at most; 0 where there is no bar
    gigabytes: float = 0.0  # likewise


def decoder(
    sizes: Sizes, kind: str, layers: int, folder: Path, quick: bool, device: str = "cuda", dtype: str = ""
) -> Command:
    if not (folder / "old").exists():
        shutil.rmtree(folder / "draft", ignore_errors=True)
        given = (Sizes(), kind, 2) if quick else (sizes, kind, layers)
        write(folder / "draft", *given, graph=True).rename(folder / "old")
    command, old, new = ["pack", "--genai"], f"{folder}/old", f"{folder}/new"
    if dtype:
        command, old, new = ["optimize", "--dtype", dtype], f"{old}/model.onnx", f"{new}.onnx"
    return ["-m", "twinop", *command, old, "-o", new, "--device", device]


def optimised(folder: Path, quick: bool, device: str) -> Path:
    """Returns the folder of the decoder of 8B in int4 that was made for a device; it is made once."""
    folder = folder.with_name(f"llama-8b-int4{'-quick' * quick}")
    if not (made := folder / f"made-{device}").exists():
        command = decoder(_LLAMA_8B, "int4", 32, folder, quick, device)
        shutil.rmtree(folder / "new", ignore_errors=True)
        subprocess.run([sys.executable, *command], check=True)
        (folder / "new").rename(made)
    return made


def on_cpu(name: str, device: str, folder: Path, quick: bool) -> Command:
    model = optimised(folder, quick, device) / "model.onnx"
    provider = [] if name == "doctor" else ["--provider", "cpu"]
    return ["-m", "twinop", name, f"{model}", "--allow-model-libraries", *provider]


def encoder(name: str, folder: Path, quick: bool) -> Command:
    row = ZOO[name]
    if not (folder / "old.onnx").exists():
        torch_export(row.make(quick, row.model.exported), row.batch(quick, 2), folder / "old.onnx")
    return ["-m", "twinop", "optimize", f"{folder}/old.onnx", "-o", f"{folder}/new.onnx", "--device", "cuda"]


class UNet(nn.Module):
    """SDXL's, of its public configuration, in fp16 with random weights."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        self.widths = (64, 128, 128) if quick else (320, 640, 1280)
        self.text, self.pooled, self.id_width = (64, 32, 8) if quick else (2048, 1280, 256)
        with torch.device("meta"):
            body = importlib.import_module("diffusers").UNet2DConditionModel(
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                block_out_channels=self.widths,
                layers_per_block=2,
                transformer_layers_per_block=(1, 2, 2 if quick else 10),
                attention_head_dim=[width // 64 for width in self.widths],  # how many heads there are
                cross_attention_dim=self.text,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=self.id_width,
                projection_class_embeddings_input_dim=self.pooled + 6 * self.id_width,
            )
        self.body = body.half().to_empty(device="cpu").eval().requires_grad_(False)
        torch.manual_seed(0)
        for name, weight in self.body.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.7 / math.sqrt(weight[0].numel()))
            else:
                weight.normal_(float(name.endswith("weight")), 0.1)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor, ids: Tensor) -> Tensor:
        # diffusers concatenates it with embeddings in fp32, and torch's exporter promotes none.
        given = {"text_embeds": pooled.float(), "time_ids": ids}
        return self.body(sample, timestep, text, added_cond_kwargs=given, return_dict=False)[0]

    def example(self) -> dict[str, Tensor]:
        shapes = {"sample": (2, 4, 32, 32), "text": (2, 77, self.text), "pooled": (2, self.pooled)}
        inputs = {name: normal(*shape).half() for name, shape in shapes.items()}
        inputs |= {"timestep": torch.tensor([500, 500]), "ids": torch.full((2, 6), 256.0).half()}
        return {name: inputs[name] for name in ("sample", "timestep", "text", "pooled", "ids")}


def unet(folder: Path, quick: bool) -> Command:
    if not (folder / "old.onnx").exists():
        model = UNet(quick)
        torch_export(model, model.example(), folder / "old.onnx")
    return ["-m", "twinop", "optimize", f"{folder}/old.onnx", "-o", f"{folder}/new.onnx", "--device", "cuda"]


def export(folder: Path, quick: bool) -> Command:
    return ["-c", _EXPORT, f"{folder}/new.onnx", *(("2", "64") if quick else ("16", "4096"))]


_LLAMA_1B = Sizes(2048, 8192, 32, 8, 64, 128256, context=8192)
_LLAMA_8B = Sizes(4096, 14336, 32, 8, 128, 128256, context=8192)
_LLAMA_70B = Sizes(8192, 28672, 64, 8, 128, 128256, context=8192)
ROWS = {
    "llama-1.2b-int4": Row(partial(decoder, _LLAMA_1B, "int4", 16), 60, 1.5),
    "llama-8b-int4": Row(partial(decoder, _LLAMA_8B, "int4", 32), 180, 2.5),
    "llama-8b-fp16": Row(partial(decoder, _LLAMA_8B, "float16", 32), 480, 3.5),
    "llama-8b-int4-4-layers": Row(partial(decoder, _LLAMA_8B, "int4", 4)),
    "llama-8b-fp16-4-layers": Row(partial(decoder, _LLAMA_8B, "float16", 4)),
    "llama-70b-int4-4-layers": Row(partial(decoder, _LLAMA_70B, "int4", 4), 0, 4),
    "llama-8b-int4-for-cpu": Row(partial(decoder, _LLAMA_8B, "int4", 32, device="cpu"), 0, 2.5),
    "llama-1.2b-bf16-to-fp16": Row(partial(decoder, _LLAMA_1B, "bfloat16", 16, dtype="float16"), 0, 3.5),
    **{
        f"{name}-8b-int4-for-{device}": Row(partial(on_cpu, name, device), 0, 10.4)
        for name in ("run", "check", "doctor")
        for device in ("cpu", "cuda")
    },
    "bert": Row(partial(encoder, "bert-fp16")),
    "vit": Row(partial(encoder, "vit")),
    "whisper": Row(partial(encoder, "whisper")),
    "unet": Row(unet, 600, 3.5),
    "export": Row(export, 45, 2.8),
}  # fmt: skip


def measure(command: Command, folder: Path) -> dict[str, Any]:
    """Runs a command, and returns what it and all of its processes take; raises RuntimeError if it fails."""
    before, start, memory, disk = used(folder), time.monotonic(), 0, 0
    with (folder / "log").open("w") as log:
        # In its folder: Python would import the twinop of the folder where this is started.
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            memory, disk = max(memory, tree_bytes(process.pid)), max(disk, used(folder) - before)
            time.sleep(_POLL)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"it ended with {process.returncode}: {(folder / 'log').read_text()[-400:]}")
    says = ["", *(folder / "log").read_text().splitlines()][-1][:300]
    numbers = {"wall_s": time.monotonic() - start, "cpu_s": usage.ru_utime + usage.ru_stime}
    numbers |= {"memory_gb": memory / 1e9, "disk_beyond_gb": max(disk - used(folder) + before, 0) / 1e9}
    return {name: round(number, 2) for name, number in numbers.items()} | {"says": says}


def used(folder: Path) -> int:
    """Returns the bytes that a folder's files take."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it is gone
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def main(
    rows: Annotated[str, typer.Option(help="Default: all.")] = "",
    work: Annotated[Path, typer.Option(help="Keeps the sources.")] = Path("/tmp/twinop-sizes"),
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: tiny models.")] = False,
    output: Output = None,
) -> None:
    """Measure the memory, time and disk of optimising models of real sizes."""
    names = chosen("--rows", rows or ",".join(ROWS), list(ROWS))
    measured = Measurements("real-sizes", torch.device("cpu"), output, quick)
    for name in names:
        row, folder = ROWS[name], work.absolute() / f"{name}{'-quick' * quick}"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = row.make(folder, quick)
        bars = {"seconds": row.seconds, "gigabytes": row.gigabytes, "disk_beyond_gb": _DISK}
        line: dict[str, Any] = {"op": name, "command": " ".join(["python", *arguments]), "bars": bars}
        line |= {"source_gb": round(used(folder) / 1e9, 2), "times": {}}
        for old in folder.glob("new*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        try:
            line["now"] = measure([sys.executable, *arguments], folder)
        except RuntimeError as error:
            line["now"] = {"failure": str(error)}
        out.print(f"{name}: {line['now']}", markup=False, soft_wrap=True)
        measured.add(line)


if __name__ == "__main__":
    program(main)()
