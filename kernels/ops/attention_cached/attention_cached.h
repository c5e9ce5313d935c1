// attention_cached -> torch.ops.custom_domain.attention_cached, CustomAttentionCached.
#pragma once

#if defined(__CUDACC__)
#include "twinop/ops/attention_cached/cuda.cuh"
#else
#include "twinop/ops/attention_cached/cpu.h"
#endif
#include "twinop/record/registry.h"

namespace twinop {

// Attention of new tokens to themselves and to all before them, whose keys and values are in a
// cache: what a decoder computes for each token that it generates. One kernel norms q and k, turns
// them by their positions (see `rope`), writes k and v to the cache, and attends.
//
// qkv [B, S, (H + 2 Hkv) D] has the heads of q, k and v of the S new tokens. Of both caches
// [B, Hkv, L, D], rows up to the position of the newest token count; what others hold, NaN too,
// does not matter. position [B] is that of the last new token, counted from 0; with more new tokens
// than position + 1, the first is at 0 and the last ones are padding. A new token without a place
// in the caches or in cos_sin is written nowhere, and its result is NaN: those beyond the last row,
// and all of a sequence with a negative position, such as last_position gives for a mask without
// ones. total [] or [1], in host memory, is the largest position + 1: a call with a total beyond
// the cache is refused. cos_sin [>= L, 2 pairs] has a row for each position, the cosines before the
// sines; heads may have more elements than pairs. norms [2, D] are the weights of the RMS norms of
// q and of k. sinks [H] are scores without values. Each token sees `window` keys (0: all). A
// softcap c makes c tanh(score / c) of a score. scale 0 is 1 / sqrt(D).
//
// The bits of a sequence's result do not depend on the other sequences of the batch, nor on L.
// clang-format off
TWINOP_OP(attention_cached,
          Record("attention_cached(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor position, "
                 "Tensor? total=None, Tensor? cos_sin=None, Tensor? norms=None, Tensor? sinks=None, "
                 "float scale=0.0, int window=0, float softcap=0.0, "
                 "bool interleaved=False, float eps=1e-6) -> Tensor")
              .dtypes("float32 position=int32 total=int32; float16 position=int32 total=int32; "
                      "bfloat16 position=int32 total=int32; float64 position=int32 total=int32")
              .shapes("y = [qkv[0], qkv[1], qkv[2] - 2 * k_cache[1] * k_cache[3]]")
              .input_shapes("qkv = [k_cache[0], qkv[1], qkv[2]]; v_cache = k_cache; position = [k_cache[0]]; "
                            "k_cache = [k_cache[0], k_cache[1], k_cache[2], k_cache[3]]; "
                            "cos_sin = [cos_sin[0], cos_sin[1]]; norms = [2, k_cache[3]]; "
                            "sinks = [qkv[2] // k_cache[3] - 2 * k_cache[1]]")
              .limits("window >= 0; softcap >= 0")
              .memory("total = host")
              .scratch<attention_cached::ScratchBytes<Op>>(),
          attention_cached::Run)
// clang-format on

}  // namespace twinop
