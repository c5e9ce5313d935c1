"""Triton ops that take a list: a plan for each number of tensors that a sample has; gradients."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from user_ops import ROOT, run_python

from twinop.aot_kernels.expression import size
from twinop.errors import BuildError
from twinop.libraries.kernel_op import DECLARED
from twinop.libraries.load_module import load_module
from twinop.triton.trace import trace

pytest.importorskip("triton", reason="kernels in Python need it")

PAGE = (ROOT / "docs/guide/triton.md").read_text()
[TEXT] = re.findall(r"```python\n(# listed_sum\.py\n.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="session")  # a module of one name is imported once; workers take tests from each other
def op(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("listed") / "listed_sum.py"
    file.write_text(TEXT)
    return load_module(file).listed_sum


def test_each_number_of_tensors_has_plans(op: Any) -> None:
    """Each entry has sizes of its own; where the launcher compares them, a call with others is refused."""
    declared = DECLARED["listed_sum::listed_sum"]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        samples = declared.calls("float32", 48)
    traced: Any = trace(declared.record, declared.launcher, samples or [])
    assert traced.record.texts["shapes"] == "" and traced.record.inputs[0].repeated
    assert {len(plan.ranks) for plan in traced.plans} == {1, 3}
    (taken, *refused) = (plan for plan in traced.plans if plan.ranks == (1, 1, 1))
    launches = [step.arguments[0] for step in taken.steps if hasattr(step, "arguments")]
    assert [(pointer.base, pointer.index) for pointer in launches] == [("input", i) for i in range(3)]
    assert size(2, 0) in {each for guard in taken.guards for each in guard.operands}
    assert refused and all("the tensors of xs have one shape" in plan.steps[-1].message for plan in refused)

    with pytest.raises(
        BuildError, match=r"listed_sum.py:\d+: xs of listed_sum is a Tensor\[\]. A library ser"
    ):
        trace(declared.record, declared.launcher)


def test_it_runs_in_torch_with_gradients(op: Any) -> None:
    xs = [torch.randn(5, requires_grad=k < 2) for k in range(3)]
    y = op(xs, 2.0)
    torch.testing.assert_close(y, sum(xs) * 2)
    y.sum().backward()
    assert [None if x.grad is None else x.grad.tolist() for x in xs] == [[2.0] * 5, [2.0] * 5, None]
    call = torch.compile(lambda a, b: op([a, b], 3.0), backend="eager", fullgraph=True)
    assert call(torch.ones(3), torch.ones(3)).tolist() == [6, 6, 6]


RUN = """
import torch, listed_sum
from twinop import torch_op
from twinop.testing.one_node import make_session, one_node_model, run_bound

xs = [torch.randn(1000, device="cuda", requires_grad=True) for _ in range(3)]
y = listed_sum.listed_sum(xs, 2.0)
torch.testing.assert_close(y, sum(xs) * 2)
y.sum().backward()
assert xs[2].grad.eq(2).all()
record = torch_op.records()["listed_sum::listed_sum"]
model = one_node_model(record, {"xs": "float32", "y": "float32"}, [3], {"scale": 2.0})
found = torch.empty_like(y)
session = make_session(model, torch_op.library_of(record), "cuda")
run_bound(session, {f"xs{i}": x.detach() for i, x in enumerate(xs)}, {"y": found})
assert found.equal(y)
try:
    listed_sum.listed_sum(xs[:2])
except RuntimeError as error:
    assert "traced for inputs of other ranks" in str(error), error
else:
    raise AssertionError("two tensors were taken")
"""


@pytest.mark.cuda
def test_a_library_serves_the_numbers_of_its_samples(tmp_path: Path) -> None:
    (tmp_path / "listed_sum.py").write_text(TEXT)
    command = [sys.executable, "-m", "twinop", "build", "listed_sum.py"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = run_python(RUN, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
