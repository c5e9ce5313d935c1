// Test ops for what no op of twinop's uses: state, an input in host memory, a last input that
// repeats, integer tensors and eight outputs. They form a library with a domain of its own.
#pragma once

#include <memory>
#include <vector>

#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/primitives/launch.cuh"
#endif

namespace twinop {

// ------------------------------------------------------------------------------ state

// y = x * (n * weight), and whether n * weight was made with the state: where weight is constant.
template <class Op>
struct PackedWeight {
  std::vector<float> values;

  static Status Create(const CallOf<Op>& call, std::unique_ptr<PackedWeight>* state) {
    const auto n = AttributeOf<std::int64_t>(call, "n"_name);
    if (n == 13) return Status::Error("n is 13, and no weight is packed 13 times");
    *state = std::make_unique<PackedWeight>();
    const Tensor& weight = InputOf(call, "weight"_name);
    if (!weight.present) return {};
    for (std::int64_t i = 0; i < weight.numel; ++i)
      (*state)->values.push_back(static_cast<float>(n) * weight.as<const float>()[i]);
    return {};
  }
};

template <class Op>
Status LaunchPacked(const CallOf<Op>& call) {
  const auto& state = *static_cast<const PackedWeight<Op>*>(call.state);
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& weight = InputOf(call, "weight"_name);
  const Tensor& y = OutputOf(call, "y"_name);
  const Tensor& was_packed = OutputOf(call, "was_packed"_name);
  const auto n = static_cast<float>(AttributeOf<std::int64_t>(call, "n"_name));
  for (std::int64_t i = 0; i < y.numel; ++i) {
    const std::int64_t j = i % weight.numel;
    const float scale = state.values.empty() ? n * weight.as<const float>()[j]
                                             : state.values[static_cast<std::size_t>(j)];
    y.as<float>()[i] = x.as<const float>()[i] * scale;
  }
  was_packed.as<std::int64_t>()[0] = state.values.empty() ? 0 : 1;
  return {};
}

// ------------------------------------------------------------------------------ host memory

// y = x * sum(factors), which are read on the host on either device.
inline float SumOf(const Tensor& factors) {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < factors.numel; ++i) sum += factors.as<const std::int64_t>()[i];
  return static_cast<float>(sum);
}

#if defined(__CUDACC__)
__global__ void ScaleKernel(const float* x, float* y, float factor, std::int64_t count) {
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = factor * x[i];
}
inline Status LaunchScaleBy(const Call& call) {
  constexpr int kThreads = 128;
  const std::int64_t count = call.outputs[0].numel;
  return LaunchKernel(ScaleKernel, {(count + kThreads - 1) / kThreads, dim3(kThreads)}, call,
                      call.inputs[0].as<const float>(), call.outputs[0].as<float>(),
                      SumOf(call.inputs[1]), count);
}
#else
inline Status LaunchScaleBy(const Call& call) {
  const float factor = SumOf(call.inputs[1]);
  for (std::int64_t i = 0; i < call.outputs[0].numel; ++i)
    call.outputs[0].as<float>()[i] = factor * call.inputs[0].as<const float>()[i];
  return {};
}
#endif

// ------------------------------------------------------------------------------ lists

// The sum of any number of tensors of one shape.
inline Status TotalCpu(const Call& call) {
  for (std::size_t k = 0; k < call.input_count; ++k)
    if (call.inputs[k].numel != call.outputs[0].numel)
      return Status::Error("entry " + std::to_string(k) + " of xs has another size");
  for (std::int64_t i = 0; i < call.outputs[0].numel; ++i) {
    std::int32_t sum = 0;
    for (std::size_t k = 0; k < call.input_count; ++k)
      sum += call.inputs[k].as<const std::int32_t>()[i];
    call.outputs[0].as<std::int32_t>()[i] = sum;
  }
  return {};
}

// Eight outputs: x + 0 to x + 7, in int8.
inline Status SpreadCpu(const Call& call) {
  for (std::int64_t k = 0; k < 8; ++k)
    for (std::int64_t i = 0; i < call.inputs[0].numel; ++i)
      call.outputs[k].as<std::int8_t>()[i] =
          static_cast<std::int8_t>(call.inputs[0].as<const std::int8_t>()[i] + k);
  return {};
}

// clang-format off
TWINOP_CPU_OP(packed,
          Record("packed(Tensor x, Tensor weight, int n=1) -> (Tensor y, Tensor was_packed)")
              .dtypes("float32 was_packed=int64")
              .shapes("y = x; was_packed = [1]")
              .state<PackedWeight<Op>>(),
          LaunchPacked)

TWINOP_OP(scale_by,
          Record("scale_by(Tensor x, Tensor factors) -> Tensor")
              .dtypes("float32 factors=int64")
              .shapes("y = x")
              .memory("factors = host"),
          LaunchScaleBy)

TWINOP_CPU_OP(total,
          Record("total(Tensor[] xs) -> Tensor")
              .dtypes("int32")
              .shapes("y = xs"),
          TotalCpu)

TWINOP_CPU_OP(spread,
          Record("spread(Tensor x) -> (Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, "
                 "Tensor g, Tensor h)")
              .dtypes("int8")
              .shapes("a = x; b = x; c = x; d = x; e = x; f = x; g = x; h = x"),
          SpreadCpu)
// clang-format on

}  // namespace twinop
