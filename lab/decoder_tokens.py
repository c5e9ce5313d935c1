"""A token of a whole decoder: its time beside the original file, torch.compile and the time of its memory.

    python lab/decoder_tokens.py --output lab/results
    python lab/decoder_tokens.py --models qwen3-8b --dtypes int4 --batches 1,8 --contexts 4096

The files are those of onnxruntime-genai's builder, of random weights, each layer with its own. float8 is made
of the one in fp16; random weights carry its errors on, so that no error is too large.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))
from decoder_graphs import BLOCK, Sizes, write
from torch_decoder import TorchDecoder

from twinop.bench.cases import relative_error
from twinop.bench.measure import IN_ORT, Subject, captured, device_work, require, side_by_side
from twinop.bench.measurements import Device, Output, chosen, measuring, reason_of
from twinop.bench.runtime import bind, open_session
from twinop.bench.timing import DeviceTimer
from twinop.cli.console import out

ORT, COMPILE = "ORT", "torch.compile"
FILES = {ORT: "original", IN_ORT: "twinop"}
PROMPT = 1024
MAKERS = 3  # models that are made at a time
DTYPES = ("float16", "bfloat16", "int4", "float8")


@dataclass(frozen=True)
class Model:
    """A decoder."""

    sizes: Sizes
    layers: int
    context: int  # for which torch is measured, too, with BESIDE sequences

    def bytes_read(self, dtype: str, batch: int, context: int) -> float:
        """Returns the bytes of the weights and of the caches that a step reads."""
        s, size = self.sizes, {"int4": 0.5 + 2 / BLOCK, "float8": 1.0}.get(dtype, 2.0)
        heads = s.head * (2 * s.heads + 2 * s.kv_heads)
        layers, logits = self.layers * s.width * (heads + 3 * s.inner), s.vocab * s.width
        weights = layers * size + logits * (2.0 if dtype == "float8" else size)
        return weights + 4 * self.layers * batch * s.kv_heads * context * s.head


Cell = tuple[int, int, int]
"""Sequences, new tokens of each, and keys of each with the new ones."""
Feeds = dict[str, Tensor]
Maker = Callable[..., Subject]
LLAMA = Sizes(2048, 8192, 32, 8, 64, 128256, context=8192)
QWEN = Sizes(4096, 12288, 32, 8, 128, 151936, context=8192, norms=True, table=1024)
MODELS = {"llama-1.2b": Model(LLAMA, 16, 1024), "qwen3-8b": Model(QWEN, 36, 4096)}
SMALL = {"small": Model(Sizes(), 4, 16)}
BESIDE = (1, 8)


def make(model: Model, dtype: str, folder: Path) -> Path:
    """Writes both files, if they are not there. No GPU is used: what it measured would disturb others."""
    if not (folder / FILES[IN_ORT]).exists():
        shutil.rmtree(folder, ignore_errors=True)
        kind, more = ("float16", ["--dtype=float8", "--max-error=9"]) if dtype == "float8" else (dtype, [])
        old, new = write(folder / FILES[ORT], model.sizes, kind, model.layers, graph=True), folder / "new"
        command = [sys.executable, "-m", "twinop", "optimize", str(old), "-o", str(new), *more]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, env=os.environ | hidden, check=True)
        new.rename(folder / FILES[IN_ORT])
    return folder


def in_ort(session: Any, graph: int, feeds: Feeds, logits: Tensor, timer: DeviceTimer | None) -> Subject:
    """Runs a step; on a GPU it is the replay of the CUDA graph of this number, if it is not -1."""
    presents = {name.replace("past_key_values", "present"): feeds[name] for name in feeds if "past" in name}
    run = partial(bind, session, feeds, presents | {"logits": logits}, graph=graph)
    for _ in range(3):
        run()()
    return Subject(run(synchronize=timer is None or graph < 0), (logits,))


def in_torch(decoder: TorchDecoder, feeds: Feeds, _: Tensor, timer: DeviceTimer | None) -> Subject:
    run = decoder.step(feeds, compiles=timer is not None)
    return Subject(run) if timer is None else captured(run, timer.stream)


def draw(model: Model, cell: Cell, dtype: torch.dtype, device: torch.device) -> tuple[Feeds, Tensor]:
    """Draws the inputs of a step, whose new tokens are the last keys. Returns memory for the logits, too."""
    (batch, tokens, context), s = cell, model.sizes
    feeds = {"input_ids": torch.randint(s.table or s.vocab, (batch, tokens), device=device)}
    feeds["attention_mask"] = torch.ones(batch, context, dtype=torch.int64, device=device)
    shape = (batch, s.kv_heads, context, s.head)
    for i, part in product(range(model.layers), ("key", "value")):
        feeds[f"past_key_values.{i}.{part}"] = torch.randn(shape, dtype=dtype, device=device)
    dtype = torch.float32 if dtype is torch.bfloat16 else dtype  # as the builder's logits are
    logits = torch.empty(batch, tokens, s.vocab, dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the sessions run on another stream
    return feeds, logits


def measure(
    feeds: Feeds, logits: Tensor, made: Mapping[str, Maker], timer: DeviceTimer | None, most: float = 0.1
) -> dict[str, Any]:
    """Returns the times of a step, the errors against the first column, and the kernels that are launched."""
    expected: list[Tensor] = []
    errors, work = {}, {}

    def check(name: str, subject: Subject) -> None:
        [found] = subject.result()
        expected.extend([] if expected else [found.double()])
        errors[name] = relative_error(found, expected[0])
        require(errors[name], most)
        work[name] = device_work(subject.run) if timer is not None else None

    makers = {name: partial(make, feeds, torch.empty_like(logits), timer) for name, make in made.items()}
    found = side_by_side(makers, check, timer, rounds=15, again=[ORT])
    return found | {"errors": errors, "work": work}


def cells_of(model: Model, batches: str, contexts: str) -> list[Cell]:
    """Returns the cells: those with torch come first, then a prompt, then the others."""
    lengths = dict.fromkeys([model.context, *map(int, filter(None, contexts.split(",")))])
    grid = [(batch, 1, context) for batch, context in product(map(int, batches.split(",")), lengths)]
    first = [cell for cell in grid if cell[0] in BESIDE and cell[2] == model.context]
    prompt = min(PROMPT, model.sizes.context)
    return [*first, (1, prompt, prompt), *(cell for cell in grid if cell not in first)]


def steps(
    model: Model, dtype: str, folder: Path, cells: list[Cell], device: torch.device, timer: DeviceTimer | None
) -> Iterator[dict[str, Any]]:
    """Measures the cells of a model: yields a line for each."""
    read = torch.zeros(1 << 29 if timer is not None else 0, device=device)
    sums = timer.times({"sum": read.sum}, rounds=15) if timer is not None else {}
    options: dict[str, Any] = {"device": device, "cpu_threads": 2, "optimize": True, "fallback": True}
    options |= {"cuda_graph": True, "stream": timer.stream} if timer is not None else {}
    sessions = {name: open_session(folder / file / "model.onnx", **options) for name, file in FILES.items()}
    is_packed = dtype in ("int4", "float8")
    kind = getattr(torch, "float16" if is_packed else dtype)
    decoder = None if is_packed else TorchDecoder(folder / FILES[ORT], device)  # it has no such weights
    for graph, (batch, tokens, context) in enumerate(cells):
        is_step, total = tokens == 1, model.bytes_read(dtype, batch, context)
        line: dict[str, Any] = {"shape": f"{batch}x{context}" if is_step else f"a prompt of {tokens}"}
        if timer is not None:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info(device)[0] < total:
                out.print(f"{line['shape']}: not measured: it needs {total / 1e9:.0f} GB of memory")
                continue
        number = graph if is_step else -1
        made: dict[str, Maker] = {name: partial(in_ort, each, number) for name, each in sessions.items()}
        if decoder is not None and is_step and batch in BESIDE and context == model.context:
            made[COMPILE if timer is not None else "torch"] = partial(in_torch, decoder)
        most = 1.0 if dtype == "float8" else 0.1
        line |= measure(*draw(model, (batch, tokens, context), kind, device), made, timer, most)
        if sums and is_step:
            bandwidth = read.nbytes * 1e6 / sums["sum"]["median_us"]
            line |= {"bandwidth": bandwidth, "floor_us": round(total / bandwidth * 1e6, 1)}
        yield line


def main(
    models: Annotated[str, typer.Option(help="Default: all.")] = "",
    dtypes: Annotated[str, typer.Option(help="Of the weights.")] = ",".join(DTYPES),
    batches: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,2,4,8,16,32,64",
    contexts: Annotated[str, typer.Option(help="Keys, beside the model's own.")] = "1,128,1024,8192",
    work: Annotated[Path, typer.Option(help="Keeps the models.")] = Path("/tmp/twinop-decoders"),
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: tiny models.")] = False,
    output: Output = None,
) -> None:
    """Measure a token: on a GPU device time in CUDA graphs with an empty L2, on a CPU wall time."""
    known = SMALL if quick else MODELS
    with measuring("decoder-tokens", device, output, quick) as (measured, where, timer):
        names = chosen("--models", models or ",".join(known), list(known))
        keys = list(product(names, chosen("--dtypes", dtypes, DTYPES)))
        with ThreadPoolExecutor(MAKERS) as pool:  # it would disturb measurements: it ends before they begin
            made = [pool.submit(make, known[key[0]], key[1], work / "-".join(key)) for key in keys]
        for (name, kind), folder in zip(keys, made, strict=True):
            cells = cells_of(known[name], batches, contexts)
            try:
                for line in steps(known[name], kind, folder.result(), cells, where, timer):
                    measured.say({"op": name, "dtype": kind} | line)
            except Exception as error:  # others may not meet it
                out.print(f"{name} {kind}: not measured further: {reason_of(error)}", markup=False)


if __name__ == "__main__":
    typer.run(main)
