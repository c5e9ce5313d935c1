"""`twinop.compile`: ops from text, in one process after another."""

import re
from pathlib import Path
from typing import Any

import pytest
from abi_files import in_torch
from build_files import tiny

import twinop
from twinop.building import builder, compile_source
from twinop.building.project import Options
from twinop.errors import BuildError

IN_TORCH = """
import pathlib
import twinop
from twinop import deploy, export
from twinop.building import builder

source = pathlib.Path(sys.argv[1]).read_text()
edited = source.replace("2 *", "3 *")
x = torch.tensor([[1.0, -2.0]], requires_grad=True)

times = twinop.compile(source, cpu=True, body=lambda op, x: op.Mul(x, 2.0))
assert times(x).equal(2 * x) and torch.ops.times.times(x).equal(2 * x)
assert twinop.compile(source, cpu=True, body=lambda op, x: op.Mul(x, 2.0)).ops is times.ops

class Net(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x) + 1

compiled = torch.compile(Net(times), fullgraph=True, backend="eager")
assert compiled(x).equal(2 * x + 1)

# Edited text replaces the op; what the older op is part of works as before.
y = times(x)
new = twinop.compile(edited, cpu=True, body=lambda op, x: op.Mul(x, 3.0))
assert new.library_path != times.library_path and new.library_path.name == "libtimes.so"
assert new(x).equal(3 * x) and torch.ops.times.times(x).equal(3 * x)
assert times(x).equal(2 * x) and compiled(x).equal(2 * x + 1)
(grad,) = torch.autograd.grad(y.sum(), x)
assert grad.eq(2).all()
(grad,) = torch.autograd.grad(new(x).sum(), x)
assert grad.eq(3).all()
path = f"{sys.argv[2]}/net.onnx"
options = {"exporter": "torchscript", "library": [new.library_path], "optimize": False}
report = export.export(Net(new), (x.detach(),), path, **options)
assert report.parity.equal and report.without_library is not None, report
assert report.opsets["times"] == 1
session = deploy.session(path, ["CPUExecutionProvider"], [new.library_path])
(result,) = session.run({"x": x.detach()}).values()
assert result.equal((3 * x + 1).detach())

# The first text again: the op that was compiled last has the name.
assert twinop.compile(source, cpu=True).ops is times.ops
assert torch.ops.times.times(x).equal(2 * x)

# Another schema, and a library that is loaded by its path.
wider = edited.replace("times(Tensor x)", "times(Tensor x, int n=1)")
assert twinop.compile(wider, cpu=True)(x, 5).equal(3 * x)
loaded = torch_op.load(times.library_path)
assert loaded.times(x).equal(2 * x) and torch.ops.times.times(x).equal(2 * x)
assert twinop.compile(edited, cpu=True)(x).equal(3 * x) and torch.ops.times.times(x).equal(2 * x)
print("done")
"""


def test_in_torch(tmp_path: Path) -> None:
    (tmp_path / "source").write_text(tiny())
    assert in_torch(IN_TORCH, tmp_path / "source", tmp_path).endswith("done\n")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("int x = 1;", None, "the source registers no op. Expected C++ text with TWINOP_UNARY"),
        ("// TWINOP_OP(other,\n/*\nTWINOP_OP(other, */" + tiny(), "other", "no op 'other'; it has times"),
        (tiny().replace("return {};", "return wrong;"), None, "times.h:10: ‘wrong’ was not declared in this"),
    ],
)
def test_texts_of_no_op(source: str, name: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with pytest.raises(BuildError, match=re.escape(message)):
        twinop.compile(source, name=name, cpu=True)


def test_a_text_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not compiled again, unless a file that it includes has changed."""
    builds = list[builder.Built]()

    def build(*arguments: Any) -> builder.Built:
        builds.append(builder.build(*arguments))
        return builds[-1]

    monkeypatch.setattr(compile_source, "build", build)
    (tmp_path / "factor.h").write_text("#define FOUR 4\n")
    source = tiny(factor="FOUR").replace("FOUR * grad", "4 * grad")
    source = f'#include "{tmp_path}/factor.h"\n{source}'

    def found() -> bytes:
        compile_source._library.cache_clear()  # as in another process
        return compile_source._library(source, "times", "times", Options(cpu=True)).read_bytes()

    first = found()
    assert builds[-1].compiled and found() == first and not builds[-1].compiled
    (tmp_path / "factor.h").write_text("#define FOUR 5\n")
    assert found() != first
