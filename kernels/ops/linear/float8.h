// linear_fp8, linear_w8 and linear_w8_swiglu: their buffers, and what ONNX Runtime runs on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "twinop/ops/linear/body.h"
#include "twinop/ops/linear/buffers.h"
#include "twinop/primitives/target.h"

namespace twinop::linear::float8 {

template <class Op>  // whether x is in 16 bits
inline constexpr bool kIsW8 = Op::kRecord.FindInput("x_scale") < 0;

// Up to so many rows are multiplied in 16 bits. None are if x is in 8 bits.
template <class Op>
std::int64_t MostFewRows(const CallOf<Op>& call) {
  if constexpr (!kIsW8<Op>)
    return -1;
  else
    return std::min(kMostRows, AttributeOf<std::int64_t>(call, "few_rows"_name));
}

template <class Op>
float RmsEps(const CallOf<Op>& call) {
  if constexpr (!kIsW8<Op>)
    return 0;
  else
    return AttributeOf<float>(call, "rms_eps"_name);
}

// How a product is computed: in one call of cuBLASLt with both scales; as sums, which a kernel
// scales; so from operands in 16 bits, which have every number of 8 bits; or by the kernels of few
// rows, where x is in 16 bits.
enum class Way { kScaled, kSums, kWide, kFewRows };

constexpr bool AreFewRows(const Sizes& sizes, std::int64_t few) {
  return sizes.m <= few && sizes.k > 0;
}

// cuBLASLt splits no product with scales a row into parts of K: where its tiles leave most
// multiprocessors idle, sums and a kernel that scales them are faster (docs/tuning.md). Only on 9.0
// does it have such scales.
constexpr Way ChooseWay(const Sizes& sizes, const Target& target, bool has_outer_vector,
                        std::int64_t few = -1) {
  if (AreFewRows(sizes, few)) return Way::kFewRows;
  if (target.capability < 89) return Way::kWide;
  if (target.capability != 90 || !has_outer_vector) return Way::kSums;
  const std::int64_t tiles = (sizes.m + 127) / 128 * ((sizes.n + 127) / 128);
  return 2 * tiles <= target.multiprocessors && sizes.k >= 3072 ? Way::kSums : Way::kScaled;
}

struct Buffers : GemmBuffers {
  void *sums = nullptr, *wide_x = nullptr, *wide_weight = nullptr;
  void *q = nullptr, *scales = nullptr;  // of an x in 16 bits
};

template <class Op>
Buffers BuffersOf(const CallOf<Op>& call, Way way) {
  Arena arena{static_cast<char*>(call.scratch)};
  Buffers at{};
  const Sizes sizes = SizesOf(call);
  at.x = Operand(InputOf(call, "x"_name), &arena);
  at.weight = Operand(InputOf(call, "weight"_name), &arena);
  at.weight_scale = Operand(InputOf(call, "weight_scale"_name), &arena);
  at.bias = Operand(InputOf(call, "bias"_name), &arena);
  if constexpr (!kIsW8<Op>) at.x_scale = Operand(InputOf(call, "x_scale"_name), &arena);
  if constexpr (!kGated<Op>) at.residual = Operand(InputOf(call, "residual"_name), &arena);
  if (call.outputs != nullptr) at.y = Operand(OutputOf(call, "y"_name), &arena);
  at.operands = DType::kFloat8E4M3;
  if (way != Way::kFewRows) {
    at.workspace = arena.Allocate(kWorkspaceBytes);
    if (kIsW8<Op>) {
      at.q = arena.Allocate(Times(sizes.m, sizes.k));
      at.scales = arena.Allocate(Times(sizes.m, 4));
      if (RmsEps(call) > 0) at.normed = arena.Allocate(Times(sizes.m, sizes.k) * 2);
    }
    if (kGated<Op>) at.packed = arena.Allocate(Times(sizes.m, sizes.n) * 2);
    if (way != Way::kScaled) at.sums = arena.Allocate(Times(sizes.m, sizes.n) * 4);
  }
  if (way == Way::kWide) {
    at.wide_x = arena.Allocate(Times(sizes.m, sizes.k) * 2);
    at.wide_weight = arena.Allocate(Times(sizes.n, sizes.k) * 2);
  }
  at.scratch_bytes = arena.used;
  return at;
}

// Which way the call's device takes (float8.cuh).
template <bool kHere>
Status WayOf(const twinop_call* call, const Sizes& sizes, std::int64_t few, Way* way);

template <class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  Way way = Way::kWide;
#if defined(TWINOP_WITH_CUDA)
  if (call.context == nullptr ||
      !WayOf<true>(&call, SizesOf(call), float8::MostFewRows(call), &way).ok())
    way = Way::kWide;
#endif
  return BuffersOf(call, way).scratch_bytes;
}

template <class Op>
std::string_view Body(const CallOf<Op>& call) {
  BodyWriter body(InputOf(call, "bias"_name).dtype);
  return FinishBody(call, &body, [&](std::string_view x) {
    const std::string_view weight = body.Cast("weight", DType::kFloat32);
    std::string_view y = body.Add("Gemm", {x, weight}, IntAttribute("transB", 1));
    if (!kIsW8<Op>) y = body.Add("Mul", {y, "x_scale"});
    return body.Add("Add", {body.Add("Mul", {y, "weight_scale"}), body.Input("bias")});
  });
}

}  // namespace twinop::linear::float8
