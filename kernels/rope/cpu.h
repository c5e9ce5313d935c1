// rope on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/rope/problem.h"

namespace twinop::rope {

inline constexpr std::int64_t kGrainElements = 1 << 15;

template <bool kInterleaved, class T, class Table>
void TurnToken(const Problem& p, std::int64_t heads, const T* x, const Table* cos, const Table* sin,
               T* y) {
  using Number = Compute<T>;
  constexpr std::int64_t kStep = kInterleaved ? 2 : 1;
  const std::int64_t other = kInterleaved ? 1 : p.pairs;
  for (std::int64_t head = 0; head < heads; ++head, x += p.head_size(), y += p.head_size()) {
    for (std::int64_t i = 0; i < p.pairs; ++i) {
      const Number angle_sin = Number(ToCompute(sin[i]));
      Number a = ToCompute(x[i * kStep]), b = ToCompute(x[i * kStep + other]);
      Turn(Number(ToCompute(cos[i])), p.is_inverse ? -angle_sin : angle_sin, &a, &b);
      Round(a, &y[i * kStep]);
      Round(b, &y[i * kStep + other]);
    }
  }
}

template <class Op>
Status Cpu(const CallOf<Op>& call) {
  Problem p;
  TWINOP_RETURN_IF_ERROR(ProblemOf(call, &p));
  return DispatchTypes(call, [&](auto type, auto table) {
    using T = typename decltype(type)::Type;
    using Table = typename decltype(table)::Type;
    const auto* q = InputData<T>(call, "q"_name);
    const auto* k = InputData<T>(call, "k"_name);
    const auto* cos = InputData<Table>(call, "cos"_name);
    const auto* sin = InputData<Table>(call, "sin"_name);
    T* const turned_q = OutputData<T>(call, "turned_q"_name);
    T* const turned_k = OutputData<T>(call, "turned_k"_name);
    const std::int64_t q_width = p.q_heads * p.head_size(), k_width = p.k_heads * p.head_size();
    const auto turn = p.is_interleaved ? TurnToken<true, T, Table> : TurnToken<false, T, Table>;
    const std::int64_t grain = kGrainElements / std::max<std::int64_t>(q_width + k_width, 1) + 1;
    call.context->ParallelFor(p.tokens, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t row = TableRow(p, token) * p.pairs;
        turn(p, p.q_heads, q + token * q_width, cos + row, sin + row, turned_q + token * q_width);
        turn(p, p.k_heads, k + token * k_width, cos + row, sin + row, turned_k + token * k_width);
      }
    });
    return Status();
  });
}

}  // namespace twinop::rope
