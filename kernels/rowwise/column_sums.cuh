// Sums over all rows (grad_weight, grad_bias), and rows whose elements are strided (softmax along a
// dimension that is not the last).
#pragma once

#include <cstdint>

#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/vector.cuh"
#include "twinop/rowwise/reduce.cuh"

namespace twinop::rowwise {

// ---------------------------------------------------------------------------------- sums

inline constexpr int kSumThreads = 128;

// Writes partials[sum][block][column] of rows that were not summed on the way: reads them again,
// with the functor that the first pass stored for each row. Clusters of `groups` groups would take
// the same rows in the same order (RowSlices).
template <class F, class S, class W, bool kVectorised>
__global__ void __launch_bounds__(kSumThreads)
    ColumnSumsKernel(Arguments<F, S, W> arguments, unsigned groups, const F* states,
                     Compute<S>* partials) {
  PdlTriggerAndWait();
  using T = ElementCompute<S>;
  constexpr int kWidth = kVectorised ? kVectorBytes / sizeof(S) : 1;
  constexpr int kInputs = kRowInputs<F>;
  const std::int64_t columns = arguments.rows.columns;
  const std::int64_t column =
      (static_cast<std::int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) * kWidth;
  if (column >= columns) return;
  Compute<S> sums[F::kColumnReductions][kWidth] = {};
  const unsigned first = blockIdx.y / groups + blockIdx.y % groups * (gridDim.y / groups);
#pragma unroll 4
  for (std::int64_t row = first; row < arguments.rows.count; row += gridDim.y) {
    Values<T, kInputs> values[kWidth] = {};
#pragma unroll
    for (int j = 0; j < kInputs - F::kEpilogueInputs; ++j) {
      const S* const place = arguments.inputs[j] + row * arguments.strides[j] + column;
      if constexpr (kVectorised) {
        T unpacked[kWidth];
        Unpack(*reinterpret_cast<const Vector<S, kWidth>*>(place), unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[i][j] = unpacked[i];
      } else {
        values[0][j] = ToCompute(*place);
      }
    }
    const F functor = states[row];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto term = functor.ColumnTerm(values[i]);
#pragma unroll
      for (int s = 0; s < F::kColumnReductions; ++s)
        sums[s][i] = Unwrap(WithTerm(T(sums[s][i]), term, s));
    }
  }
#pragma unroll
  for (int s = 0; s < F::kColumnReductions; ++s)
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      partials[(s * gridDim.y + blockIdx.y) * columns + column + i] = sums[s][i];
}

// Adds the partial sums of each column in a fixed order: every thread adds a part of them, then the
// parts are added one after the other.
inline constexpr int kFinishSlices = 16;

template <class T, class W>
__global__ void __launch_bounds__(32 * kFinishSlices)
    FinishSumsKernel(const T* partials, int count, std::int64_t columns, W* first, W* second) {
  PdlTriggerAndWait();
  W* const out = blockIdx.y == 0 ? first : second;
  if (out == nullptr) return;
  __shared__ T slices[kFinishSlices][32];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x;
  T sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int i = threadIdx.y; i < count; i += kFinishSlices)
      sum += partials[(static_cast<std::int64_t>(blockIdx.y) * count + i) * columns + column];
  }
  slices[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kFinishSlices; ++i) sum += slices[i][threadIdx.x];
  Round(sum, &out[column]);
}

// ---------------------------------------------------------------------------------- strided rows

inline constexpr int kStridedRowThreads = 256;

// A block takes blockDim.x neighbouring rows, and blockDim.y threads share each. The elements are
// read again for each phase. For ops without column inputs.
template <class F, class S>
__global__ void __launch_bounds__(kStridedRowThreads)
    StridedRowsKernel(F initial, Arguments<F, S, S> arguments) {
  PdlTriggerAndWait();
  using T = ElementCompute<S>;
  constexpr int kInputs = kRowInputs<F>;
  const Rows rows = arguments.rows;
  const std::int64_t blocks_across = (rows.inner + blockDim.x - 1) / blockDim.x;
  const std::int64_t outer = blockIdx.x / blocks_across;
  const std::int64_t inner = blockIdx.x % blocks_across * blockDim.x + threadIdx.x;
  const bool exists = inner < rows.inner;
  const std::int64_t base = outer * rows.columns * rows.inner + inner;
  __shared__ T storage[2 * kStridedRowThreads];
  F functor = initial;

  auto read = [&](auto phase, std::int64_t column) {
    Values<T, kInputs> values;
#pragma unroll
    for (int j = 0; j < kInputs; ++j)
      values[j] = ToCompute(arguments.inputs[j][base + column * rows.inner]);
    Replay<decltype(phase)::value, S>(functor, values, Values<T, 0>{});
    return values;
  };
  auto reduce = [&](auto phase) {
    constexpr int kPhase = decltype(phase)::value;
    constexpr Reduction kOp = F::Phases::At(kPhase);
    ThreadTotals<kOp, Values<T, 1>, 1> totals;
    if (exists) {
      for (std::int64_t c = threadIdx.y; c < rows.columns; c += blockDim.y) {
        Values<T, kInputs> values = read(phase, c);
        totals.Add(0, functor.Term(phase, values, Values<T, 0>{}));
      }
    }
    Values<T, 1> total = totals.Sum();
    T* const slices = storage + kPhase % 2 * kStridedRowThreads;
    slices[threadIdx.y * blockDim.x + threadIdx.x] = total[0];
    __syncthreads();
    total[0] = slices[threadIdx.x];
    for (int i = 1; i < static_cast<int>(blockDim.y); ++i)
      total[0] = Combine<kOp>(total[0], slices[i * blockDim.x + threadIdx.x]);
    functor.Finish(phase, total);
  };
  reduce(Phase<0>{});
  if constexpr (kPhases<F> > 1) reduce(Phase<1>{});
  static_assert(kPhases<F> <= 2);

  if (!exists) return;
  for (std::int64_t c = threadIdx.y; c < rows.columns; c += blockDim.y) {
    const auto result = functor.Result(read(Phase<kPhases<F>>{}, c), Values<T, 0>{});
    Round(result[0], &arguments.outputs[0][base + c * rows.inner]);
  }
}

}  // namespace twinop::rowwise
