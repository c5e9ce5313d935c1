// Row-wise ops whose first result is also written in 8 bits (rowwise/float8.h). The op's outputs
// are q, scale, and those of the functor, of which absent ones are not written.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "twinop/kernel.h"
#include "twinop/rowwise.h"
#include "twinop/rowwise/choose.h"
#include "twinop/rowwise/float8.h"

namespace twinop::rowwise {

// The dtypes of ops with one 16-bit type.
inline constexpr std::string_view kQuantisedDtypes =
    "float16 q=float8_e4m3fn scale=float32; bfloat16 q=float8_e4m3fn scale=float32";

// F, whose first result is also quantised.
template <template <class> class F>
struct Quantising {
  template <class T>
  struct Functor : F<T> {
    static constexpr bool kQuantises = true;
    using Base = F<T>;
    using Base::Base;
  };
};

// An elementwise functor of x as a row-wise one.
template <template <class> class F>
struct ElementwiseRow {
  template <class T>
  struct Functor : Defaults {
    static constexpr auto kRows = Names("x");
    using Phases = Reductions<>;
    using One = Values<T, 1>;
    TWINOP_INLINE One Result(const One& x, const Values<T, 0>&) const { return {F<T>{}(x[0])}; }
  };
};

// The functor's outputs. `y` stands for the first one where the op or the node does not have it.
template <class Op>
std::array<Tensor, kMaxOutputs> ResultsOf(const CallOf<Op>& call, void* y) {
  std::array<Tensor, kMaxOutputs> results;
  for (std::size_t i = 2; i < Op::kRecord.output_count; ++i) results[i - 2] = call.outputs[i];
  if (!results[0].present) {
    const Tensor& q = OutputOf(call, "q"_name);
    results[0] = Tensor(y, q.sizes, q.rank, q.numel, InputOf(call, "x"_name).dtype);
  }
  return results;
}

// The first result lies in scratch memory where it is not wanted and other kernels compute it.
template <class Op>
std::int64_t QuantisedScratchBytes(const CallOf<Op>& call) {
  const auto results = ResultsOf(call, nullptr);
  if (results[0].data != nullptr) return 0;
  bool is_one_kernel = call.context->device_type == TWINOP_CUDA &&
                       QuantisesInOneKernel(results[0].sizes[results[0].rank - 1]);
  const auto take = [&](const Tensor& tensor) {
    is_one_kernel =
        is_one_kernel && reinterpret_cast<std::uintptr_t>(tensor.data) % kVectorBytes == 0;
  };
  std::for_each(call.inputs, call.inputs + Op::kRecord.input_count, take);
  std::for_each(results.begin(), results.end(), take);
  take(OutputOf(call, "q"_name));
  return is_one_kernel ? 0 : results[0].bytes();
}

// The record of an op with the outputs q, scale and y, and those of the functor behind them.
template <class Op>
constexpr Record QuantisingRecord(std::string_view schema) {
  return Record(schema)
      .dtypes(kQuantisedDtypes)
      .rows("-1")
      .shapes("scale = x[:-1]")
      .memory("y = optional")
      .scratch<QuantisedScratchBytes<Op>>();
}

// Quantises rows that lie in memory.
inline Status QuantiseRows(const Call& call, const Tensor& x, std::int64_t stride, const Tensor& q,
                           const Tensor& scale) {
  const std::int64_t columns = q.sizes[q.rank - 1];
  return Dispatch<Half, BFloat16>(x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::Type;
    const S* const rows = x.as<const S>();
#if defined(__CUDACC__)
    if (scale.numel == 0) return Status();
    return LaunchKernel(QuantiseRowsKernel<S>, Grid{scale.numel, dim3(256)}, call, rows, stride,
                        columns, q.as<Float8E4M3>(), scale.as<float>());
#else
    call.context->ParallelFor(scale.numel, (1 << 13) / (columns + 1) + 1, [&](auto begin, auto end) {
      for (auto row = begin; row < end; ++row)
        QuantiseRow(rows + row * stride, columns, q.as<Float8E4M3>() + row * columns,
                    scale.as<float>() + row);
    });
    return Status();
#endif
  });
}

// Computes F and quantises in one kernel; sets `*done` to false where there is none for the call.
template <template <class> class F, class Op>
Status QuantiseInOneKernel([[maybe_unused]] const CallOf<Op>& call, bool* done) {
  *done = false;
#if defined(__CUDACC__)
  auto results = ResultsOf(call, nullptr);
  Call plain = call;
  plain.outputs = results.data();
  return DispatchRows<Quantising<F>::template Functor>(
      NamedCall<Op>(plain), [&](const auto& functor, auto arguments) {
        arguments.q = OutputOf(call, "q"_name).template as<Float8E4M3>();
        arguments.scale = OutputOf(call, "scale"_name).template as<float>();
        return Launch{call, functor, arguments}.RunQuantised(done);
      });
#else
  return {};
#endif
}

// The same, or launch(call) for F and a kernel that quantises its result.
template <template <class> class F, class Op, class Launcher>
Status LaunchQuantising(const CallOf<Op>& call, const Launcher& launch) {
  bool done = false;
  TWINOP_RETURN_IF_ERROR(QuantiseInOneKernel<F>(call, &done));
  if (done) return {};
  auto results = ResultsOf(call, call.scratch);
  Call plain = call;
  plain.outputs = results.data();
  if (results[0].numel > 0) TWINOP_RETURN_IF_ERROR(launch(NamedCall<Op>(plain)));
  const Tensor& q = OutputOf(call, "q"_name);
  return QuantiseRows(call, results[0], q.sizes[q.rank - 1], q, OutputOf(call, "scale"_name));
}

template <template <class> class F, class Op>
Status LaunchQuantisingRows(const CallOf<Op>& call) {
  return LaunchQuantising<F>(call, [](const CallOf<Op>& plain) { return Run<F>(plain); });
}

}  // namespace twinop::rowwise
