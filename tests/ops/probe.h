// A test op that shows what happens inside a graph: it passes x on, and reports where its data
// lies.
//
//   same = x,  report = [address of x's data, address of same's, tag, mark]  (fp64, all exact below
//   2^53)
//
// Between two probes an op worked in place if the second one reads where the first one wrote. Its
// attributes are of the kinds that no other test op has.
#pragma once

#include "twinop/math/numeric.h"
#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/primitives/launch.cuh"
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

template <class Op>
Probe MakeProbe(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& same = OutputOf(call, "same"_name);
  const Tensor& report = OutputOf(call, "report"_name);
  return {x.as<const char>(), same.as<char>(), report.as<double>(),
          static_cast<double>(AttributeOf<std::int64_t>(call, "tag"_name)),
          AttributeOf<bool>(call, "mark"_name) ? 1.0 : 0.0};
}

#if defined(__CUDACC__)
__global__ void ProbeKernel(Probe probe, std::int64_t bytes) {
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < bytes) probe(i);
}
template <class Op>
Status LaunchProbe(const CallOf<Op>& call) {
  constexpr int kThreads = 128;
  std::int64_t bytes = call.outputs[0].bytes();
  return LaunchKernel(ProbeKernel, {(bytes + kThreads - 1) / kThreads, dim3(kThreads)}, call,
                      MakeProbe(call), bytes);
}
#else
template <class Op>
Status LaunchProbe(const CallOf<Op>& call) {
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
          LaunchProbe)
// clang-format on

}  // namespace twinop
