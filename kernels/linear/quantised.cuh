// linear_q and linear_q_swiglu on CUDA: the kernels of few rows on the packed weight, or the
// weight made dense for `linear`.
#pragma once

#include <string>
#include <string_view>

#include "twinop/kernel.h"
#include "twinop/linear/few_rows.cuh"
#include "twinop/linear/quantised.h"

namespace twinop {
TWINOP_LAUNCH_ON_CUDA(linear)
TWINOP_LAUNCH_ON_CUDA(linear_swiglu)
}  // namespace twinop

namespace twinop::linear::quantised {

// Stores [n, k]: a warp a chunk of 8 rows.
template <class Weight>
static __global__ void DenseKernel(const Weight weight, typename Weight::Type* dense, int groups,
                                   int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  WaitForPreviousKernel();
  if (at >= std::int64_t{groups} * weight.chunks) return;
  const int group = static_cast<int>(at / weight.chunks);
  const int chunk = static_cast<int>(at % weight.chunks);
  typename Weight::Fragment fragment;
  weight.Load(group, chunk, &fragment);
#pragma unroll
  for (int b = 0; b < Weight::kSlices; ++b) {
    const int column = (chunk * Weight::kSlices + b) * few_rows::kSlice + lane % 4 * 8;
    if (column < k)
      *reinterpret_cast<uint4*>(dense + (std::int64_t{group} * 8 + lane / 4) * k + column) =
          weight.Values(fragment, b);
  }
}

// Runs linear, or linear_swiglu, with the weight in dense form.
template <class Op>
Status RunDense(const CallOf<Op>& call, const Sizes& sizes, const Packing& at) {
  constexpr int kResidual = Op::kRecord.schema.FindInput("residual");
  const std::int64_t weight_sizes[] = {sizes.n, sizes.k};
  const Tensor& x = InputOf(call, "x"_name);
  Tensor inputs[4] = {x, Tensor(at.dense, weight_sizes, 2, sizes.n * sizes.k, x.dtype),
                      InputOf(call, "bias"_name)};
  if constexpr (kResidual >= 0) inputs[3] = call.inputs[kResidual];
  Attribute attributes[2];
  attributes[0].set_text(AttributeOf<std::string_view>(call, "activation"_name));
  attributes[1].set_text("nk");
  Call other = call;
  other.inputs = inputs;
  other.input_count = kResidual >= 0 ? 4 : 3;
  other.attributes = attributes;
  other.scratch = at.inner;
  other.state = nullptr;
  return kResidual >= 0 ? linear_op::LaunchOnCuda<true>(&other)
                        : linear_swiglu_op::LaunchOnCuda<true>(&other);
}

template <class T, int kBits, class Op>
Status Run(const CallOf<Op>& call) {
  using Weight = few_rows::Packed<T, kBits>;
  constexpr int kResidual = Op::kRecord.schema.FindInput("residual");
  constexpr bool kGated = kResidual < 0;
  const Sizes sizes = quantised::SizesOf(call);
  if (sizes.k % few_rows::kSlice != 0)
    return Status::Error("x has rows of " + std::to_string(sizes.k) +
                         " elements, expected a multiple of 32");
  if (!few_rows::Fits({1, sizes.n, sizes.k, false}, kGated))
    return Status::Error(
        "weight has " + std::to_string(sizes.n) + " rows and x " + std::to_string(sizes.k) +
        " columns; each must be below 2^30, and the rows a multiple of " + (kGated ? "16" : "8"));
  const Packing at = PackingOf(call);
  for (const Operand* each : {&at.x, &at.weight, &at.scale, &at.zero})
    if (each->is_moved()) TWINOP_RETURN_IF_ERROR(CopyTensor(call, *each->tensor, each->data));
  const Weight weight{static_cast<const uint4*>(at.weight.data),
                      static_cast<const T*>(at.scale.data),
                      static_cast<const std::uint8_t*>(at.zero.data),
                      static_cast<int>(InputOf(call, "weight"_name).sizes[1] / 512),
                      static_cast<int>(AttributeOf<std::int64_t>(call, "block"_name))};
  if (sizes.m > kFewRows) {
    const int groups = static_cast<int>(sizes.n / 8);
    if (weight.chunks > 0)
      TWINOP_RETURN_IF_ERROR(LaunchKernel(
          DenseKernel<Weight>, GridOver(std::int64_t{groups} * weight.chunks * 32, 256), call,
          weight, static_cast<T*>(at.dense), groups, static_cast<int>(sizes.k)));
    return RunDense(call, sizes, at);
  }
  Operands operands{};
  operands.x = at.x;
  operands.bias.data = InputOf(call, "bias"_name).data;
  if constexpr (kResidual >= 0) operands.residual.data = call.inputs[kResidual].data;
  const bool is_constant = Constants<Op>::HasWeight(call) && !at.weight.is_moved();
  return few_rows::Launch(
      call, weight,
      few_rows::TaskOf<T>(operands, sizes, AttributeOf<std::string_view>(call, "activation"_name),
                          kGated, is_constant, weight.chunks, OutputOf(call, "y"_name).data));
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  const bool is_half = InputOf(call, "x"_name).dtype == DType::kFloat16;
  if (AttributeOf<std::int64_t>(call, "bits"_name) == 4)
    return is_half ? Run<Half, 4>(call) : Run<BFloat16, 4>(call);
  return is_half ? Run<Half, 8>(call) : Run<BFloat16, 8>(call);
}

}  // namespace twinop::linear::quantised
