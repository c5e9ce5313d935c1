// linear_fp8, linear_w8 and linear_w8_swiglu on CUDA: cuBLASLt multiplies, with both scales where
// it can (float8.h); or the kernels of few rows, where x is in 16 bits (few_rows.cuh).
#pragma once

#include <cstdint>
#include <string_view>

#include "twinop/ops/linear/cuda.cuh"
#include "twinop/ops/linear/float8.h"
#include "twinop/primitives/vector.cuh"

namespace twinop {
TWINOP_LAUNCH_ON_CUDA(quantize_rows)
TWINOP_LAUNCH_ON_CUDA(rms_norm_fp8)
}  // namespace twinop

namespace twinop::linear::float8 {

template <bool kHere>
Status WayOf(const twinop_call* call, const Sizes& sizes, std::int64_t few, Way* way) {
  *way = Way::kFewRows;
  if (AreFewRows(sizes, few)) return {};  // needs no cuBLASLt
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
template Status WayOf<InThisPart("linear")>(const twinop_call*, const Sizes&, std::int64_t, Way*);

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
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int column = static_cast<int>(i % eights) * 8;
  if (i < count) {
    PrefetchL2(weight_scale + column);
    PrefetchL2(bias + column);
    if (residual != nullptr) PrefetchL2(residual + 8 * i);
  }
  PdlTriggerAndWait();
  if (i >= count) return;
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

// Puts the rows of x, normed if asked, in 8 bits: the bits of quantize_rows and rms_norm_fp8.
inline Status Quantise(const Call& call, Buffers* at, const Sizes& sizes, float rms_eps) {
  const std::int64_t x_sizes[] = {sizes.m, sizes.k};
  const auto tensor = [&](void* data, DType dtype, std::size_t rank = 2) {
    return Tensor(data, x_sizes, rank, rank == 2 ? sizes.m * sizes.k : sizes.m, dtype);
  };
  const Tensor inputs[] = {tensor(at->x.data, at->x.tensor->dtype), Tensor()};  // no weight
  Tensor outputs[] = {tensor(at->q, DType::kFloat8E4M3), tensor(at->scales, DType::kFloat32, 1),
                      Tensor()};
  Attribute attributes[kMaxArguments];  // eps, offset
  attributes[0].f = rms_eps;
  Call other = call;
  other.inputs = inputs;
  other.input_count = rms_eps > 0 ? 2 : 1;
  other.outputs = outputs;
  other.attributes = attributes;
  other.scratch = at->normed;
  at->x.data = at->q;
  at->x_scale.data = at->scales;
  return rms_eps > 0 ? rms_norm_fp8_op::LaunchOnCuda<true>(&other)
                     : quantize_rows_op::LaunchOnCuda<true>(&other);
}

// y in one kernel, from x in 16 bits.
template <class T, class Op>
Status RunFewRows(const CallOf<Op>& call, const Buffers& at, const Sizes& sizes, void* y) {
  using Weight = few_rows::Float8Rows<T>;
  const Weight weight{static_cast<const std::uint8_t*>(at.weight.data),
                      static_cast<const float*>(at.weight_scale.data), sizes.k};
  constexpr std::int64_t kChunk = few_rows::kSlice * Weight::kSlices;
  const bool is_constant = Constants<Op>::HasWeight(call) && !at.weight.is_moved();
  return few_rows::Launch(
      call, weight,
      few_rows::TaskOf<T>(at, sizes, AttributeOf<std::string_view>(call, "activation"_name),
                          kGated<Op>, is_constant,
                          static_cast<int>((sizes.k + kChunk - 1) / kChunk), RmsEps(call), y));
}

template <class Op>
Status RunCublasLt(const CallOf<Op>& call, Buffers at, const Sizes& sizes, Way way,
                   const Tensor& y) {
  const auto activation = AttributeOf<std::string_view>(call, "activation"_name);
  if (kIsW8<Op> && sizes.k > 0) TWINOP_RETURN_IF_ERROR(Quantise(call, &at, sizes, RmsEps(call)));
  const std::int64_t packed_sizes[] = {sizes.m, sizes.n};
  const Tensor packed(at.packed, packed_sizes, 2, sizes.m * sizes.n, y.dtype);
  const Tensor& to = kGated<Op> ? packed : y;
  const std::string_view active = kGated<Op> ? "none" : activation;
  if (way == Way::kScaled || sizes.k == 0) {
    TWINOP_RETURN_IF_ERROR(Compute(call, at, sizes, to, active));
  } else {
    TWINOP_RETURN_IF_ERROR(y.dtype == DType::kFloat16
                               ? RunSums<Half>(call, at, sizes, way, active, to.data)
                               : RunSums<BFloat16>(call, at, sizes, way, active, to.data));
  }
  return kGated<Op> ? Gate(call, packed, sizes, activation, y) : Status();
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  const Sizes sizes = SizesOf(call);
  if (sizes.k % 16 != 0 || sizes.n % 16 != 0)
    return Status::Error("K is " + std::to_string(sizes.k) + " and N " + std::to_string(sizes.n) +
                         "; expected multiples of 16");
  Way way;
  TWINOP_RETURN_IF_ERROR(WayOf<true>(&call, sizes, float8::MostFewRows(call), &way));
  Buffers at = BuffersOf(call, way);
  for (const Operand* each :
       {&at.x, &at.weight, &at.x_scale, &at.weight_scale, &at.bias, &at.residual})
    if (each->is_moved()) TWINOP_RETURN_IF_ERROR(CopyTensor(call, *each->tensor, each->data));
  Tensor y = OutputOf(call, "y"_name);
  y.data = at.y.data;
  if (__builtin_expect(kIsTraced, false))
    Trace("  %s", way == Way::kScaled ? "8 bits, scaled by cuBLASLt"
                  : way == Way::kSums ? "8 bits, sums scaled by a kernel"
                  : way == Way::kWide ? "8 bits made 16, sums scaled by a kernel"
                                      : "few rows in 16 bits, a weight in 8");
  if constexpr (kIsW8<Op>)
    if (way == Way::kFewRows)
      TWINOP_RETURN_IF_ERROR(y.dtype == DType::kFloat16
                                 ? RunFewRows<Half>(call, at, sizes, y.data)
                                 : RunFewRows<BFloat16>(call, at, sizes, y.data));
  if (way != Way::kFewRows) TWINOP_RETURN_IF_ERROR(RunCublasLt(call, at, sizes, way, y));
  return at.y.is_moved() ? CopyTensor(call, y, at.y.tensor->data) : Status();
}

}  // namespace twinop::linear::float8
