// A test op that shows what happens inside a graph: it passes x on, and reports where its data
// lies.
//
//   same = x,  report = [address of x's data, address of same's, tag, mark]  (fp64, all exact below
//   2^53)
//
// Between two probes an op worked in place if the second one reads where the first one wrote. Its
// attributes are of the kinds that no other test op has.
#pragma once

#include "for_each.h"

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
Status LaunchProbe(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& same = OutputOf(call, "same"_name);
  return ForEach(call, same.bytes(),
                 Probe{x.as<const char>(), same.as<char>(), OutputData<double>(call, "report"_name),
                       static_cast<double>(AttributeOf<std::int64_t>(call, "tag"_name)),
                       AttributeOf<bool>(call, "mark"_name) ? 1.0 : 0.0});
}

// clang-format off
TWINOP_OP(probe,
          Record("probe(Tensor x, int tag=-7, bool mark=True) -> (Tensor same, Tensor report)")
              .dtypes("float32 report=float64; float16 report=float64; bfloat16 report=float64; float64")
              .shapes("same = x; report = [4]")
              .in_place("same = x"),
          LaunchProbe)
// clang-format on

}  // namespace twinop
