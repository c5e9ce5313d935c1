"""`twinop optimize` works where torch is not installed, and imports it nowhere: that takes seconds."""

import subprocess
import sys
from pathlib import Path

import onnx
from onnx import helper

WITHOUT = """
import sys
from twinop.optimize import optimize
print(optimize(*sys.argv[1:], device="cpu").fused)
assert "torch" not in sys.modules
"""


def test_without_torch(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xy")
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"])]
    nodes += [helper.make_node("Mul", ["x", "s"], ["g"]), helper.make_node("Mul", ["g", "x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y])
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), source)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(source), str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "swiglu" in done.stdout, done.stderr
    assert [node.op_type for node in onnx.load(target).graph.node] == ["CustomSwiglu"]
