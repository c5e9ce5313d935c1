"""Tests that optimised models run at any length: on CUDA, ONNX Runtime chooses the kernel of an attention."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import CPU
from optimizing import JOINED, KT, apart, exported, optimized, parsed

from lab.model_zoo import TINY, encoder
from twinop import deploy
from twinop.bench.cases import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
each_device = pytest.mark.parametrize(
    ("device", "size"),
    [("cpu", 32), *(pytest.param("cuda", size, marks=pytest.mark.cuda) for size in (32, 64))],
)
PROVIDERS: dict[str, list[Any]] = {"cpu": CPU, "cuda": [("CUDAExecutionProvider", {"use_tf32": 0}), *CPU]}
ATTENTION = f"""(float[B, S, W] q, float[B, T, W] k, float[B, T, W] v%s) => (float[B, S, W] y) {{
    {apart("qv")} {apart("k", perm=KT)} s = MatMul (qh, kh) %s o = MatMul (p, vh) {JOINED} }}"""
HEADS, BATCH = 3, 5


@each_device
@pytest.mark.parametrize("mask", ["", "float[B, 1, 1, T] m", "float[1, 3, S, T] m", "float[B, 3, S, T] m"])
def test_attention_at_any_length(mask: str, size: int, device: str, tmp_path: Path) -> None:
    scores = "t = Add (s, m) p = Softmax (t)" if mask else "p = Softmax (s)"
    text = (ATTENTION % (f", {mask}" if mask else "", scores)).replace("W]", f"{HEADS * size}]")
    shapes = {"apart": np.array([0, 0, HEADS, size]), "joined": np.array([0, 0, HEADS * size])}
    dtype = "float32" if device == "cpu" else "float16"
    report, _ = optimized(parsed(text, **shapes), tmp_path, dtype=dtype)
    assert report.fused == {"attention": 1}
    session, kind = deploy.session(report.path, PROVIDERS[device]), getattr(torch, dtype)
    for tokens in (1, 7, 49, 64):
        dims = {"B": BATCH, "S": tokens, "T": tokens}
        shape = [dims.get(dim) or int(dim) for dim in mask[6 : mask.find("]")].split(", ")] if mask else []
        inputs = {name: torch.randn(BATCH, tokens, HEADS * size).to(kind) for name in "qkv"}
        inputs |= {"m": torch.randn(shape).to(kind)} if mask else {}
        [found] = session.run(inputs).values()
        q, k, v = (inputs[name].double().unflatten(-1, (HEADS, size)).transpose(1, 2) for name in "qkv")
        bias = inputs["m"].double() if mask else 0
        expected = ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        assert relative_error(found, expected) < (1e-5 if device == "cpu" else 1e-2), tokens


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("padding", ["right", None])
@pytest.mark.parametrize("style", ["bert", "llama"])
def test_transformers_at_any_length(style: str, padding: str | None, dtype: str, tmp_path: Path) -> None:
    """Causal attention has more than 1,024 tokens, too: with lengths, ONNX Runtime would refuse them."""
    path = exported(style, tmp_path, layers=2)
    report, _ = optimized(path, tmp_path, padding=padding, dtype=dtype)
    session = deploy.session(report.path, PROVIDERS["cuda"])
    for batch, tokens in ((3, 21), (1, 1), (2, 16), (1, 33), *([(2, 1100)] if style == "llama" else [])):
        ids, mask = torch.randint(0, TINY.vocabulary, (batch, tokens)), torch.ones(batch, tokens).long()
        mask[-1, max(1, tokens - 4) :] = 0
        with torch.no_grad():
            expected = encoder(style, TINY)(ids, mask)
        [found] = session.run({"ids": ids, "mask": mask}).values()
        shown = mask.bool()
        most = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 8e-2}[dtype]  # cuBLAS uses TF32
        assert relative_error(found[shown], expected[shown].double()) < most
