// The part of attention_packed that all devices share: the sizes of a call, and its bias.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "twinop/kernel.h"

namespace twinop::attention_packed {

struct AttentionParams {
  std::int64_t batches, tokens, heads;
  std::int64_t size;            // elements of a head
  std::int64_t bias_stride[3];  // from a sequence, head and query to the next; 0: they share it
  double scale;
  bool has_bias, is_causal;
};

template <class Op>
Status ParamsOf(const CallOf<Op>& call, AttentionParams* params) {
  const Tensor& qkv = InputOf(call, "qkv"_name);
  const Tensor& bias = InputOf(call, "bias"_name);
  const auto heads = AttributeOf<std::int64_t>(call, "heads"_name);
  AttentionParams& p = *params;
  p = {};
  p.batches = qkv.sizes[0];
  p.tokens = qkv.sizes[1];
  p.heads = heads;
  p.size = qkv.sizes[2] / 3 / heads;
  p.is_causal = AttributeOf<bool>(call, "causal"_name);
  p.scale = AttributeOf<float>(call, "scale"_name);
  if (p.scale == 0) p.scale = 1 / std::sqrt(static_cast<double>(p.size));
  p.has_bias = bias.present;
  if (!p.has_bias) return {};
  const std::int64_t whole[] = {p.batches, p.heads, p.tokens};
  constexpr const char* kNames[] = {"sequences", "heads", "queries"};
  std::int64_t stride = p.tokens;
  for (int i = 2; i >= 0; --i) {
    if (bias.sizes[i] != 1 && bias.sizes[i] != whole[i])
      return Status::Error("bias is for " + std::to_string(bias.sizes[i]) + " " + kNames[i] +
                           "; expected 1, for all, or " + std::to_string(whole[i]));
    p.bias_stride[i] = bias.sizes[i] == 1 ? 0 : stride;
    stride *= bias.sizes[i];
  }
  return {};
}

}  // namespace twinop::attention_packed
