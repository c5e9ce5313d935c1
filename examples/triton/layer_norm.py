"""Layer normalisation, forward and backward: the kernels of Triton's fifth tutorial."""

import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def _layer_norm_fwd_fused(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    Y += row * stride
    X += row * stride
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        a = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    var = tl.sum(_var, axis=0) / N
    rstd = 1 / tl.sqrt(var + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        x_hat = (x - mean) * rstd
        y = x_hat * w + b
        tl.store(Y + cols, y, mask=mask)


@triton.jit
def _layer_norm_bwd_dx_fused(
    DX, DY, DW, DB, X, W, Mean, Rstd, Lock, stride, N, GROUP_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE_N)
    mask = cols < N
    offset = row.to(tl.int64) * stride
    X += offset
    DY += offset
    DX += offset
    lock_id = row % GROUP_SIZE_M
    Lock += lock_id
    Count = Lock + GROUP_SIZE_M
    DW = DW + lock_id * N + cols
    DB = DB + lock_id * N + cols
    x = tl.load(X + cols, mask=mask, other=0).to(tl.float32)
    dy = tl.load(DY + cols, mask=mask, other=0).to(tl.float32)
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    mean = tl.load(Mean + row)
    rstd = tl.load(Rstd + row)
    xhat = (x - mean) * rstd
    wdy = w * dy
    xhat = tl.where(mask, xhat, 0.0)
    wdy = tl.where(mask, wdy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    dx = (wdy - (xhat * c1 + c2)) * rstd
    tl.store(DX + cols, dx, mask=mask)
    partial_dw = (dy * xhat).to(w.dtype)
    partial_db = (dy).to(w.dtype)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    count = tl.load(Count)
    if count == 0:
        tl.atomic_xchg(Count, 1)
    else:
        partial_dw += tl.load(DW, mask=mask)
        partial_db += tl.load(DB, mask=mask)
    tl.store(DW, partial_dw, mask=mask)
    tl.store(DB, partial_db, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


@triton.jit
def _layer_norm_bwd_dwdb(
    DW, DB, FINAL_DW, FINAL_DB, M, N, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    pid = tl.program_id(0)
    cols = pid * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    dw = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for i in range(0, M, BLOCK_SIZE_M):
        rows = i + tl.arange(0, BLOCK_SIZE_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        dw += tl.load(DW + offs, mask=mask, other=0.0)
        db += tl.load(DB + offs, mask=mask, other=0.0)
    sum_dw = tl.sum(dw, axis=0)
    sum_db = tl.sum(db, axis=0)
    tl.store(FINAL_DW + cols, sum_dw, mask=cols < N)
    tl.store(FINAL_DB + cols, sum_db, mask=cols < N)


def body(x, weight, bias, *, eps):
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, mean.squeeze(-1), rstd.squeeze(-1)


def backward_body(grad_y, x, weight, mean, rstd):
    x_hat = (x - mean[:, None]) * rstd[:, None]
    scaled = grad_y * weight
    c1 = (x_hat * scaled).mean(-1, keepdim=True)
    grad_x = (scaled - (x_hat * c1 + scaled.mean(-1, keepdim=True))) * rstd[:, None]
    return grad_x, (grad_y * x_hat).sum(0), grad_y.sum(0)


def samples(dtype, size):
    if size:  # ONNX's LayerNormalization takes no empty rows
        yield torch.randn(3, size).to(dtype), torch.randn(size).to(dtype), torch.randn(size).to(dtype)


def backward_samples(dtype, size):
    for rows in (3, 300):  # more than GROUP_SIZE_M, too
        x = torch.randn(rows, size)
        mean, rstd = x.mean(-1), (x.var(-1, correction=0) + 1e-5).rsqrt()
        yield torch.randn(rows, size).to(dtype), x.to(dtype), torch.randn(size).to(dtype), mean, rstd


@twinop.triton_op(
    "layer_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    dtypes=("float32", "float16 mean=float32 rstd=float32", "bfloat16 mean=float32 rstd=float32"),
    body=backward_body,
    samples=backward_samples,
)
def layer_norm_backward(grad_y, x, weight, mean, rstd):
    M, N = x.shape
    GROUP_SIZE_M = 64
    if N <= 8192:
        GROUP_SIZE_M = 96
    if N <= 4096:
        GROUP_SIZE_M = 128
    if N <= 1024:
        GROUP_SIZE_M = 256
    BLOCK_SIZE_N = min(65536 // x.element_size(), triton.next_power_of_2(N))
    if N > BLOCK_SIZE_N:
        raise RuntimeError("This layer norm doesn't support feature dim >= 64KB.")
    num_warps = min(max(BLOCK_SIZE_N // 256, 1), 8)
    locks = torch.zeros(2 * GROUP_SIZE_M, dtype=torch.int32, device=x.device)
    _dw = torch.zeros((GROUP_SIZE_M, N), dtype=x.dtype, device=x.device)
    _db = torch.zeros((GROUP_SIZE_M, N), dtype=x.dtype, device=x.device)
    dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    _layer_norm_bwd_dx_fused[(M,)](
        dx, grad_y, _dw, _db, x, weight, mean, rstd, locks, x.stride(0), N,
        BLOCK_SIZE_N=BLOCK_SIZE_N, GROUP_SIZE_M=GROUP_SIZE_M, num_warps=num_warps,
    )  # fmt: skip
    grid = lambda meta: (triton.cdiv(N, meta["BLOCK_SIZE_N"]),)
    _layer_norm_bwd_dwdb[grid](_dw, _db, dw, db, min(GROUP_SIZE_M, M), N, BLOCK_SIZE_M=32, BLOCK_SIZE_N=128)
    return dx, dw, db


@twinop.triton_op(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-5)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    body=body,
    backward=layer_norm_backward,
    samples=samples,
)
def layer_norm(x, weight, bias, *, eps):
    M, N = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    BLOCK_SIZE = min(8192, triton.next_power_of_2(N))
    num_warps = min(max(BLOCK_SIZE // 256, 1), 8)
    _layer_norm_fwd_fused[(M,)](
        x, y, weight, bias, mean, rstd, x.stride(0), N, eps, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps
    )
    return y, mean, rstd
