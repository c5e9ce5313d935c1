"""Measures steps and a prompt of small decoders of each family, beside the files of genai's builder.

    python -m tests.family_times make /tmp/families             # where the builder can be downloaded
    python -m tests.family_times measure /tmp/families          # on a GPU

The models are those of `tests/helpers/genai_models.py`, optimised for CUDA. Steps are CUDA graphs.
"""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from lab.decoder_tokens import FILES, Feeds, in_ort
from lab.decoder_tokens import measure as step_times
from twinop.bench.measure import IN_ORT
from twinop.bench.measurements import Device, Output, measuring
from twinop.bench.runtime import open_session

PRECISIONS = ("fp16", "bf16", "int4")
STEPS = [(1, 1, 1), (1, 1, 128), (8, 1, 1), (8, 1, 128), (32, 1, 128), (64, 1, 128), (64, 1, 1)]
PROMPT = (1, 128, 128)  # sequences, new tokens of each, and keys of each with the new ones
VOCABULARY, HEAD, WINDOW = 504, 64, 64
TYPES = {
    "tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16,
    "tensor(int64)": torch.int64,
}  # fmt: skip

app = typer.Typer()


@app.command()
def make(folder: Path) -> None:
    """Build and optimise each family."""
    from genai_models import FAMILIES, build

    from twinop.optimize import optimize_folder

    for family, precision in ((family, each) for family in FAMILIES for each in PRECISIONS):
        with tempfile.TemporaryDirectory() as scratch:
            source = build(family, precision, "cuda", folder=Path(scratch))
            optimize_folder(source, Path(scratch) / "fast", device="cuda")
            for name, made in zip(FILES.values(), (source, Path(scratch) / "fast"), strict=True):
                target = folder / f"{family}, {precision}" / name
                target.mkdir(parents=True)
                for file in made.glob("model.onnx*"):
                    shutil.copy(file, target)


def draw(session: Any, cell: tuple[int, int, int], device: torch.device) -> tuple[Feeds, torch.Tensor]:
    """Draws the inputs of a model. Returns memory for the logits, too."""
    batch, tokens, context = cell
    dtypes = {value.name: TYPES[value.type] for value in (*session.get_inputs(), *session.get_outputs())}
    feeds = {"input_ids": torch.randint(3, VOCABULARY, (batch, tokens), device=device)}
    feeds["attention_mask"] = torch.ones(batch, context, dtype=torch.int64, device=device)
    for value in session.get_inputs():
        if value.name.startswith("past"):
            rows = WINDOW if "sliding" in str(value.shape[2]) else context
            numbers = torch.randn(batch, value.shape[1], rows, HEAD, device=device)
            feeds[value.name] = numbers.to(dtypes[value.name])
    logits = torch.empty(batch, tokens, VOCABULARY, dtype=dtypes["logits"], device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the sessions run on another stream
    return feeds, logits


@app.command()
def measure(folder: Path, device: Device = "auto", output: Output = None) -> None:
    """Measure what `make` has made: steps of 1 to 64 sequences over 1 and 128 keys, and a prompt."""
    with measuring("decoder-families", device, output, False) as (measured, where, timer):
        for each in sorted(folder.iterdir()):
            family, _, precision = each.name.partition(", ")
            graphs = timer is not None and family != "Phi3 long"  # its branches are captured by no graph
            options: dict[str, Any] = {"cpu_threads": 2, "optimize": True, "fallback": True}
            options |= {"cuda_graph": graphs, "stream": timer.stream} if timer is not None else {}
            sessions = {
                name: open_session(each / file / "model.onnx", where, **options)
                for name, file in FILES.items()
            }
            for graph, cell in enumerate([*STEPS, PROMPT]):
                number = graph if graphs and cell is not PROMPT else -1
                made = {name: partial(in_ort, session, number) for name, session in sessions.items()}
                shape = "a prompt of 128" if cell is PROMPT else f"{cell[0]}x{cell[2]}"
                label = {"op": family, "dtype": precision, "shape": shape}
                measured.say(label | step_times(*draw(sessions[IN_ORT], cell, where), made, timer))


if __name__ == "__main__":
    app()
