"""The progress of long work, and the memory of its processes."""

import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twinop.cli import console
from twinop.system.memory import free_bytes, tree_bytes

MIB = 1 << 20


def said(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> StringIO:
    text = StringIO()
    shown = Console(file=text, force_terminal=is_terminal, width=100, highlight=False)
    monkeypatch.setattr(console, "err", shown, raising=False)
    return text


def test_a_terminal_shows_the_step_how_much_is_done_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = said(monkeypatch, True)
    with console.progress_bar("loading") as progress:
        progress("writing", 3 * 10**9, 4 * 10**9)
        console.err._live_stack[-1].refresh()
        progress("comparing", 3, 32)
    assert "loading" not in shown.getvalue().split("writing")[1]
    for text in ("writing", "3.00 of 4.00 GB, memory ", "comparing", "3 of 32, memory "):
        assert text in shown.getvalue()


def test_without_a_terminal_there_are_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = said(monkeypatch, False), [0.0]
    monkeypatch.setattr("twinop.cli.console.time.monotonic", lambda: clock[0])
    with console.progress_bar("loading") as progress:
        for clock[0] in (1.0, 6.0, 7.0, 12.0):
            progress(f"step {clock[0]:g}", 1, 2)
    lines = shown.getvalue().splitlines()
    assert [line.partition(", memory")[0] for line in lines] == ["step 6: 1 of 2", "step 12: 1 of 2"]


def test_a_forked_child_has_what_it_allocates_and_nothing_twice() -> None:
    """The models run in forked children: their memory was left out once."""
    program = f"""
import os
held = bytes(1) * {256 * MIB}
if not os.fork():
    own = bytes(1) * {256 * MIB}
    print(flush=True)
input()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 500 * MIB < tree_bytes(child.pid) < 640 * MIB
        child.communicate(b"\n\n")


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("groups", "limits", "free"),
    [
        ("0::/", {}, 8000),  # the machine's
        ("0::/a/b", {"a": (V2, "max", 500), "a/b": (V2, 6000, 5000)}, 1000 + 300),
        ("0::/a/b", {"a": (V2, 900, 500), "a/b": (V2, 6000, 5000)}, 400 + 300),  # the outer one
        ("0::/../other", {"": (V2, 700, 500)}, 200 + 300),  # a container sees its own as the mount
        ("3:cpu:/a\n4:memory:/a/b\n0::/", {"memory/a": (V1, 2000, 900)}, 1100 + 300),
        ("4:cpu,memory:/a", {"memory/a": (V1, 1000, 2000)}, 0),
    ],
)
def test_free_memory_is_within_the_limit_of_each_cgroup(
    groups: str, limits: dict[str, tuple[tuple[str, str], object, int]], free: int, tmp_path: Path
) -> None:
    """Pages of files, which the kernel can drop, do not count as used."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:  8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, (files, most, used) in limits.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True)
        for file, value in zip(files, (most, used), strict=True):
            (folder / file).write_text(f"{value * 1024 if isinstance(value, int) else value}\n")
        (folder / "memory.stat").write_text(
            f"anon 5\ninactive_file {300 * 1024}\ntotal_inactive_file {300 * 1024}\n"
        )
    assert free_bytes(tmp_path) == free * 1024
