// A test op that shows what happens inside a graph: it passes x on, and reports where its data
// lies.
//
//   same = x,  report = [address of x's data, address of same's, tag, mark]  (fp64, all exact below
//   2^53)
//
// Between two probes an op worked in place if the second one reads where the first one wrote. Its
// attributes are of the kinds that no other test op has.
#pragma once

#include "kernels/math/numeric.h"
#include "kernels/record/registry.h"
#if defined(__CUDACC__)
#include "kernels/primitives/launch.cuh"
#endif

namespace twinop {

struct Probe {
  const char* x;
  char* same;
  double* report;
  double tag, mark;

  // One byte of the data; the first call writes the report as well.
  TWINOP_INLINE void operator()(std::int64_t i) const {
    same[i] = x[i];
    if (i > 0) return;
    report[0] = static_cast<double>(reinterpret_cast<std::uintptr_t>(x));
    report[1] = static_cast<double>(reinterpret_cast<std::uintptr_t>(same));
    report[2] = tag;
    report[3] = mark;
  }
};

inline Probe MakeProbe(const Call& call) {
  return {call.inputs[0].as<const char>(), call.outputs[0].as<char>(), call.outputs[1].as<double>(),
          static_cast<double>(call.attributes[0].i), static_cast<double>(call.attributes[1].i)};
}

#if defined(__CUDACC__)
__global__ void ProbeKernel(Probe probe, std::int64_t bytes) {
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < bytes) probe(i);
}
inline Status ProbeCuda(const Call& call) {
  constexpr int kThreads = 128;
  std::int64_t bytes = call.outputs[0].bytes();
  return LaunchKernel(ProbeKernel, (bytes + kThreads - 1) / kThreads, kThreads, call,
                      MakeProbe(call), bytes);
}
#else
inline Status ProbeCpu(const Call& call) {
  for (std::int64_t i = 0; i < call.outputs[0].bytes(); ++i) MakeProbe(call)(i);
  return {};
}
#endif

// clang-format off
TWINOP_OP(probe,
          Record("probe(Tensor x, int tag=-7, bool mark=True) -> (Tensor same, Tensor report)")
              .dtypes("float32 report=float64; float16 report=float64; bfloat16 report=float64; float64")
              .shapes("same = x; report = [4]")
              .in_place("same = x"),
          ProbeCpu, ProbeCuda)
// clang-format on

}  // namespace twinop
