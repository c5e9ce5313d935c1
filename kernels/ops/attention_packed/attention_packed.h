// attention_packed -> torch.ops.custom_domain.attention_packed, CustomAttentionPacked.
#pragma once

#include "twinop/ops/attention_packed/body.h"
#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/ops/attention_packed/cuda.cuh"
#endif

namespace twinop {

// Scaled dot-product attention (Vaswani et al., arXiv:1706.03762) of short sequences:
// softmax(q k^T scale + bias) v for each head.
//
// qkv [B, S, 3 * H * D] has q, k and v one behind the other, as one linear layer makes them. bias
// [1 or B, 1 or H, 1 or S, S] is added to the scores, such as 0 for tokens that count and -inf for
// others. With `causal`, a token sees those before it and itself. scale 0 is 1 / sqrt(D). As in
// torch, a query that sees no token gets NaN, and a NaN in the v of a hidden token may reach
// others.
//
// On CUDA, a block or a warp takes 16 queries and reads all keys of its head. That suits short
// sequences; for others cuDNN's attention is faster (docs/tuning.md). On the CPU, torch and ONNX
// Runtime compute it with operators of their own.
// clang-format off
TWINOP_CUDA_OP(attention_packed,
          Record("attention_packed(Tensor qkv, Tensor? bias=None, int heads=1, float scale=0.0, "
                 "bool causal=False) -> Tensor")
              .shapes("y = [qkv[0], qkv[1], qkv[2] // 3]")
              .input_shapes("qkv = [qkv[0], qkv[1], qkv[2] // (3 * heads) * (3 * heads)]; "
                            "bias = [bias[0], bias[1], bias[2], qkv[1]]")
              .limits("heads >= 1")
              .autocast("lower")
              .batch_body<attention_packed::Body<Op>>(),
          attention_packed::Cuda)
// clang-format on

}  // namespace twinop
