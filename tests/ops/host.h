// Ops that show what the adapters do on the host: how many states they keep, and what becomes of
// exceptions.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>

#include "twinop/kernel.h"

namespace twinop {

// ------------------------------------------------------------------------------ states

// Counts the states that are alive, and all that were made.
struct Counted {
  static inline std::atomic<std::int64_t> alive{0}, made{0};

  Counted() { ++alive, ++made; }
  Counted(const Counted&) = delete;
  ~Counted() { --alive; }

  static Status Create(const Call&, std::unique_ptr<Counted>* state) {
    *state = std::make_unique<Counted>();
    return {};
  }
};

// y = [states alive, states made, the address of this call's].
template <class Op>
Status LaunchCounted(const CallOf<Op>& call) {
  auto* const y = OutputData<std::int64_t>(call, "y"_name);
  y[0] = Counted::alive;
  y[1] = Counted::made;
  std::memcpy(&y[2], &call.state, sizeof(call.state));
  return {};
}

// ------------------------------------------------------------------------------ rows

// y = the sum of a row up to each element. Rows may lie apart.
template <class Op>
Status LaunchRunningSum(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const std::int64_t columns = x.sizes[x.rank - 1];
  std::int64_t step = columns;
  for (std::size_t i = 0; x.strides != nullptr && i + 1 < x.rank; ++i)
    if (x.sizes[i] > 1) step = x.strides[i];
  const auto* row = InputData<float>(call, "x"_name);
  auto* y = OutputData<float>(call, "y"_name);
  for (std::int64_t i = 0; i < x.numel; i += columns, row += step)
    y = std::partial_sum(row, row + columns, y);
  return {};
}

// ------------------------------------------------------------------------------ exceptions

inline void Throw(std::string_view what) {
  if (what == "text") throw "a text";
  if (what == "number") throw 42;
  if (what == "memory") throw std::bad_alloc();
  throw std::runtime_error("an error of one piece");
}

inline void ThrowInRange(std::int64_t, std::int64_t, void*) { Throw("raw"); }

// y = x; some pieces of the work throw `what`.
template <class Op>
Status LaunchThrowing(const CallOf<Op>& call) {
  const auto what = AttributeOf<std::string_view>(call, "what"_name);
  const auto* const x = InputData<float>(call, "x"_name);
  auto* const y = OutputData<float>(call, "y"_name);
  const std::int64_t count = OutputOf(call, "y"_name).numel;
  if (what == "raw") {
    call.context->parallel_for(call.context->pool, count, 16, ThrowInRange, nullptr);
    return {};
  }
  call.context->ParallelFor(count, 16, [&](std::int64_t begin, std::int64_t end) {
    if (what != "nothing") Throw(what);
    for (std::int64_t i = begin; i < end; ++i) y[i] = x[i];
  });
  return {};
}

// clang-format off
TWINOP_CPU_OP(counted,
              Record("counted(Tensor x, int seed=0, float scale=1.0, str mode=\"a\", int[] axes=[0]) -> Tensor")
                  .dtypes("float32 y=int64")
                  .shapes("y = [3]")
                  .state<Counted>(),
              LaunchCounted)

TWINOP_CPU_OP(running_sum,
              Record("running_sum(Tensor x) -> Tensor")
                  .dtypes("float32")
                  .rows("-1")
                  .gradient("x = grad.flip(-1).cumsum(-1).flip(-1)"),
              LaunchRunningSum)

TWINOP_CPU_OP(throwing,
              Record("throwing(Tensor x, str what=\"nothing\") -> Tensor")
                  .dtypes("float32"),
              LaunchThrowing)
// clang-format on

}  // namespace twinop
