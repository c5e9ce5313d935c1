"""The bodies of the ops that quantise to 8 bits, and of the matmul that reads them, against NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from export_models import model_of
from linear_calls import ACTIVATIONS
from samples import RECORDS

from twinop.export import attach_bodies
from twinop.record.dtypes import to_array
from twinop.record.op_spec import DOMAIN
from twinop.testing.one_node import body_session

each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def run(nodes: list[str], inputs: str, **given: Any) -> dict[str, np.ndarray]:
    """Runs nodes without the library, on their function bodies."""
    model = attach_bodies(model_of(nodes, inputs), RECORDS)
    return {name: to_array(each) for name, each in body_session(model).run(given).items()}


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The formula in NumPy: one scale a row."""
    wide = x.astype(np.float32)
    largest = np.abs(wide).max(-1, keepdims=True)
    scale = np.maximum(largest, np.float32(2.0**-60)) / np.float32(448)
    with np.errstate(over="ignore", invalid="ignore"):
        values = wide * (np.float32(1) / scale)
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn), scale[..., 0]


def spread(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose rows and columns have other magnitudes."""
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-2, 2, (*shape[:-1], 1)) * rng.uniform(0, 4, shape[-1])
    return torch.from_numpy(x).to(dtype)


OPS = {  # the op in 16 bits, its inputs and attributes
    "LayerNorm": ("x, w, b", ""), "AddLayerNorm": ("x, r, w, b", "<eps = 0.5>"),
    "RmsNorm": ("x, w", "<offset = 1>"), "AddRmsNorm": ("x, r, w", ""),
    "Gelu": ("x", '<approximate = "tanh">'), "SwigluPacked": ("x", ""),
}  # fmt: skip


@each_dtype
@pytest.mark.parametrize("op", OPS)
def test_a_producer_has_the_bits_of_its_op_and_of_quantize_rows(op: str, dtype: torch.dtype) -> None:
    arguments, attributes = OPS[op]
    kind, name = ("float16" if dtype is torch.float16 else "bfloat16"), f"{DOMAIN}.Custom{op}"
    more = ", t" if op.startswith("Add") else ""
    nodes = [
        f"q, s, y{more} = {name}Fp8{attributes} ({arguments})",
        f"z{more.replace('t', 'u')} = {name}{attributes} ({arguments})",
        f"p, v = {DOMAIN}.CustomQuantizeRows (z)",
    ]
    x, r = spread(3, 5, 64, dtype=dtype), spread(3, 5, 64, dtype=dtype)
    x[1, 2], r[1, 2] = 0, 0
    given = {"x": x, "r": r, "w": spread(64, dtype=dtype), "b": spread(64, dtype=dtype)}
    given = {each: given[each] for each in arguments.split(", ")}
    inputs = ", ".join(f"{kind}[{'64' if each in 'wb' else 'A, B, 64'}] {each}" for each in given)
    found = run(nodes, inputs, **given)
    q, s = quantized(found["z"])
    assert q.shape == (3, 5, 32 if op == "SwigluPacked" else 64) and s.dtype == np.float32
    for own, wanted in (("q", q), ("s", s), ("p", q), ("v", s), ("y", found["z"])):
        assert found[own].dtype == wanted.dtype and np.array_equal(bits(found[own]), bits(wanted)), own
    if more:
        assert np.array_equal(bits(found["t"]), bits(found["u"]))


def test_rows_of_zeros_of_nothing_and_of_what_is_no_number() -> None:
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[1, 3], x[2, 3], x[3, :], x[4, 0] = float("nan"), float("inf"), 3e38, 1e-30
    node = [f"q, s = {DOMAIN}.CustomQuantizeRows (x)"]
    found = run(node, "bfloat16[N, 32] x", x=x)
    with np.errstate(invalid="ignore"):
        wide = found["q"].astype(np.float32) * found["s"][:, None]
    assert np.array_equal(found["s"][[0, 4]], np.full(2, 2.0**-60 / 448, np.float32)) and not wide[0].any()
    assert np.isnan(wide[1]).all() and np.isnan(found["s"][1]) and np.isnan(wide[2]).all()
    assert np.allclose(wide[3], 3e38, rtol=0.01) and found["q"][4, 0] == 448 * 1e-30 // 2.0**-60
    empty = run(node, "bfloat16[N, 32] x", x=x[:0])
    assert empty["q"].shape == (0, 32) and empty["s"].shape == (0,)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_matmul_scales_before_it_adds(activation: str, dtype: torch.dtype) -> None:
    x, w = (spread(*shape, dtype=torch.float32).numpy() / 64 for shape in ((4, 7, 48), (32, 48)))
    (q, s), (p, v) = quantized(x), quantized(w * 10.0 ** np.linspace(-1, 1, 32)[:, None].astype(np.float32))
    b, r = spread(32, dtype=dtype), spread(4, 7, 32, dtype=dtype)
    kind = "float16" if dtype is torch.float16 else "bfloat16"
    call = f'{DOMAIN}.CustomLinearFp8 <activation = "{activation}"> '
    inputs = "float8e4m3fn[A, B, 48] x, float[A, B] s, float8e4m3fn[32, 48] w, float[32] v"
    inputs += f", {kind}[32] b, {kind}[A, B, 32] r"
    tensors = [torch.from_numpy(each.view(np.uint8)).view(torch.float8_e4m3fn) for each in (q, p)]
    given = {"x": tensors[0], "s": torch.from_numpy(s), "w": tensors[1], "v": torch.from_numpy(v)}
    found = run([f"y = {call} (x, s, w, v, b, r)"], inputs, **given, b=b, r=r)["y"]
    exact = (q.astype(float) * s[..., None]) @ (p.astype(float) * v[:, None]).T
    total = torch.from_numpy(exact) + b.double() + r.double()
    wanted = ACTIVATIONS[activation](total).numpy()
    unit, least = (2.0**-11, 2.0**-25) if dtype is torch.float16 else (2.0**-8, 1e-30)
    terms = np.abs(q.astype(float) * s[..., None]) @ np.abs(p.astype(float) * v[:, None]).T
    room = unit * np.abs(wanted) + 1e-6 * (terms + np.abs(b.double().numpy()) + np.abs(r.double().numpy()))
    assert found.dtype == to_array(b).dtype and (np.abs(found.astype(float) - wanted) <= room + least).all()


def test_an_output_that_nothing_reads_has_no_name() -> None:
    """So the kernel does not write it; the last one that a node of the op reads, all others have, too."""
    norm = f"{DOMAIN}.CustomAddRmsNormFp8"
    nodes = [f"q, s, y, t = {norm} (x, r, w)", f"p, v, z, u = {norm} (y, r, w)"]
    model = model_of(nodes, "float16[N, 16] x, float16[N, 16] r, float16[16] w")
    kept = [each for each in model.graph.output if each.name in "qspvu"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    attached = attach_bodies(model, RECORDS)
    assert [list(each.output) for each in attached.graph.node] == [list("qsyt"), ["p", "v", "", "u"]]
    x = torch.randn(3, 16).half()
    assert list(body_session(attached).run({"x": x, "r": x, "w": x[0]})) == list("qspvu")
