"""The bodies of the ops that quantise to 8 bits, and of the matmul that reads them, against NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from export_models import model_of
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
