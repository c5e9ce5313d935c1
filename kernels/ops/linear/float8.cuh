// linear_fp8 on CUDA: cuBLASLt multiplies, with both scales where it can (float8.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "twinop/ops/linear/cuda.cuh"
#include "twinop/ops/linear/float8.h"
#include "twinop/primitives/vector.cuh"

namespace twinop::linear::float8 {

template <bool kHere>
Status WayOf(const twinop_call* call, const Sizes& sizes, Way* way) {
  return OnDevice(FromC(call), [&](const Call& call) {
    const CublasLt* lt = nullptr;
    const Target* target = nullptr;
    TWINOP_RETURN_IF_ERROR(GetCublasLt(&lt));
    TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
    const bool has_outer_vector = lt->Version() >= kLtHasOuterVector;
    if (kIsTraced && !has_outer_vector && target->capability == 90)
      Trace("  cuBLASLt %zu has no scales a row: %zu has", lt->Version(), kLtHasOuterVector);
    *way = ChooseWay(sizes, *target, has_outer_vector);
    return Status();
  });
}
template Status WayOf<InThisPart("linear")>(const twinop_call*, const Sizes&, Way*);

// Stores eight numbers of 8 bits in 16 bits, a thread each.
template <class T>
static __global__ void WidenKernel(const uint2* from, T* to, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint2 packed = from[i];
  ApproxFloat values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const std::uint32_t word = j < 4 ? packed.x : packed.y;
    values[j] = ToCompute(Float8E4M3{static_cast<std::uint8_t>(word >> (j % 4 * 8))});
  }
  StoreAligned(Pack<T>(values), to + 8 * i);
}

// y = activation(sums x_scale weight_scale + bias + residual), eight columns a thread.
template <class T, class Sum>
static __global__ void ScaleKernel(const Sum* sums, const float* x_scale, const float* weight_scale,
                                   const T* bias, const T* residual, few_rows::Active active, T* y,
                                   int eights, std::int64_t count) {
  PdlTriggerAndWait();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int column = static_cast<int>(i % eights) * 8;
  const float of_row = x_scale[i / eights];
  constexpr int kWidth = kVectorBytes / sizeof(Sum);
  Vector<Sum, kWidth> parts[8 / kWidth];
#pragma unroll
  for (int j = 0; j < 8 / kWidth; ++j) LoadAligned(sums + 8 * i + j * kWidth, &parts[j]);
  Vector<T, 8> biases, residuals{};
  LoadAligned(bias + column, &biases);
  if (residual != nullptr) LoadAligned(residual + 8 * i, &residuals);
  ApproxFloat results[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float sum = ComputeAt(parts[j / kWidth], j % kWidth);
    float value = sum * of_row * weight_scale[column + j] + ComputeAt(biases, j);
    if (residual != nullptr) value += ComputeAt(residuals, j);
    results[j] = few_rows::Activated(value, active);
  }
  StoreAligned(Pack<T>(results), y + 8 * i);
}

// Sums before their scales may exceed float16's largest number.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, Half>, float, T>;

template <class T>
Status Widen(const Call& call, const void* from, void* to, std::int64_t count) {
  return LaunchKernel(WidenKernel<T>, GridOver(count / 8, 256), call,
                      static_cast<const uint2*>(from), static_cast<T*>(to), count / 8);
}

template <class T>
Status Scale(const Call& call, const Buffers& at, const Sizes& sizes, std::string_view activation,
             void* y) {
  const std::int64_t count = sizes.m * sizes.n / 8;
  using Sum = SumOf<T>;
  return LaunchKernel(
      ScaleKernel<T, Sum>, WithPdl(GridOver(count, 256)), call, static_cast<const Sum*>(at.sums),
      static_cast<const float*>(at.x_scale.data), static_cast<const float*>(at.weight_scale.data),
      static_cast<const T*>(at.bias.data), static_cast<const T*>(at.residual.data),
      few_rows::ActiveOf(activation), static_cast<T*>(y), static_cast<int>(sizes.n / 8), count);
}

// y from sums that are scaled later.
template <class T>
Status RunSums(const Call& call, Buffers at, const Sizes& sizes, Way way,
               std::string_view activation, void* y) {
  if (way == Way::kWide) {
    TWINOP_RETURN_IF_ERROR(Widen<T>(call, at.x.data, at.wide_x, sizes.m * sizes.k));
    TWINOP_RETURN_IF_ERROR(Widen<T>(call, at.weight.data, at.wide_weight, sizes.n * sizes.k));
    at.x.data = at.wide_x;
    at.weight.data = at.wide_weight;
    at.operands = DTypeOf<T>();
  }
  GemmBuffers product = at;
  product.x_scale = {};
  bool done = false;
  TWINOP_RETURN_IF_ERROR(
      Multiply(call, product, sizes, DTypeOf<SumOf<T>>(), nullptr, at.sums, kLtDefault, &done));
  if (!done)
    return Status::Error("cuBLASLt has no algorithm for the product of 8 bits on this GPU");
  return Scale<T>(call, at, sizes, activation, y);
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  const Sizes sizes = float8::SizesOf(call);
  if (sizes.k % 16 != 0 || sizes.n % 16 != 0)
    return Status::Error("K is " + std::to_string(sizes.k) + " and N " + std::to_string(sizes.n) +
                         "; expected multiples of 16");
  Way way;
  TWINOP_RETURN_IF_ERROR(WayOf<true>(&call, sizes, &way));
  Buffers at = BuffersOf(call, way);
  for (const Operand* each :
       {&at.x, &at.weight, &at.x_scale, &at.weight_scale, &at.bias, &at.residual})
    if (each->is_moved()) TWINOP_RETURN_IF_ERROR(CopyTensor(call, *each->tensor, each->data));
  Tensor y = OutputOf(call, "y"_name);
  y.data = at.y.data;
  const auto activation = AttributeOf<std::string_view>(call, "activation"_name);
  if (__builtin_expect(kIsTraced, false))
    Trace("  %s", way == Way::kScaled ? "8 bits, scaled by cuBLASLt"
                  : way == Way::kSums ? "8 bits, sums scaled by a kernel"
                                      : "8 bits made 16, sums scaled by a kernel");
  if (way == Way::kScaled || sizes.k == 0) {
    TWINOP_RETURN_IF_ERROR(Compute(call, at, sizes, y, activation));
  } else {
    TWINOP_RETURN_IF_ERROR(y.dtype == DType::kFloat16
                               ? RunSums<Half>(call, at, sizes, way, activation, y.data)
                               : RunSums<BFloat16>(call, at, sizes, way, activation, y.data));
  }
  return at.y.is_moved() ? CopyTensor(call, y, at.y.tensor->data) : Status();
}

}  // namespace twinop::linear::float8
