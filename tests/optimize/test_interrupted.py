"""A run that ends in the middle leaves the old file whole, and the next run leaves nothing of it behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import warm_python
from optimizing import parsed, weights

ENDS = (
    ("reading the model", signal.SIGINT),
    ("folding constants", signal.SIGKILL),
    ("rewriting", signal.SIGTERM),
    ("running the original", signal.SIGKILL),
    ("comparing with the original", signal.SIGINT),
    ("writing", signal.SIGKILL),
    ("checking the weights", signal.SIGTERM),
    ("comparing what was written", signal.SIGKILL),
    ("running all segments", signal.SIGINT),
    ("running all segments", signal.SIGKILL),
)  # fmt: skip
_KILLED_AT = """
import os, signal, sys
from functools import partial
from twinop.optimize import optimize, segments, verifier
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
verifier.cut = partial(segments.cut, most_bytes=100)
def progress(step, done=0, total=0):
    if step.startswith(sys.argv[3]):
        os.kill(os.getpid(), int(sys.argv[4]))
try:
    optimize(sys.argv[1], sys.argv[2], device="cpu", progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


def write_model(folder: Path, width: int, layers: int) -> Path:
    """Writes a model whose weights lie in a file of their own."""
    folder.mkdir()
    lines = [
        f"a{i} = MatMul (h{i}, w{i}) n{i} = LayerNormalization <axis = -1> (a{i}, g) " for i in range(layers)
    ]
    text = "".join(lines).replace("h0", "x")
    for i in range(layers):
        text = text.replace(f"h{i + 1}", f"n{i}")
    given = {f"w{i}": weights(width, width, seed=i) / width**0.5 for i in range(layers)}
    proto = parsed(
        f"(float[N, {width}] x) => (float[N, {width}] y) {{ {text} y = Neg (n{layers - 1}) }}",
        g=np.ones(width, np.float32),
        **given,
    )
    onnx.save(
        proto, folder / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=256
    )
    return folder / "model.onnx"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leaves_nothing(
    source: Path, folder: Path, run: Callable[[], object], interrupt: Callable[[int], object], count: int
) -> None:
    """Checks a number of interrupted runs, each over a file of an earlier run."""
    folder.mkdir()
    run()
    whole = files_in(folder)
    for index in range(count):
        interrupt(index)
        found = files_in(folder)
        assert {name: found.get(name) for name in whole} == whole  # the target, and its data
    run()
    assert files_in(folder) == whole  # and no folder of an interrupted run
    assert {path.name for path in source.parent.iterdir()} == {"model.onnx", "model.data"}


def test_a_run_that_ends_at_a_step(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "source", 64, 2), tmp_path / "new/fast.onnx"

    def run(at: str = "nothing", how: int = 0) -> int:
        return warm_python.run(["-c", _KILLED_AT, source, target, at, str(how)]).returncode

    def interrupt(index: int) -> None:
        step, how = ENDS[index]
        assert run(step, int(how)) not in (0, 1), step

    leaves_nothing(source, target.parent, lambda: run() == 0, interrupt, len(ENDS))


@pytest.mark.slow
def test_a_command_that_is_ended_at_ten_moments(tmp_path: Path) -> None:
    """100 MB of weights; Ctrl-C and SIGKILL in turns. No temporary file stays elsewhere."""
    source, target = write_model(tmp_path / "source", 2048, 6), tmp_path / "new/fast.onnx"
    (scratch := tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "twinop", "optimize", str(source), "-o", str(target)]
    command += ["--device", "cuda", "--dtype", "float16"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    seconds = 0.0

    def run() -> None:
        nonlocal seconds
        start = time.monotonic()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        seconds = time.monotonic() - start

    def interrupt(index: int) -> None:
        pipe = subprocess.DEVNULL
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe) as process:
            time.sleep(seconds * (index + 0.5) / 10)
            process.send_signal(signal.SIGKILL if index % 2 else signal.SIGINT)

    leaves_nothing(source, target.parent, run, interrupt, 10)
    assert not [*scratch.iterdir()]
