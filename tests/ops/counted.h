// Ops whose outputs have sizes that come from the data, in each form that a record can give.
// `error` is added to what a kernel counts.
#pragma once

#include <algorithm>

#include "twinop/kernel.h"

namespace twinop {

// ------------------------------------------------------------------------------ Count and Write

// Count notes in the scratch memory which elements are positive. Write has only that.
inline std::int64_t FlagBytes(const Call& call) { return call.inputs[0].numel; }

template <class Op>
Status CountPositive(const CallOf<Op>& call) {
  const auto* const x = InputData<float>(call, "x"_name);
  auto* const flags = Scratch<bool>(call);
  const std::int64_t count = InputOf(call, "x"_name).numel;
  for (std::int64_t i = 0; i < count; ++i) flags[i] = x[i] > 0;
  call.counts[0] =
      std::count(flags, flags + count, true) + AttributeOf<std::int64_t>(call, "error"_name);
  return {};
}

template <class Op>
Status WritePositive(const CallOf<Op>& call) {
  const auto* const x = InputData<float>(call, "x"_name);
  auto* const y = OutputData<float>(call, "y"_name);
  auto* const index = OutputData<std::int64_t>(call, "index"_name);
  const std::int64_t count = InputOf(call, "x"_name).numel;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!Scratch<bool>(call)[i]) continue;
    if (y != nullptr) y[n] = x[i];
    if (index != nullptr) index[n] = i;
    ++n;
  }
  OutputData<std::int64_t>(call, "total"_name)[0] = n;
  return {};
}

// x[i] is there times[i] times: no shape bounds their number.
template <class Op>
Status CountRepeated(const CallOf<Op>& call) {
  const auto* const times = InputData<std::int64_t>(call, "times"_name);
  call.counts[0] = AttributeOf<std::int64_t>(call, "error"_name);
  for (std::int64_t i = 0; i < InputOf(call, "x"_name).numel; ++i) call.counts[0] += times[i];
  return {};
}

template <class Op>
Status WriteRepeated(const CallOf<Op>& call) {
  const auto* const times = InputData<std::int64_t>(call, "times"_name);
  auto* y = OutputData<float>(call, "y"_name);
  for (std::int64_t i = 0; i < InputOf(call, "x"_name).numel; ++i)
    y = std::fill_n(y, times[i], InputData<float>(call, "x"_name)[i]);
  return {};
}

// ------------------------------------------------------------------------------ one launcher

// The rows of x that `keep` says, and the others.
template <class Op>
Status SplitRows(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const auto* const keep = InputData<bool>(call, "keep"_name);
  const std::int64_t rows = x.sizes[0], width = rows > 0 ? x.numel / rows : 0;
  auto* kept = OutputData<float>(call, "kept"_name);
  auto* left = OutputData<float>(call, "left"_name);
  call.counts[0] =
      std::count(keep, keep + rows, true) + AttributeOf<std::int64_t>(call, "error"_name);
  call.counts[1] = std::count(keep, keep + rows, false);
  for (std::int64_t i = 0; i < rows; ++i) {
    float*& to = keep[i] ? kept : left;
    to = std::copy_n(x.as<float>() + i * width, width, to);
  }
  return {};
}

// clang-format off
TWINOP_CPU_OP(positive,
              Record("positive(Tensor x, int error=0) -> (Tensor y, Tensor index, Tensor total)")
                  .dtypes("float32 index=int64 total=int64")
                  .sizes("n <= numel(x)")
                  .shapes("y = [n]; index = [1, n]; total = [1]")
                  .memory("index = optional")
                  .gradient("x = torch.zeros_like(x).view(-1).scatter(0, index.view(-1), grad_y).view(x.shape)")
                  .scratch<FlagBytes>()
                  .count<CountPositive<Op>>(),
              WritePositive)

TWINOP_CPU_OP(repeated,
              Record("repeated(Tensor x, Tensor times, int error=0) -> Tensor")
                  .dtypes("float32 times=int64")
                  .input_shapes("times = x")
                  .sizes("n")
                  .shapes("y = [n]")
                  .count<CountRepeated<Op>>(),
              WriteRepeated)

TWINOP_CPU_OP(split_rows,
              Record("split_rows(Tensor x, Tensor keep, int error=0) -> (Tensor kept, Tensor left)")
                  .dtypes("float32 keep=bool")
                  .input_shapes("keep = [x[0]]")
                  .sizes("n <= x[0]; m <= x[0]")
                  .shapes("kept = [n] + x[1:]; left = [m] + x[1:]"),
              SplitRows)
// clang-format on

}  // namespace twinop
