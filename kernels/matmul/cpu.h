// The matmul to learn from, on the CPU: the two variants of matmul/cuda.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/matmul/matmul.h"
#include "twinop/primitives/cpu_features.h"

namespace twinop::matmul {

// A block of y that stays in registers while k runs: each element of a and b that is read is used
// kRows or kColumns times. (32 columns are two AVX-512 registers, four of AVX2.)
inline constexpr std::int64_t kRows = 4;
inline constexpr std::int64_t kColumns = 32;

// Multiplications below which a second thread costs more than it brings.
inline constexpr std::int64_t kGrainProducts = 1 << 18;

template <bool kWhole>
TWINOP_INLINE void Block(const Problem& p, const float* a, const float* b, float* y,
                         std::int64_t rows, std::int64_t columns) {
  float sums[kRows][kColumns] = {};
  if (kWhole) {
    rows = kRows;
    columns = kColumns;
  }
  for (std::int64_t k = 0; k < p.k; ++k) {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) sums[i][j] += a[i * p.k + k] * b[k * p.n + j];
  }
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) y[i * p.n + j] = sums[i][j];
}

// Rows `begin` to `end` of one product. Every element is one sum in the order of k, so that neither
// the variant nor the instruction set nor the pool's cuts change it.
TWINOP_INLINE void TiledRows(const Problem& p, const float* a, const float* b, float* y,
                             std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; i += kRows) {
    for (std::int64_t j = 0; j < p.n; j += kColumns) {
      const std::int64_t rows = std::min(kRows, end - i);
      const std::int64_t columns = std::min(kColumns, p.n - j);
      if (rows == kRows && columns == kColumns) {
        Block<true>(p, a + i * p.k, b + j, y + i * p.n + j, rows, columns);
      } else {
        Block<false>(p, a + i * p.k, b + j, y + i * p.n + j, rows, columns);
      }
    }
  }
}

inline void NaiveRows(const Problem& p, const float* a, const float* b, float* y,
                      std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t j = 0; j < p.n; ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < p.k; ++k) sum += a[i * p.k + k] * b[k * p.n + j];
      y[i * p.n + j] = sum;
    }
  }
}

using RowsFunction = void(const Problem& p, const float* a, const float* b, float* y,
                          std::int64_t begin, std::int64_t end);

struct Tiled {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const Problem& p, const float* a, const float* b, float* y,
                                std::int64_t begin, std::int64_t end) {
    TiledRows(p, a, b, y, begin, end);
  }
};

template <class Op>
Status Cpu(const CallOf<Op>& call) {
  const Problem problem = MakeProblem(call);
  const Matrices matrices = MatricesOf(call);
  RowsFunction* const function = AttributeOf<std::string_view>(call, "variant"_name) == "naive"
                                     ? NaiveRows
                                     : kByLevel<Tiled, RowsFunction>.Choose();
  const std::int64_t blocks = (problem.m + kRows - 1) / kRows;  // of rows of one product
  const std::int64_t work = kRows * problem.n * std::max(problem.k, std::int64_t{1});
  call.context->ParallelFor(
      problem.batches * blocks,
      std::max(std::int64_t{1}, kGrainProducts / std::max(work, std::int64_t{1})),
      [&](std::int64_t begin, std::int64_t end) {
        while (begin < end) {  // rows of one product
          const std::int64_t batch = begin / blocks;
          const std::int64_t last = std::min(end, (batch + 1) * blocks);
          const Offsets offsets = OffsetsOf(problem, batch);
          function(problem, matrices.a + offsets.a, matrices.b + offsets.b,
                   matrices.y + batch * problem.m * problem.n, (begin - batch * blocks) * kRows,
                   std::min((last - batch * blocks) * kRows, problem.m));
          begin = last;
        }
      });
  return {};
}

}  // namespace twinop::matmul
