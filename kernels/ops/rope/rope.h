// rope -> torch.ops.custom_domain.rope, CustomRope.
#pragma once

#if defined(__CUDACC__)
#include "twinop/ops/rope/cuda.cuh"
#else
#include "twinop/ops/rope/cpu.h"
#endif
#include "twinop/record/registry.h"

namespace twinop {

// Rotary position embedding of q and k at once (Su et al., RoFormer, arXiv:2104.09864): each pair
// of elements (a, b) of a head becomes (a cos - b sin, b cos + a sin).
//
// q [B, S, Hq * D] and k [B, S, Hk * D] have the layout of linear layers; cos and sin [1 or B, S,
// D/2] have an element for each pair. Layout "half" has the pairs (i, i + D/2), as Llama;
// "interleaved" has (2i, 2i + 1), as GPT-J. Of heads with a larger `head_size` only the first D
// elements are rotated, as in GPT-NeoX. `inverse` rotates back, which is the derivative; cos and
// sin have none.
// clang-format off
TWINOP_OP(rope,
          Record("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, str layout=\"half\", bool inverse=False, "
                 "int head_size=0) -> (Tensor turned_q, Tensor turned_k)")
              .dtypes("float32; float16; float16 cos=float32 sin=float32; bfloat16; "
                      "bfloat16 cos=float32 sin=float32; float64")
              .shapes("turned_k = k")
              .input_shapes("q = [q[0], q[1], q[2]]; k = [q[0], q[1], k[2]]; cos = [cos[0], q[1], cos[2]]; "
                            "sin = cos")
              .choices("layout = half | interleaved")
              .limits("head_size >= 0")
              .in_place("turned_q = q; turned_k = k")
              .gradient("q, k = rope(grad_turned_q, grad_turned_k, cos, sin, layout, not inverse, "
                        "head_size)"),
          rope::Run)
// clang-format on

}  // namespace twinop
