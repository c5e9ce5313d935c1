"""A run that ends in the middle leaves the old file whole, and the next run leaves nothing of it behind."""

import signal
from pathlib import Path

import numpy as np
import onnx
import warm_python
from optimizing import parsed, weights

from twinop.optimize import optimize

ENDS = (
    ("rewriting", signal.SIGTERM),
    ("comparing with the original", signal.SIGINT),
    ("running all segments", signal.SIGKILL),
)
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


def write_model(folder: Path) -> Path:
    """Writes a model whose weights lie in a file of their own."""
    folder.mkdir()
    text = """(float[N, 64] x) => (float[N, 64] y) {
        a = MatMul (x, w0) b = LayerNormalization <axis = -1> (a, g)
        c = MatMul (b, w1) d = LayerNormalization <axis = -1> (c, g) y = Neg (d) }"""
    given = {f"w{i}": weights(64, 64, seed=i) / 8 for i in range(2)} | {"g": np.ones(64, np.float32)}
    proto, path = parsed(text, **given), folder / "model.onnx"
    onnx.save(proto, path, location="model.data", save_as_external_data=True, size_threshold=256)
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_ends_at_a_step(tmp_path: Path) -> None:
    """Each over the file of an earlier run. A signal that can be handled leaves nothing at all."""
    source, target = write_model(tmp_path / "source"), tmp_path / "new/fast.onnx"
    given = files_in(source.parent)

    def run(at: str, how: int) -> int:
        return warm_python.run(["-c", _KILLED_AT, source, target, at, str(how)]).returncode

    target.parent.mkdir()
    optimize(source, target, device="cpu")
    whole = files_in(target.parent)
    for step, how in ENDS:
        assert run(step, int(how)) == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[how], step
        found = files_in(target.parent)
        assert {name: found.get(name) for name in whole} == whole  # the target, and its data
        assert how == signal.SIGKILL or found == whole
    optimize(source, target, device="cpu")
    assert files_in(target.parent) == whole  # and no folder of an interrupted run
    assert files_in(source.parent) == given
