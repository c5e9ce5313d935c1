"""`twinop optimize` works where torch is not installed, and imports it nowhere: that takes seconds."""

import subprocess
import sys
from pathlib import Path

import onnx
from optimizing import parsed

WITHOUT = """
import sys
from twinop.optimize import optimize
print(optimize(*sys.argv[1:], device="cpu").fused)
assert "torch" not in sys.modules
"""


def test_without_torch(tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(
        parsed("(float[2, 8] x) => (float[2, 8] y) { s = Sigmoid (x) g = Mul (x, s) y = Mul (g, x) }"), source
    )
    command = [sys.executable, "-c", WITHOUT, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "swiglu" in done.stdout, done.stderr
    assert [node.op_type for node in onnx.load(target).graph.node] == ["CustomSwiglu"]
