"""Measures models in ONNX Runtime, and finds rewrites that make one slower here: only where that is asked.

No time decides otherwise which file is written: one input has the same bytes on a busy and an idle machine.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twinop import deploy
from twinop.deploy.create_session import PROVIDERS
from twinop.errors import TwinopError
from twinop.system.progress import Progress, silent

from .inputs import Case

_RUNS, _WARM_UP = 20, 3
_LEAST = 1.0  # seconds, after which no further run of a file starts
_SECONDS = 20.0  # after so long, nothing more is measured
_SLOWER = 1.05  # less is noise

Clock = Callable[..., Sequence[float]]  # takes the paths of models, and returns their times in milliseconds


@dataclass
class Measured:
    """What `drop_slow` finds: the rewrites to leave out, with the reason, and the times with them."""

    slow: dict[str, str] = field(default_factory=dict)
    times: tuple[float, float] | None = None  # milliseconds of the source and of the result
    untimed: str = ""  # why there are none


@dataclass(frozen=True)
class Stopwatch:
    """Runs models in turn on one case, on a device, with the copies to the device and back."""

    case: Case
    device: str
    library: deploy.Libraries = None

    def __call__(self, *paths: Path) -> list[float]:
        """Returns the median times of models; TwinopError: one does not run on this device here."""
        sessions = [deploy.session(path, PROVIDERS[self.device], self.library) for path in paths]
        times: list[list[float]] = [[] for _ in sessions]
        stop = time.monotonic() + _LEAST
        for run in range(_WARM_UP + _RUNS):
            if run and time.monotonic() > stop:
                break
            for session, samples in zip(sessions, times, strict=True):
                specs = {name: session.inputs[name] for name in self.case if name in session.inputs}
                feeds = {name: self.case[name].astype(spec.numpy_dtype) for name, spec in specs.items()}
                start = time.perf_counter()
                session.run(feeds)
                samples.append(time.perf_counter() - start)
        return [float(np.median(samples[_WARM_UP:] or samples[-1:])) * 1e3 for samples in times]


def drop_slow(
    source: Path,
    result: Path,
    names: Sequence[str],
    write: Callable[[Sequence[str], Path], Path],
    clock: Clock,
    scratch: Path,
    progress: Progress = silent,
    seconds: float = _SECONDS,
) -> Measured:
    """Finds the rewrites that make a written file slower here than it is without them.

    A rewrite is slow if two measurements in a row show it. If none is, and the file is slower than the source
    and than without any, all are. Nothing starts after `seconds`.

    Args:
        source, result: the original's file, and that with all rewrites.
        names: the rewrites that changed something.
        write: writes the file with only these rewrites into a folder, and returns its path.
        scratch: for such files; each goes as soon as it has been measured.
    """
    found, stop = Measured(), time.monotonic() + seconds

    def why_slow(less: Sequence[str]) -> str:
        """Measures the result beside the file with fewer rewrites."""
        (folder := scratch / "measured").mkdir()
        other = write(less, folder)
        is_slow = all((times := clock(result, other))[0] > times[1] * _SLOWER for _ in range(2))
        shutil.rmtree(folder)
        return f"slower here ({times[0]:.3g} ms with it, {times[1]:.3g} without)" if is_slow else ""

    try:
        before, now = found.times = tuple(clock(source, result))  # type: ignore[assignment]
        for name in names:
            if time.monotonic() < stop:
                progress(f"measuring without {name}")
                found.slow[name] = why_slow([each for each in names if each != name])
        if names and now > before * _SLOWER and time.monotonic() < stop and not any(found.slow.values()):
            found.slow = dict.fromkeys(names, why_slow([]))
    except TwinopError as error:
        found.untimed = str(error).splitlines()[0]
    found.slow = {name: why for name, why in found.slow.items() if why}
    return found
