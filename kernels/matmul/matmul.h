// What both matmuls share: the problem's sizes, and where each product's matrices are.
#pragma once

#include <cstdint>

#include "twinop/math/numeric.h"
#include "twinop/record/arguments.h"

namespace twinop::matmul {

// y[batch] = a[batch] b[batch], row-major; the batch dimensions broadcast as numpy's do.
struct Problem {
  std::int64_t m, n, k;
  std::int64_t batches = 1;
  int rank = 0;                   // batch dimensions
  std::int64_t sizes[kMaxRank];   // of y
  std::int64_t a_step[kMaxRank];  // elements from one matrix to the next; 0 where a is repeated
  std::int64_t b_step[kMaxRank];
};

struct Offsets {
  std::int64_t a, b;
};

struct Matrices {
  const float* a;
  const float* b;
  float* y;
};

template <class Op>
Matrices MatricesOf(const CallOf<Op>& call) {
  const Tensor& a = InputOf(call, "a"_name);
  const Tensor& b = InputOf(call, "b"_name);
  const Tensor& y = OutputOf(call, "y"_name);
  return {a.as<const float>(), b.as<const float>(), y.as<float>()};
}

template <class Op>
Problem MakeProblem(const CallOf<Op>& call) {
  const Tensor& a = InputOf(call, "a"_name);
  const Tensor& b = InputOf(call, "b"_name);
  const Tensor& y = OutputOf(call, "y"_name);
  Problem problem{};
  problem.m = a.sizes[a.rank - 2];
  problem.k = a.sizes[a.rank - 1];
  problem.n = b.sizes[b.rank - 1];
  problem.rank = static_cast<int>(y.rank) - 2;
  // The operand's steps, from the last batch dimension to the first; its missing ones are repeated.
  const auto steps = [&](const Tensor& operand, std::int64_t matrix, std::int64_t* result) {
    const std::int64_t missing = static_cast<std::int64_t>(y.rank - operand.rank);
    for (std::int64_t i = problem.rank; i-- > 0;) {
      const std::int64_t size = i < missing ? 1 : operand.sizes[i - missing];
      result[i] = size == 1 ? 0 : matrix;
      matrix *= size;
    }
  };
  steps(a, problem.m * problem.k, problem.a_step);
  steps(b, problem.k * problem.n, problem.b_step);
  for (int i = 0; i < problem.rank; ++i) {
    problem.sizes[i] = y.sizes[i];
    problem.batches *= y.sizes[i];
  }
  return problem;
}

TWINOP_INLINE Offsets OffsetsOf(const Problem& problem, std::int64_t batch) {
  Offsets offsets{0, 0};
  for (int i = problem.rank; i-- > 0;) {
    const std::int64_t at = batch % problem.sizes[i];
    batch /= problem.sizes[i];
    offsets.a += at * problem.a_step[i];
    offsets.b += at * problem.b_step[i];
  }
  return offsets;
}

}  // namespace twinop::matmul
