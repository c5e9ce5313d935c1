"""Configurations of `triton.autotune` kernels, measured on a GPU and kept for builds.

`twinop tune mish.py` runs the samples of the ops, lets Triton measure the configurations, and writes the best
ones to mish.tune.json. A build chooses among them by the sizes and the GPU of a call. What was measured for a
size holds up to the geometric mean of it and the next size; the least and the greatest hold without an end.
A call that no entry fits, as on a GPU that was not measured, takes the first configuration that the kernel's
own pruning leaves.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from ..building.cache import write
from ..errors import BuildError
from .intercept import first_configuration


def tuning_file(source: Path) -> Path:
    """Returns where the measurements of a Python file are kept: mish.tune.json for mish.py."""
    return source.with_suffix(".tune.json")


@dataclass(frozen=True)
class Entry:
    """The best configuration of a kernel for one call."""

    kernel: str  # its name
    arch: int  # the compute capability: 90
    key: Mapping[str, int | float]  # the values of the numbers in the kernel's `key`, by name
    dtypes: Sequence[str]  # of the tensors, in the order of the arguments
    config: Mapping[str, Any]  # as `triton.Config.all_kwargs` gives it


class Tuning:
    """What was measured. `choose` is an argument of `trace`."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def read(cls, file: Path) -> "Tuning":
        """Reads a file that `write` wrote, if there is one; raises BuildError if it is damaged."""
        if not file.is_file():
            return cls()
        try:
            return cls([Entry(**entry) for entry in json.loads(file.read_text())["entries"]])
        except (ValueError, TypeError, KeyError) as error:
            raise BuildError(
                f"{file}: it is not what `twinop tune` writes: {error}. Tune again or remove it"
            ) from None

    def write(self, file: Path) -> None:
        write(
            file,
            (json.dumps({"entries": [asdict(entry) for entry in self.entries]}, indent=1) + "\n").encode(),
        )

    def choose(self, autotuner: Any, arguments: Mapping[str, Any], arch: Any) -> Any:
        """Returns the configuration for a call; numbers and the compute capability may be symbolic."""
        dtypes = _dtypes(arguments)
        known = [
            each for each in self.entries if each.kernel == _name(autotuner) and list(each.dtypes) == dtypes
        ]
        for entry in known:
            for config in autotuner.configs:
                if config.all_kwargs() == dict(entry.config) and _fits(entry, known, arguments, arch):
                    return config
        return first_configuration(autotuner, arguments, arch)

    @contextmanager
    def recording(self, arch: int) -> Iterator[list[tuple[Entry, float | None]]]:
        """Adds an entry for each call of an autotuned kernel, which Triton measures.

        Yields the list of the new entries, each with its gain: the time of the first configuration over the
        best one's; None where Triton had no choice, or the first one failed.
        """
        from triton.runtime.autotuner import Autotuner

        original = Autotuner.run
        measured: list[tuple[Entry, float | None]] = []

        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(autotuner.arg_names, args, strict=False))
            arguments |= {name: value for name, value in kwargs.items() if name in autotuner.arg_names}
            autotuner.configs_timings = {}
            result = original(autotuner, *args, **kwargs)
            key = {
                name: arguments[name]
                for name in autotuner.keys
                if isinstance(arguments.get(name), (int, float))
            }
            config = autotuner.best_config.all_kwargs()
            entry = Entry(_name(autotuner), arch, key, _dtypes(arguments), config)
            self.entries = [each for each in self.entries if _call(each) != _call(entry)] + [entry]
            if all(_call(each) != _call(entry) for each, _ in measured):
                measured.append((entry, _gain(autotuner)))
            return result

        with mock.patch.object(Autotuner, "run", run):
            yield measured


def _name(autotuner: Any) -> str:
    return str(autotuner.base_fn.__name__)


def _dtypes(arguments: Mapping[str, Any]) -> list[str]:
    return [str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")]


def _gain(autotuner: Any) -> float | None:
    times = [time[0] if isinstance(time, Sequence) else time for time in autotuner.configs_timings.values()]
    return times[0] / min(times) if times and math.isfinite(times[0]) else None


def _call(entry: Entry) -> tuple[Any, ...]:
    return entry.kernel, entry.arch, sorted(entry.key.items()), list(entry.dtypes)


def _fits(entry: Entry, known: Sequence[Entry], arguments: Mapping[str, Any], arch: Any) -> bool:
    if arch != entry.arch:
        return False
    for name, value in entry.key.items():
        others = {each.key[name] for each in known if each.arch == entry.arch and name in each.key}
        above = min((other for other in others if other > value), default=None)
        below = max((other for other in others if other < value), default=None)
        if above is not None and not arguments[name] <= _between(value, above):
            return False
        if below is not None and not arguments[name] > _between(below, value):
            return False
    return True


def _between(low: int | float, high: int | float) -> int:
    return math.isqrt(max(int(low), 1) * max(int(high), 1))
