"""The quota of processor cores that a container sets, which ONNX Runtime does not see."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def quota(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int | None:
    """Return the cores that the control groups (version 1 or 2) allow; None without a limit or beyond it."""
    allowed = min(map(math.ceil, _quotas(cgroups, own)), default=None)
    if allowed is None or allowed >= len(os.sched_getaffinity(0)):
        return None
    return max(allowed, 1)


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas of this process's group and of those above it."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            texts = [_text(place / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
            values = " ".join(texts if controllers else [_text(place / "cpu.max")]).split()
            if len(values) == 2 and values[0].isdecimal():  # otherwise "max" or -1
                yield int(values[0]) / int(values[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
