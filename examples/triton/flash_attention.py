"""Attention forward in one kernel, after Triton's sixth tutorial: [batch, heads, tokens, head size]."""

import torch
import triton
import triton.language as tl

import twinop
from twinop.testing.references import Reference


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, n_tokens,
    HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    base = tl.program_id(1).to(tl.int64) * n_tokens * HEAD
    rows = start_m + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    head = tl.arange(0, HEAD)
    row_offsets = rows[:, None] * HEAD + head[None, :]
    q = tl.load(q_ptr + base + row_offsets, mask=rows[:, None] < n_tokens, other=0.0)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD], tl.float32)
    scale_log2 = scale * 1.4426950408889634
    end = tl.minimum(start_m + BLOCK_M, n_tokens) if CAUSAL else n_tokens
    for start_n in range(0, end, BLOCK_N):
        at = start_n + columns
        offsets = at[:, None] * HEAD + head[None, :]
        k = tl.load(k_ptr + base + offsets, mask=at[:, None] < n_tokens, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        seen = at[None, :] < n_tokens
        if CAUSAL:
            seen = seen & (rows[:, None] >= at[None, :])
        scores = tl.where(seen, scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        v = tl.load(v_ptr + base + offsets, mask=at[:, None] < n_tokens, other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * correction[:, None])
        total = total * correction + tl.sum(p, 1)
        largest = new_largest
    out = out / total[:, None]
    tl.store(out_ptr + base + row_offsets, out, mask=rows[:, None] < n_tokens)


def body(q, k, v, *, scale, causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def reference(op):
    """The kernel rounds p to 16 bits before it multiplies: errors are those of the sum of |p * v|."""
    magnitude = lambda q, k, v, scale=0.125, causal=False: body(q, k, v.abs(), scale=scale, causal=causal)
    return Reference(ulps={"float16": 2, "bfloat16": 2}, magnitude=magnitude)


def samples(dtype, size):
    for head in (64, 32, 128):  # the build makes a plan for each branch that a sample takes
        yield tuple(torch.randn(1, 2, size, head).to(dtype) for _ in range(3))


@twinop.triton_op(
    "flash_attention(Tensor q, Tensor k, Tensor v, float scale=0.125, bool causal=False) -> Tensor",
    dtypes=("float16", "bfloat16"),
    body=body,
    samples=samples,
)
def flash_attention(q, k, v, *, scale, causal):
    batch, heads, n_tokens, head = q.shape
    assert head in (32, 64, 128), f"the head size is {head}; expected 32, 64 or 128"
    out = torch.empty_like(q)
    grid = (triton.cdiv(n_tokens, 64), batch * heads)
    attention_kernel[grid](
        q, k, v, out, scale, n_tokens, HEAD=head, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal, num_stages=2
    )
    return out
