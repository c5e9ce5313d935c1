"""Measures how long models take in ONNX Runtime."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twinop import deploy
from twinop.deploy.create_session import PROVIDERS

from .inputs import Case

_RUNS, _WARM_UP = 20, 3
_LEAST = 1.0  # seconds of runs, also after the time is over: the first ones are slow


def milliseconds(
    paths: Sequence[Path], case: Case, device: str, library: deploy.Libraries, stop: float
) -> tuple[list[float], str]:
    """Runs models in turn on one case, with the copies to the device and back.

    Args:
        device: "cpu" or "cuda".
        stop: the `time.monotonic()` after which no further run starts, if they have taken a second.

    Returns:
        The median time of each model, and the device that it ran on.

    Raises:
        TwinopError: a model does not run on this device here.
    """
    sessions = [deploy.session(path, PROVIDERS[device], library) for path in paths]
    times: list[list[float]] = [[] for _ in sessions]
    stop = max(stop, time.monotonic() + _LEAST)
    for run in range(_WARM_UP + _RUNS):
        if run and time.monotonic() > stop:
            break
        for session, samples in zip(sessions, times, strict=True):
            specs = {name: session.inputs[name] for name in case if name in session.inputs}
            feeds = {name: case[name].astype(spec.numpy_dtype) for name, spec in specs.items()}
            start = time.perf_counter()
            session.run(feeds)
            samples.append(time.perf_counter() - start)
    usual = [samples[_WARM_UP:] or samples[-1:] for samples in times]
    return [float(np.median(samples)) * 1e3 for samples in usual], sessions[0].device
