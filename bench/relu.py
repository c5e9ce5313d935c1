"""python bench/relu.py: bandwidth of ReLU in torch and in ONNX Runtime, beside their own and a plain copy."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # a script: the root comes first, and this folder is not a place to import from
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer

from twinop import torch_op
from twinop.bench import options, report, runtime
from twinop.bench.measured import Measured, name_of
from twinop.bench.plot import plot
from twinop.bench.report import BenchError
from twinop.bench.timing import DeviceTimer, Run, host_times
from twinop.console import clear_errors, err, out

COPY, EAGER, COMPILE = "torch copy_", "torch eager", "torch.compile"
ORT_RELU, IN_ORT, IN_TORCH = "ORT Relu", "twinop in ORT", "twinop in torch"
AGAIN = " again"  # the same run a second time: what the two differ by is noise
VARIANTS = {"auto": "", "vec4": ", vec4", "scalar": ", scalar"}

COPY_BAR = 0.98  # of the copy's speed, at the largest size (CUDA)
BUILT_IN_BAR = 1.05  # of the built-in Relu's time (CPU)


# ------------------------------------------------------------------------------------------- measuring


def torch_runs(x: torch.Tensor, y: torch.Tensor) -> dict[str, Run]:
    """Everything that runs in torch. All but the copy allocate their output, as they do in a model."""
    runs: dict[str, Run] = {COPY: partial(y.copy_, x), EAGER: partial(torch.relu, x)}
    variants = VARIANTS if x.is_cuda else {"auto": ""}  # on the CPU they are one kernel
    return runs | {IN_TORCH + name: partial(torch_op.relu, x, variant) for variant, name in variants.items()}


def compiled_run(x: torch.Tensor) -> Run:
    """torch.compile for exactly this shape, after a reset: one function is compiled for 8 shapes at most."""
    torch._dynamo.reset()
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(_relu, fullgraph=True, dynamic=False)
    return partial(compiled, x)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def open_sessions(
    dtype: torch.dtype, measured: Measured, device: torch.device, **options: Any
) -> dict[str, Any]:
    """The custom op's variants, which must be there, and the built-in Relu, which has not every dtype."""
    variants = VARIANTS if device.type == "cuda" else {"auto": ""}
    sessions = {
        IN_ORT + name: runtime.open_session(
            runtime.chain("CustomRelu", 1, dtype, "n", variant=variant), device, **options
        )
        for variant, name in variants.items()
    }
    try:
        sessions[ORT_RELU] = runtime.open_session(runtime.chain("Relu", 1, dtype, "n"), device, **options)
    except BenchError as error:
        measured.missing[f"{ORT_RELU}, {name_of(dtype)}"] = str(error)
    return sessions


def check(runs: Mapping[str, Run], x: torch.Tensor, y: torch.Tensor) -> None:
    """Each run once, on its own, against torch.

    Raises:
        BenchError: a run writes something else.
    """
    expected = torch.relu(x)
    for name, run in runs.items():
        y.fill_(123.0)
        result = run()
        written = result if isinstance(result, torch.Tensor) else y
        if not torch.equal(written, x if name == COPY else expected):
            raise BenchError(
                f"{name} is not torch.relu on {name_of(x.dtype)}[{x.numel()}]: nothing is measured"
            )


def measure_cuda(
    device: torch.device, dtypes: Sequence[torch.dtype], sizes: Sequence[int], rounds: int, threads: int
) -> Measured:
    """Device time of everything, queued on one stream that torch and ONNX Runtime share."""
    measured = Measured()
    stream = torch.cuda.Stream(device)
    timer = DeviceTimer(stream)
    with (
        report.progress("ReLU", len(dtypes) * len(sizes)) as step,
        torch.cuda.stream(stream),
        torch.no_grad(),
    ):
        for dtype in dtypes:
            sessions = open_sessions(dtype, measured, device, cpu_threads=threads, stream=stream)
            for size in sizes:
                step(f"{name_of(dtype)} {report.size_name(size)}")
                x = torch.randn(size, dtype=dtype, device=device)
                y = torch.empty_like(x)
                runs = torch_runs(x, y)
                runs |= {
                    name: runtime.bound_run(session, x, y, synchronize=False)
                    for name, session in sessions.items()
                }
                if COMPILE not in measured.missing:
                    try:
                        runs[COMPILE] = compiled_run(x)
                        runs[COMPILE]()
                    except Exception as error:  # whatever the compiler behind it lacks here: Triton, gcc
                        del runs[COMPILE]
                        measured.missing[COMPILE] = f"{type(error).__name__}: {error}".splitlines()[0]
                check(runs, x, y)
                runs[COPY + AGAIN] = runs[COPY]
                measured.add("cuda", dtype, size, timer.times(runs, rounds=rounds))
    return measured


