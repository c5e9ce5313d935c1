"""How much memory processes have, and how much more they can take."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def tree_bytes(process: int | None = None) -> int:
    """Returns the memory of a process and those below it, without mapped files; shared pages count once."""
    children = dict[int, list[int]]()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [process or os.getpid()]
    for each in found:
        found += children.get(each, ())
    return sum(map(_bytes_of, found))


def _bytes_of(process: int) -> int:
    shared = _fields(Path(f"/proc/{process}/smaps_rollup"))
    if "Pss_Anon:" not in shared:  # before Linux 5.2: shared pages count in each process
        return _fields(Path(f"/proc/{process}/status")).get("RssAnon:", 0) * 1024
    return (shared["Pss_Anon:"] + shared["Pss_Shmem:"]) * 1024


def free_bytes(root: Path = Path("/")) -> int:
    """Returns how much memory new processes can take: of the machine, and within each limit of a cgroup."""
    machine = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, min(machine, *_within_limits(root)))


def _within_limits(root: Path) -> Iterator[int]:
    """Yields what the cgroups of this process, and those around them, have left."""
    yield 1 << 62
    base = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        limit, usage, cache = _V1 if kinds else _V2
        mounts = [base / "memory"] if kinds else [base, base / "unified"]
        for mount in mounts:
            own = mount / path.lstrip("/")  # a container may see its own one as the mount
            for folder in dict.fromkeys([own, *own.parents, mount]):
                with suppress(OSError, ValueError):  # no limit here is "max"
                    most, used = (int((folder / name).read_text()) for name in (limit, usage))
                    yield most - used + _fields(folder / "memory.stat").get(cache, 0)


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers of a file of the kernel's, by what stands before them."""
    with suppress(OSError):
        lines = (line.split() for line in path.read_text().splitlines())
        return {
            name: int(value)
            for name, value, *_ in (each for each in lines if len(each) > 1)
            if value.isdigit()
        }
    return {}
