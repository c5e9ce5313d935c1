"""linear and linear_swiglu: forms, errors, sessions, gradients. The tests of all ops cover the rest."""

import subprocess
from pathlib import Path

import onnx.inliner
import pytest
import torch
from linear_calls import linear_node, model_of, random
from record_driver import compiler
from samples import ALL, DEVICES
from torch.nn import functional as F

from twinop import torch_op
from twinop.libraries.library import find_library
from twinop.model.attach import attach_bodies
from twinop.testing.one_node import body_session, make_session, one_node_model, run_bound

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library("custom_ops")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


DRIVER = """
#include <cstdio>
#include "twinop/ops/linear/cublaslt.h"
int main() {
  const twinop::linear::CublasLt* functions = nullptr;
  const twinop::Status status = twinop::linear::GetCublasLt(&functions);
  std::puts(status.ok() ? "found" : status.message().c_str());
}
"""


def test_without_cublaslt(tmp_path: Path) -> None:
    """The message says what is missing and how to get it. A library that is none is named as such."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    (tmp_path / "empty.c").write_text("int nothing;\n")
    include = f"-I{ROOT}/twinop/include"
    driver = str(tmp_path / "driver")
    subprocess.run(
        [compiler(), "-std=c++17", include, "-o", driver, "driver.cpp", "-ldl"], cwd=tmp_path, check=True
    )

    def said(folder: str) -> str:
        env = {"LD_LIBRARY_PATH": folder}
        return subprocess.run([driver], env=env, capture_output=True, text=True, check=True).stdout

    if "found" not in said(""):  # a machine may have one among its system libraries
        assert "no cuBLASLt of major version 12 or 13 in the process" in said("")
        assert "pip install nvidia-cublas" in said("")
    name = tmp_path / "libcublasLt.so.13"
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(name), "empty.c"], cwd=tmp_path, check=True)
    assert "the process's cuBLASLt has no function cublasLt" in said(str(tmp_path))


FLOATS = dict.fromkeys(("x", "weight", "bias", "residual", "y"), "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_constant_weights_on_the_cpu(dtype: torch.dtype) -> None:
    """Constants give what inputs give; many rows go to the threads in pieces."""
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((3, 700, 72), (40, 72), (40,)))
    expected = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.float64: 1e-14}[dtype]
    constants = {"weight": weight, "bias": bias}
    linear = linear_node(["x", "weight", "bias"], "y", activation="gelu")
    model = model_of([linear], ["b", "s", 72], constants)
    types = dict.fromkeys(FLOATS, str(dtype).removeprefix("torch."))
    given = one_node_model(ALL["linear"], types, [1, 1, 1, 0], {"activation": "gelu"})
    found = []
    for proto, fed in ((model, {}), (given, constants)):
        for threads in (1, 3):
            y = torch.empty(3, 700, 40, dtype=dtype)
            run_bound(make_session(proto, LIBRARY, "cpu", threads=threads), {"x": x} | fed, {"y": y})
            assert relative(y, expected) < tolerance
            found.append(y)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_pieces(threads: int) -> None:
    """After some runs with one thread the rows are no longer divided; now and then they are again."""
    weight = random(768, 768)
    model = model_of([linear_node(["x", "weight"], "y", activation="gelu")], ["m", 768], {"weight": weight})
    session = make_session(model, LIBRARY, "cpu", threads=threads)
    for rows in (33, 129):
        x, y = random(rows, 768), torch.empty(rows, 768)
        found = []
        for _ in range(40):
            run_bound(session, {"x": x}, {"y": y})
            found.append(y.clone())
        assert all(torch.equal(y, found[0]) for y in found)


def test_one_body_for_nodes_of_all_kinds() -> None:
    """A model may mix layouts, activations, norms, and nodes with and without a bias or a residual."""
    weight, square, bias = random(6, 4), random(6, 6), random(6)
    nodes = [
        linear_node(["x", "weight"], "a", activation="relu"),
        linear_node(["a", "square", "bias"], "b", layout="kn", activation="gelu"),
        linear_node(["b", "square"], "c", layout="kn"),
        linear_node(["c", "square", "bias"], "d", activation="silu"),
        linear_node(["d", "square"], "e", rms_eps=0.1),
        linear_node(["e", "square"], "f", rms_eps=4.0),
        linear_node(["f", "square", "bias", "c"], "y", activation="silu"),
    ]
    model = attach_bodies(model_of(nodes, ["n", 4], {"weight": weight, "square": square, "bias": bias}))
    x = random(5, 4)
    b = F.gelu(F.relu(x @ weight.mT) @ square + bias)
    d = F.silu(F.linear(b @ square, square, bias))
    e = F.linear(F.rms_norm(d, [6], eps=0.1), square)
    f = F.linear(F.rms_norm(e, [6], eps=4.0), square)
    expected = F.silu(F.linear(f, square, bias) + b @ square)
    assert {function.overload for function in model.functions} == {"", "x,weight,bias,residual"}
    torch.testing.assert_close(body_session(model).run({"x": x})["y"], expected)
    inlined = onnx.inliner.inline_local_functions(model)
    assert not inlined.functions
    torch.testing.assert_close(body_session(inlined).run({"x": x})["y"], expected)
    (in_kernel,) = make_session(model, LIBRARY, "cpu").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(in_kernel), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_is_that_of_a_product(device: str) -> None:
    x, weight, bias = (random(*shape, device=device).requires_grad_() for shape in ((4, 6), (5, 6), (5,)))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = torch_op.linear(x, weight, bias.half(), activation="gelu")
        assert torch_op.linear(x.double(), weight.double()).dtype == torch.float64
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
