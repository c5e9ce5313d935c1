"""The op `probe`: int and bool attributes, which no op of twinop has, and no derivative.

It runs in a process of its own, because it has no function body and tests go through all loaded ops.
"""

import warm_python

PROGRAM = """
import torch
from twinop import torch_op
from twinop.errors import RecordError
from twinop.libraries.library import find_library

probe = torch_op.load(find_library("test_probe")).probe
x = torch.tensor([1.0, float("nan")])
for arguments, expected in (((), [-7, 1]), ((-(2**40), False), [-(2**40), 0]), ((3, True), [3, 1])):
    same, report = probe(x, *arguments)
    assert report[2:].tolist() == expected, (arguments, report)
    assert same.view(torch.int32).equal(x.view(torch.int32))
    assert report[:2].tolist() == [x.data_ptr(), same.data_ptr()] and x.data_ptr() != same.data_ptr()

x.requires_grad_()
same, report = probe(x)
try:
    (same.sum() + x.square().sum()).backward()
except RecordError as error:
    print(error)
"""


def test_attributes_reach_the_launcher_and_a_backward_pass_is_refused() -> None:
    """Attributes reach the launcher. Without a derivative, the sum of gradients would be incomplete."""
    done = warm_python.run(["-c", PROGRAM])
    assert done.stdout == "custom_domain::probe has no derivative; detach its inputs\n", done.stderr
