"""The progress of long work, and the memory of its processes."""

import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from twinop import console
from twinop.progress import tree_bytes

MIB = 1 << 20


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StringIO:
    text = StringIO()
    shown = Console(file=text, force_terminal=request.param, width=100, highlight=False)
    monkeypatch.setattr(console, "err", shown, raising=False)
    return text


@pytest.mark.parametrize("said", [True], indirect=True)
def test_a_terminal_shows_the_step_how_much_is_done_and_the_memory(said: StringIO) -> None:
    with console.progress_bar("loading") as progress:
        progress("writing", 3 * 10**9, 4 * 10**9)
        console.err._live_stack[-1].refresh()
        progress("comparing", 3, 32)
    assert "loading" not in said.getvalue().split("writing")[1]
    for text in ("writing", "3.00 of 4.00 GB, memory 0.", "comparing", "3 of 32, memory 0."):
        assert text in said.getvalue()


@pytest.mark.parametrize("said", [False], indirect=True)
def test_without_a_terminal_there_are_few_lines(said: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("twinop.console.time.monotonic", lambda: clock[0])
    with console.progress_bar("loading") as progress:
        for clock[0] in (1.0, 6.0, 7.0, 12.0):
            progress(f"step {clock[0]:g}", 1, 2)
    lines = said.getvalue().splitlines()
    assert [line.partition(", memory")[0] for line in lines] == ["step 6: 1 of 2", "step 12: 1 of 2"]


def test_the_memory_is_that_of_all_processes() -> None:
    program = f"held = bytes(1) * {256 * MIB}; print(flush=True); input()"
    before = tree_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 240 * MIB < tree_bytes() - before < 400 * MIB
        child.communicate(b"\n")
