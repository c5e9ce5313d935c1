"""What the adapters do on the host: states by attributes, and exceptions. tests/ops/host.h has the ops."""

from pathlib import Path

import onnx
from abi_files import FLOAT, in_torch, model
from onnx import helper

from twinop.libraries.library import find_library

KINDS = {
    "error": "an error of one piece",
    "text": "a text",
    "number": "an exception that is not a std::exception",
    "memory": "bad_alloc",
    "raw": "an error of one piece",
}

STATES = """
import resource, threading
counted = torch_op.load(sys.argv[1]).counted
x = torch.ones(2)

# Each combination of attributes has its own, every time.
calls = [{}, {"seed": 1}, {"scale": 2.0}, {"scale": -0.0}, {"scale": 0.0}, {"scale": float("nan")},
         {"mode": "b"}, {"mode": "ab"}, {"mode": ""}, {"axes": []}, {"axes": [1]}, {"axes": [0, 0]},
         {"axes": [-(2**63)]}]
states = [counted(x, **call)[2].item() for call in calls]
assert len(set(states)) == len(calls)
for _ in range(3):
    assert [counted(x, **call)[2].item() for call in calls] == states
assert counted(x)[1].item() == len(calls)

# 10,000 values.
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = None
for seed in range(10_000):
    alive, made, _ = counted(x, seed, 0.5, str(seed), [seed]).tolist()
    assert alive <= 64, alive
    before = before or seed == 1000 and memory()
assert made == len(calls) + 10_000 and memory() - before < 2048, memory() - before

# What is used all the time stays.
kept = counted(x, -1)[2].item()
for seed in range(1000):
    counted(x, seed)
    assert counted(x, -1)[2].item() == kept

def work(k):
    for i in range(1000):
        counted(x, (i * (k + 1)) % 150)
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
assert counted(x)[0].item() <= 64
"""


def test_torch_keeps_the_states_of_the_last_calls() -> None:
    """Not one for each value that an attribute ever had, such as a seed of each step."""
    in_torch(STATES, find_library("test_host"))


THROWING = """
import onnxruntime
from pathlib import Path
throwing = torch_op.load(sys.argv[1]).throwing
x = torch.arange(100_000.0)
torch.set_num_threads(2)

def in_ort(kind):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    options.register_custom_ops_library(sys.argv[1])
    onnxruntime.InferenceSession(f"{sys.argv[2]}/{kind}.onnx", options).run(None, {"x": x.numpy()})

for path in sorted(Path(sys.argv[2]).iterdir()):
    for run in (throwing, lambda _, kind: in_ort(kind)):
        for part in (x, x[:8]):
            try:
                run(part, path.stem)
            except Exception as error:
                print(path.stem, "|", str(error).replace(chr(10), " "))
            else:
                print(path.stem, "| nothing")
assert torch.equal(throwing(x), x)
"""


def test_what_pieces_of_the_work_throw_becomes_an_error(tmp_path: Path) -> None:
    """On the threads of both runtimes, and on the caller's, whatever is thrown."""
    for kind in KINDS:
        node = helper.make_node("CustomThrowing", ["x"], ["y"], "node", domain="test.host", what=kind)
        onnx.save(model([node], {"x": FLOAT}, {"y": FLOAT}, test__host=1), tmp_path / f"{kind}.onnx")
    lines = in_torch(THROWING, find_library("test_host"), tmp_path).splitlines()
    assert len(lines) == 4 * len(KINDS)
    for line in lines:
        kind, said = line.split(" | ")
        assert KINDS[kind] in said, line
    in_ort = [line for i, line in enumerate(lines) if i % 4 >= 2]
    assert all(
        "CustomThrowing node 'node' (CPU): test.host::throwing(x: float32[100000])" in s for s in in_ort
    )
