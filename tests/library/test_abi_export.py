"""Both exporters, with the ops of tests/ops/abi_ops.h: what no op of twinop's uses, in whole models.

torch's namespaces belong to a process: each exporter runs in one of its own.
"""

from pathlib import Path

import pytest
from abi_files import in_torch

from twinop.libraries.library import find_library

BODIES = """
from twinop import deploy, export
from twinop.errors import ExportError

library, folder, exporter = sys.argv[1:4]
abi = torch_op.load(library)
D = "test.abi"

@export.body(domain=D)
def packed(op, x, weight, *, n):
    return op.Mul(x, op.Mul(weight, op.Cast(n, to=1))), op.Constant(value_ints=[0])

@export.body(domain=D)
def scale_by(op, x, factors):
    return op.Mul(x, op.Cast(op.ReduceSum(factors), to=1))

@export.body(domain=D)
def spread(op, x):
    return tuple(op.Add(x, op.Cast(k, to=3)) for k in range(8))

@export.body(domain=D)
def take(op, x, index, keep):
    wide = op.Cast(index, to=7)
    valid = op.And(keep, op.And(op.GreaterOrEqual(wide, 0), op.Less(wide, op.Size(x))))
    taken = op.Gather(x, op.Where(valid, wide, 0))
    return op.Where(valid, taken, op.CastLike(0, taken)), valid

class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, a, b=None, c=None):
        return self.function(self, *(value for value in (a, b, c) if value is not None))

def exported(function, *inputs, bodies=True, dynamic=None):
    path = f"{folder}/net.onnx"
    report = export.export(
        Net(function), inputs, path, exporter=exporter, bodies=bodies, dynamic=dynamic, library=library
    )
    assert report.parity.equal, report
    assert report.opsets[D] == 2
    return report

x = torch.tensor([[1.0, -2.0, 3.0]])
ops = torch.ops.test_abi
keep = torch.tensor([True, True, False, True])
index = torch.tensor([2, 0, 1, 5])
"""
HOST = """
report = exported(lambda net, a, b: ops.scale_by(a, b), x, torch.tensor([2, 3]))
assert report.without_library is not None
# the sizes of a dynamic input, which ONNX has on the CPU; torch's dynamo exporter does not trace them
if exporter == "torchscript":
    sizes = lambda net, a: ops.scale_by(a, torch._shape_as_tensor(a))
    report = exported(sizes, x.expand(2, 3), dynamic={"a": {0: "n"}})
    assert report.outputs == {"y": "float [n,3]"}, report.outputs
"""
CONSTANT = """
report = exported(lambda net, a: ops.packed(a, net.weight.detach(), 2)[0], x)
assert report.without_library is not None
"""
EIGHT = """
report = exported(lambda net, a: ops.spread(a), torch.tensor([1, -2], dtype=torch.int8))
assert len(report.outputs) == 8 and set(report.outputs.values()) == {"int8 [2]"}
assert report.without_library is not None
"""
MIXED = """
big = torch.tensor([2**60 + 1, 0, -5])

def two(net, a, b):
    return *ops.take(a, index, keep), *ops.take(b, index.int(), keep)

report = exported(two, torch.tensor([1.5, 2.5, 3.5]), big)  # no cast changes the integer
assert report.without_library.equal
try:
    exported(two, torch.tensor([1.5, 2.5, 3.5]).half(), big)
except ExportError as error:
    assert "the calls of CustomTake want x as float16, int64: one body cannot serve them" in str(error), error
else:
    raise AssertionError("a body was made that casts an integer to float")
exported(two, torch.tensor([1.5, 2.5, 3.5]).half(), big, bodies=False)
"""
CASES = {
    "dynamo": {"host": HOST, "eight": EIGHT},
    "torchscript": {"host": HOST, "constant": CONSTANT, "mixed": MIXED},
}


@pytest.mark.parametrize("exporter", CASES)
def test_export(exporter: str, tmp_path: Path) -> None:
    code = BODIES + "".join(f"{text}print({name!r})\n" for name, text in CASES[exporter].items())
    assert in_torch(code, find_library("test_abi"), tmp_path, Path(exporter)).split() == [*CASES[exporter]]
