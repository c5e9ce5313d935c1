// linear_q and linear_q_swiglu on CUDA: the kernels of few rows on the integers, or the weight made
// dense for `linear`.
#pragma once

#include <string>
#include <string_view>

#include "twinop/kernel.h"
#include "twinop/ops/linear/few_rows.cuh"
#include "twinop/ops/linear_q/quantised.h"

namespace twinop {
TWINOP_LAUNCH_ON_CUDA(linear)
TWINOP_LAUNCH_ON_CUDA(linear_swiglu)
}  // namespace twinop

namespace twinop::linear::quantised {

// Stores [n, k]: a thread 8 columns of a row.
template <class Weight>
static __global__ void DenseKernel(const Weight weight, typename Weight::Type* dense, int eights,
                                   std::int64_t count) {
  PdlTriggerAndWait();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int column = static_cast<int>(i % eights) * 8;
  typename Weight::Fragment fragment;
  weight.LoadEight(weight.Begin(i / eights), column, &fragment);
  reinterpret_cast<uint4*>(dense)[i] = Weight::InOrder(weight.Values(nullptr, fragment, 0, column));
}

// Runs linear, or linear_swiglu, with the weight in dense form.
template <class Op>
Status RunDense(const CallOf<Op>& call, const Sizes& sizes, const QuantScratch& at) {
  const std::int64_t weight_sizes[] = {sizes.n, sizes.k};
  const Tensor& x = InputOf(call, "x"_name);
  Tensor inputs[4] = {x, Tensor(at.dense, weight_sizes, 2, sizes.n * sizes.k, x.dtype),
                      InputOf(call, "bias"_name)};
  if constexpr (!kGated<Op>) inputs[3] = InputOf(call, "residual"_name);
  Attribute attributes[kMaxArguments];  // others, such as rms_eps and few_rows: 0
  attributes[0].set_text(AttributeOf<std::string_view>(call, "activation"_name));
  attributes[1].set_text("nk");
  attributes[2].i = AttributeOf<bool>(call, "invariant"_name);
  Call other = call;
  other.inputs = inputs;
  other.input_count = kGated<Op> ? 3 : 4;
  other.attributes = attributes;
  other.scratch = at.inner;
  other.state = nullptr;
  return kGated<Op> ? linear_swiglu_op::LaunchOnCuda<true>(&other)
                    : linear_op::LaunchOnCuda<true>(&other);
}

template <class T, int kBits, bool kHasZero, class Op>
Status RunWith(const CallOf<Op>& call) {
  using Weight = few_rows::Blocks<T, kBits, kHasZero>;
  const Sizes sizes = SizesOf(call);
  if (sizes.k % few_rows::kSlice != 0)
    return Status::Error("x has rows of " + std::to_string(sizes.k) +
                         " elements, expected a multiple of 32");
  if (!few_rows::Fits(sizes, kGated<Op>))
    return Status::Error("weight has " + std::to_string(sizes.n) + " rows and x " +
                         std::to_string(sizes.k) +
                         " columns; each must be below 2^29, and the rows a multiple of " +
                         (kGated<Op> ? "16" : "8"));
  const QuantScratch at = QuantScratchOf(call);
  for (const Operand* each : {&at.x, &at.weight, &at.scale, &at.zero})
    if (each->is_moved()) TWINOP_RETURN_IF_ERROR(CopyTensor(call, *each->tensor, each->data));
  constexpr int kColumns = 32 * Weight::kSlices;  // of a chunk
  const int chunks = static_cast<int>((sizes.k + kColumns - 1) / kColumns);
  const Weight weight{static_cast<const std::uint8_t*>(at.weight.data),
                      static_cast<const T*>(at.scale.data),
                      static_cast<const std::uint8_t*>(at.zero.data),
                      static_cast<int>(InputOf(call, "weight"_name).sizes[1]),
                      AttributeOf<std::int64_t>(call, "block"_name) == 32 ? 5 : 7};
  if (at.dense != nullptr) {
    const std::int64_t count = sizes.n * sizes.k / 8;
    if (count > 0)
      TWINOP_RETURN_IF_ERROR(LaunchKernel(DenseKernel<Weight>, GridOver(count, 256), call, weight,
                                          static_cast<T*>(at.dense), static_cast<int>(sizes.k / 8),
                                          count));
    return RunDense(call, sizes, at);
  }
  GemmBuffers buffers{};
  buffers.x = at.x;
  buffers.bias.data = InputOf(call, "bias"_name).data;
  if constexpr (!kGated<Op>) buffers.residual.data = InputOf(call, "residual"_name).data;
  const bool is_moved = at.weight.is_moved() || at.scale.is_moved() || at.zero.is_moved();
  const bool is_constant = Constants<Op>::HasWeight(call) && !is_moved;
  return few_rows::Launch(
      call, weight,
      few_rows::TaskOf<T>(buffers, sizes, AttributeOf<std::string_view>(call, "activation"_name),
                          kGated<Op>, is_constant, chunks, 0.0f, OutputOf(call, "y"_name).data));
}

template <class T, int kBits, class Op>
Status Run(const CallOf<Op>& call) {
  return InputOf(call, "zero"_name).present ? RunWith<T, kBits, true>(call)
                                            : RunWith<T, kBits, false>(call);
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  const bool is_half = InputOf(call, "x"_name).dtype == DType::kFloat16;
  if (AttributeOf<std::int64_t>(call, "bits"_name) == 4)
    return is_half ? Run<Half, 4>(call) : Run<BFloat16, 4>(call);
  return is_half ? Run<Half, 8>(call) : Run<BFloat16, 8>(call);
}

}  // namespace twinop::linear::quantised
