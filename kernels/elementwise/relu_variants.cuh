// The teaching pair behind relu's attribute `variant`: what one writes first (a thread an element)
// and second (a thread a 16-byte vector). `auto` is the elementwise skeleton. All give the same
// bits; `twinop bench --ops relu` shows the difference.
#pragma once

#include "twinop/elementwise.h"

namespace twinop {

#if defined(__CUDACC__)

template <class F, class T>
__global__ void ScalarKernel(F functor, std::int64_t count, T* out, const T* in) {
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) Round(functor(ToCompute(in[i])), &out[i]);
}

template <template <class> class F>
Status LaunchReluVariant(const Call& call, std::string_view variant) {
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using Functor = F<Compute<T>>;
    constexpr int kThreads = 256;
    const auto in = elementwise::InputPointers<T, 1>(call);
    const auto out = elementwise::OutputPointers<T, 1>(call);
    constexpr std::size_t kBytes = 16;
    if (variant == "vec4" && IsAligned(in[0], kBytes) && IsAligned(out[0], kBytes)) {
      return elementwise::LaunchElementwise<Functor, T, kBytes / sizeof(T), kThreads, 1>(
          call, Functor{}, out, in);
    }
    std::int64_t blocks = (call.outputs[0].numel + kThreads - 1) / kThreads;
    return LaunchKernel(ScalarKernel<Functor, T>, {blocks, dim3(kThreads)}, call, Functor{},
                        call.outputs[0].numel, out[0], in[0]);
  });
}

#endif

}  // namespace twinop
