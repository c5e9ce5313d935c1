// The part of rope that all devices share: the sizes of a call, and the rotation of a pair.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "twinop/kernel.h"

namespace twinop::rope {

struct RopeParams {
  std::int64_t tokens;              // of all sequences
  std::int64_t length;              // of a sequence
  std::int64_t q_heads, k_heads;    // of a token
  std::int64_t head_size;           // elements of a head
  std::int64_t pairs;               // of its first elements, which are rotated; the rest is copied
  bool has_batches;                 // cos and sin have rows for each sequence
  bool is_interleaved, is_inverse;  // attributes
};

template <class Op>
Status ParamsOf(const CallOf<Op>& call, RopeParams* params) {
  const Tensor& q = InputOf(call, "q"_name);
  const Tensor& k = InputOf(call, "k"_name);
  const Tensor& cos = InputOf(call, "cos"_name);
  const std::int64_t rotated = 2 * cos.sizes[2];
  const std::int64_t given = AttributeOf<std::int64_t>(call, "head_size"_name);
  const std::int64_t size = given == 0 ? rotated : given;
  if (rotated == 0)
    return Status::Error("cos has rows without numbers; expected one for each pair");
  if (size < rotated)
    return Status::Error("head_size is " + std::to_string(size) + ", and cos has " +
                         std::to_string(rotated / 2) + " angles; expected a size of at least " +
                         std::to_string(rotated) + ", or 0 for heads of pairs alone");
  if (q.sizes[2] % size != 0 || k.sizes[2] % size != 0)
    return Status::Error("q and k have rows of " + std::to_string(q.sizes[2]) + " and " +
                         std::to_string(k.sizes[2]) + " numbers; expected whole heads of " +
                         std::to_string(size) + ": cos has " + std::to_string(rotated / 2) +
                         " angles, one for each pair of a head");
  if (cos.sizes[0] != 1 && cos.sizes[0] != q.sizes[0])
    return Status::Error("cos is for " + std::to_string(cos.sizes[0]) +
                         " sequences; expected 1, for all, or " + std::to_string(q.sizes[0]) +
                         ", as q has");
  params->tokens = q.sizes[0] * q.sizes[1];
  params->length = q.sizes[1];
  params->q_heads = q.sizes[2] / size;
  params->k_heads = k.sizes[2] / size;
  params->head_size = size;
  params->pairs = cos.sizes[2];
  params->has_batches = cos.sizes[0] != 1;
  params->is_interleaved = AttributeOf<std::string_view>(call, "layout"_name) == "interleaved";
  params->is_inverse = AttributeOf<bool>(call, "inverse"_name);
  return {};
}

// Returns the row of cos and sin for a token.
TWINOP_INLINE std::int64_t TableRow(const RopeParams& params, std::int64_t token) {
  return params.has_batches ? token : token % params.length;
}

// Rotates (a, b) by an angle.
template <class T>
TWINOP_INLINE void ApplyRope(T cos, T sin, T* a, T* b) {
  const T rotated = *a * cos - *b * sin;
  *b = *b * cos + *a * sin;
  *a = rotated;
}

// Calls body(Tag<T>{}, Tag<Table>{}) with the types of q and of cos.
template <class Op, class Body>
Status DispatchTypes(const CallOf<Op>& call, const Body& body) {
  const DType table = InputOf(call, "cos"_name).dtype;
  return Dispatch<float, Half, BFloat16, double>(InputOf(call, "q"_name).dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 2)
      if (table == DType::kFloat32) return body(tag, Tag<float>{});
    return body(tag, tag);
  });
}

}  // namespace twinop::rope
