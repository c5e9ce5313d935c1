// quantize -> torch.ops.quantize.quantize, CustomQuantize in the domain quantize.
//
//   scale = max |x| / levels (1 if x is zero), q = x / scale rounded to int8
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "twinop/kernel.h"
#if defined(__CUDACC__)
#include "quantize.cu"
#endif

namespace twinop {

inline constexpr int kBlocks = 128;

// Bytes of scratch memory. It may depend on the shapes of the inputs and on the attributes.
template <class Op>
constexpr std::int64_t QuantizeScratch(const CallOf<Op>&) {
  return kBlocks * static_cast<std::int64_t>(sizeof(float));
}

// The launcher: it gets views of the tensors, queues the work, and allocates nothing.
template <class Op>
Status LaunchQuantize(const CallOf<Op>& call) {
  const auto* x = InputData<float>(call, "x"_name);
  auto* q = OutputData<std::int8_t>(call, "q"_name);
  auto* scale = OutputData<float>(call, "scale"_name);
  const auto levels = static_cast<float>(AttributeOf<std::int64_t>(call, "levels"_name));
  const std::int64_t count = InputOf(call, "x"_name).numel;
#if defined(__CUDACC__)
  auto* maxima = Scratch<float>(call);
  TWINOP_RETURN_IF_ERROR(
      LaunchKernel(block_maxima, {kBlocks, dim3(kThreads)}, call, x, count, maxima));
  return LaunchKernel(quantize_all, GridOver(std::max<std::int64_t>(count, 1), kThreads), call, x,
                      count, maxima, kBlocks, levels, q, scale);
#else
  float most = 0;
  for (std::int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(x[i]));
  const float unit = most > 0 ? most / levels : 1;
  *scale = unit;
  call.context->ParallelFor(count, 4096, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      q[i] = static_cast<std::int8_t>(std::nearbyint(x[i] / unit));
  });
  return {};
#endif
}

TWINOP_OP(quantize,
          Record("quantize(Tensor x, int levels=127) -> (Tensor q, Tensor scale)")
              .dtypes("float32 q=int8")
              .shapes("q = x; scale = [1]")
              .limits("levels in 1 | 7 | 127")
              .scratch<QuantizeScratch<Op>>(),
          LaunchQuantize)

}  // namespace twinop