def measure_cpu(sizes: Sequence[int], rounds: int, seconds: float, threads: int) -> Measured:
    """Wall time, fp32. ONNX Runtime's runs and torch's apart: threads of either pool spin after a run."""
    measured = Measured()
    dtype, device = torch.float32, torch.device("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sessions = open_sessions(dtype, measured, device, cpu_threads=threads)
        with report.progress("ReLU", 2 * len(sizes)) as step, torch.no_grad():
            for part in ("ONNX Runtime", "torch"):
                for size in sizes:
                    step(f"{part} {report.size_name(size)}")
                    x = torch.randn(size, dtype=dtype)
                    y = torch.empty_like(x)
                    if part == "torch":
                        runs, base = torch_runs(x, y), EAGER
                    else:
                        runs, base = {k: runtime.bound_run(s, x, y) for k, s in sessions.items()}, ORT_RELU
                    check(runs, x, y)
                    runs[base + AGAIN] = runs[base]
                    budget = seconds * (4 if size >= 1 << 22 else 1)  # slow runs, and memory has neighbours
                    measured.add("cpu", dtype, size, host_times(runs, rounds=rounds, seconds=budget))
    finally:
        torch.set_num_threads(before)
    return measured


# ------------------------------------------------------------------------------------------- reporting


def bars(measured: Measured, device: torch.device, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What issue and README promise, each with its verdict."""
    if device.type == "cpu":
        return [
            {
                "what": f"{IN_ORT} / {ORT_RELU}, time, float32, {report.size_name(size)}",
                "value": round(value := measured.ratio("float32", size, IN_ORT, ORT_RELU), 3),
                "bar": f"<= {BUILT_IN_BAR}",
                "passed": value <= BUILT_IN_BAR,
            }
            for size in sizes
        ]
    dtypes = dict.fromkeys(row["dtype"] for row in measured.rows)
    return [
        {
            "what": f"{provider} / {COPY}, speed, {dtype}, {report.size_name(sizes[-1])}",
            "value": round(value := measured.ratio(dtype, sizes[-1], COPY, provider), 3),
            "bar": f">= {COPY_BAR}",
            "passed": value >= COPY_BAR,
        }
        for dtype in dtypes
        for provider in (IN_TORCH, IN_ORT)
    ]


def show_cuda(measured: Measured, sizes: Sequence[int]) -> None:
    for dtype in dict.fromkeys(row["dtype"] for row in measured.rows):
        noise = max(abs(measured.ratio(dtype, size, COPY + AGAIN, COPY) - 1) for size in sizes)
        table = report.table(
            f"ReLU, {dtype}: share of the copy's speed",
            ["elements", *map(report.size_name, sizes)],
            f"Device time, medians. The copy timed twice differs by {noise:.1%} at most.",
        )
        speeds = (
            2e-6 * size * getattr(torch, dtype).itemsize / measured.us(dtype, size, COPY) for size in sizes
        )
        table.add_row(f"{COPY}, TB/s", *(f"{speed:.2f}" for speed in speeds), end_section=True)
        for provider in dict.fromkeys(row["provider"] for row in measured.rows if row["dtype"] == dtype):
            if not provider.startswith(COPY):
                ratios = (measured.ratio(dtype, size, COPY, provider) for size in sizes)
                table.add_row(provider, *(_flag(f"{ratio:.2f}", ratio >= COPY_BAR) for ratio in ratios))
        report.show(table)


def show_cpu(measured: Measured, sizes: Sequence[int], threads: int) -> None:
    for ours, theirs in ((IN_ORT, ORT_RELU), (IN_TORCH, EAGER)):
        table = report.table(
            f"ReLU on the CPU, float32, {threads} threads",
            ["elements", f"{theirs}, us", f"{ours}, us", "GB/s", "ratio", "noise"],
            f"Wall time, medians. ratio: twinop's over that of {theirs}; noise: the latter's, timed twice.",
        )
        for size in sizes:
            ratio = measured.ratio("float32", size, ours, theirs)
            noise = measured.ratio("float32", size, theirs + AGAIN, theirs)
            times = [measured.us("float32", size, name) for name in (theirs, ours)]
            table.add_row(
                report.size_name(size),
                *(f"{time:.2f}" for time in times),
                f"{8e-3 * size / times[1]:.1f}",
                _flag(f"{ratio:.2f}", ratio <= BUILT_IN_BAR),
                f"{noise:.2f}",
            )
        report.show(table)


def _flag(text: str, good: bool) -> str:
    return f"[green]{text}[/]" if good else f"[red]{text}[/]"


def main(
    device: options.Device = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and runs: seconds, for a look.")
    ] = False,
    output: options.PlotFolder = None,
    log2_sizes: Annotated[
        str | None,
        typer.Option(
            help="Sizes as exponents of two, such as 10,16,24; else 20 to 28 on a GPU, 10 to 24 on a CPU.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads, of ONNX Runtime and of torch.", min=1)] = 2,
    commit: options.Commit = None,
) -> None:
    """Measure ReLU's bandwidth and compare it with torch's, torch.compile's, ONNX Runtime's and a plain copy.

    On a GPU: device time. Every run is queued behind a read and a memset of 1 GiB, which hide the host and
    empty the L2, and timed with events on the one stream that torch and ONNX Runtime share; fp32, bf16 and
    fp16. Green is 0.98 of the copy or more.

    On a CPU: wall time, fp32, against the built-in Relu of ONNX Runtime and of torch. Green is at most 5 %
    slower than the built-in.

    All are run in turn, in one process, on random data, checked against torch first; medians.

    Examples:

        python -m twinop.bench relu

        python bench/relu.py --quick --output /tmp/relu
    """
    with clear_errors():
        where = report.choose_device(device)
        folder = report.output_folder(output)
        first, last = (20, 28) if where.type == "cuda" else (10, 24)
        exponents = _exponents(log2_sizes) or list(range(first, last + 1, 4 if quick else 1))
        sizes = [1 << exponent for exponent in exponents]
        facts = report.environment(where, commit)
        report.print_environment(facts)
        before = report.clocks(where)
        if where.type == "cuda":
            dtypes = [torch.float32, torch.bfloat16] + ([] if quick else [torch.float16])
            measured = measure_cuda(where, dtypes, sizes, 9 if quick else 31, threads)
            show_cuda(measured, sizes)
        else:
            measured = measure_cpu(sizes, 201 if quick else 3001, 0.1 if quick else 1.0, threads)
            show_cpu(measured, sizes, threads)
        for provider, reason in measured.missing.items():
            err.print(f"not measured: {provider}: {reason}", markup=False, highlight=False)

        verdicts = bars(measured, where, sizes)
        report.show_bars(verdicts)
        stem = folder / f"relu-{report.machine_name(facts)}"
        report.write_json(
            stem.with_suffix(".json"),
            "relu",
            facts,
            settings={"quick": quick, "cpu_threads": threads, "sizes": sizes},
            clocks={"before": before, "after": report.clocks(where)},
            not_measured=measured.missing,
            bars=verdicts,
            rows=measured.rows,
        )
        for path in plot(measured.rows, f"ReLU, {facts.get('gpu') or facts['cpu'] + ' (CPU)'}", stem):
            out.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _exponents(text: str | None) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")}) if text else []
    except ValueError:
        found = [-1]
    if any(not 0 <= exponent <= 31 for exponent in found):
        raise BenchError(f"--log2-sizes {text}: expected numbers from 0 to 31, such as 10,16,24")
    return found


if __name__ == "__main__":
    typer.run(main)
