"""A chrome trace of one run of each provider: which kernels it launches, and what the host does meanwhile."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from twinop.bench.cases import make_inputs, make_outputs, table
from twinop.bench.measure import Machine
from twinop.bench.peers import Entry
from twinop.bench.report import BenchError
from twinop.bench.runs import reference
from twinop.console import out

RUNS = 3


def write_trace(where: Machine, entries: Mapping[str, Entry], path: Path) -> None:
    """Writes the trace of each op's first cell. Open it in chrome://tracing or ui.perfetto.dev.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        path.touch()
    except OSError as error:
        raise BenchError(f"--trace {path}: cannot be written: {error.strerror}") from error
    activities = [ProfilerActivity.CPU]
    if where.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    stream = where.providers.stream
    runs = {}
    with torch.no_grad(), torch.cuda.stream(stream):  # a null stream changes nothing
        for name, entry in entries.items():
            where.providers.budget.next_op()
            case = table(name, entry, where.device.type, quick=True)[0]
            inputs = make_inputs(case, entry, where.device)
            outputs = make_outputs(case, entry, where.device)
            expected = reference(case, entry, inputs, outputs)
            built = where.providers.build(case, entry, inputs, outputs)
            for provider, subject in where.providers.check(case, built, expected).items():
                runs[f"{case}: {provider}"] = subject
        with profile(activities=activities) as trace:
            for name, subject in runs.items():
                for _ in range(RUNS):
                    with record_function(name):
                        subject.run()
            if where.device.type == "cuda":
                torch.cuda.synchronize(where.device)
    trace.export_chrome_trace(str(path))
    out.print(f"wrote {path}: {len(runs)} providers, {RUNS} runs each", highlight=False, soft_wrap=True)
