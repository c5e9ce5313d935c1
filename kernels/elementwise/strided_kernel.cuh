// The elementwise kernel of tensors that are not one flat sequence. A thread takes a 16-byte vector
// of the output and loads its operands as their strides allow. Elements are counted in 32 bits, and
// a larger call becomes several launches; offsets have 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "twinop/elementwise/flat_kernel.cuh"
#include "twinop/elementwise/strided.h"

namespace twinop::elementwise {

// Elements of one launch: half of what a Divider takes, because the last block may reach behind the
// end.
inline constexpr std::int64_t kMaxStridedElements = 1 << 30;

// Division by a number that the host knows: a multiplication and a shift, for dividends below 2^31
// (T. Granlund and P. Montgomery, Division by invariant integers using multiplication, 1994).
struct Divider {
  std::uint32_t divisor, multiplier, shift;

  Divider() = default;
  explicit Divider(std::int64_t size) : divisor(static_cast<std::uint32_t>(size)), shift(0) {
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<std::uint32_t>(
        (std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - divisor) / divisor + 1);
  }
  __device__ __forceinline__ std::uint32_t Quotient(std::uint32_t dividend) const {
    return (__umulhi(dividend, multiplier) + dividend) >> shift;
  }
};

// How an input is read.
enum class Access : std::uint8_t {
  kVector,   // its elements for a vector of the output are an aligned vector
  kScalar,   // they are one element
  kShifted,  // they are consecutive, but not aligned
  kGather,   // they are loaded one by one
};

template <int kInputs>
struct Accesses {
  Access values[kInputs];
};

// A layout as the kernel reads it: rows of elements, the outermost dimension, and those between.
// Two dimensions, the most frequent case, take no loop, and what they need lies together.
template <int kOperands>
struct Strides {
  struct Dimension {
    Divider size;
    std::int64_t strides[kOperands];
  };
  Dimension row;
  std::int64_t outermost[kOperands];
  int around;
  Dimension dimensions[kMaxRank];

  explicit Strides(const Layout<kOperands>& layout) : around(std::max(layout.rank - 2, 0)) {
    const auto dimension = [&](int d) {
      Dimension result{Divider(layout.sizes[d]), {}};
      for (int k = 0; k < kOperands; ++k) result.strides[k] = layout.strides[k][d];
      return result;
    };
    row = dimension(0);
    for (int d = 0; d < around; ++d) dimensions[d] = dimension(1 + d);
    for (int k = 0; k < kOperands; ++k)
      outermost[k] = layout.rank > 1 ? layout.strides[k][layout.rank - 1] : 0;
  }
  // Each operand's offset of an element; returns the element's place in its row.
  __device__ __forceinline__ std::uint32_t Locate(std::uint32_t element,
                                                  std::int64_t (&offsets)[kOperands]) const {
    std::uint32_t rest = row.size.Quotient(element);
    const std::uint32_t place = element - rest * row.size.divisor;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] = place * row.strides[k];
    for (int d = 0; d < around; ++d) {
      const std::uint32_t quotient = dimensions[d].size.Quotient(rest);
      const std::uint32_t at = rest - quotient * dimensions[d].size.divisor;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offsets[k] += at * dimensions[d].strides[k];
      rest = quotient;
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] += rest * outermost[k];
    return place;
  }
};

// Loads the vector of an input that belongs to a vector of the output. Its first `left` elements
// lie in the row of `offset`, the others in the row of `next`.
template <class T, int kWidth, bool kGathers>
__device__ __forceinline__ Vector<T, kWidth> Load(const T* data, Access access, std::int64_t offset,
                                                  std::int64_t next, std::int64_t stride, int left,
                                                  bool inside) {
  using V = Vector<T, kWidth>;
  V vector;
  if (kWidth == 1 || access == Access::kScalar) {
    const T value = data[offset];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.Append(i, value);
  } else if (!kGathers || access == Access::kVector) {
    vector = *reinterpret_cast<const V*>(data + offset);
  } else if (access == Access::kShifted && inside) {
    if constexpr (kWidth > 1) vector = LoadShifted<V>(data + offset);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      vector.Append(i, data[offset]);
      offset = i + 1 == left ? next : offset + stride;
    }
  }
  return vector;
}

// The same threads take the same vectors of the output as in FlatKernel
// (flat_kernel.cuh). Without gathers the kernel needs fewer registers.
template <class F, class T, int kWidth, bool kGathers, int kLoads, int kOutputs, int kInputs>
__global__ void __launch_bounds__(kThreads,
                                  kOutputs + kInputs <= 3 && sizeof(T) < 8
                                      ? BlocksOf(std::max(kStridedRegisters, kTuning<F>.registers))
                                      : 0)
    StridedKernel(F functor, std::uint32_t count, Outputs<T, kOutputs> out, Inputs<T, kInputs> in,
                  Accesses<kInputs> accesses, Strides<kOutputs + kInputs> strides,
                  L2ReadPolicy reads) {
  using V = Vector<T, kWidth>;
  constexpr int kOperands = kOutputs + kInputs;
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  PdlTriggerAndWait();
  const std::uint32_t vectors = count / kWidth;
  const std::uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;

  V loaded[kLoads][kInputs];
  std::int64_t offsets[kLoads][kOperands];
  std::uint32_t place = 0;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const std::uint32_t v = first + j * kThreads;
    if (v < vectors) {
      if (j > 0 && place + kThreads * kWidth < strides.row.size.divisor) {  // the same row
        place += kThreads * kWidth;
#pragma unroll
        for (int k = 0; k < kOperands; ++k)
          offsets[j][k] = offsets[j - 1][k] + kThreads * kWidth * strides.row.strides[k];
      } else {
        place = strides.Locate(v * kWidth, offsets[j]);
      }
      const std::uint32_t left = strides.row.size.divisor - place;
      // Whether the row goes on for a vector on both sides. What lies beyond it may not belong to
      // the tensor.
      const bool inside = place >= kWidth && left >= 2 * kWidth;
      std::int64_t next[kOperands] = {};
      if (kGathers && !inside) strides.Locate(v * kWidth + left, next);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        const int operand = kOutputs + k;
        loaded[j][k] = Load<T, kWidth, kGathers>(
            reads.Of(in[k]), accesses.values[k], offsets[j][operand], next[operand],
            strides.row.strides[operand], static_cast<int>(left), inside);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const bool inside = first + j * kThreads < vectors;
    const unsigned lanes = LanesOf<F>(inside);
    if (inside) {
      V results[kOutputs];
      Apply(functor, lanes, results, loaded[j], kIndices);
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) *reinterpret_cast<V*>(out[k] + offsets[j][k]) = results[k];
    }
  }

  if constexpr (kWidth > 1) {
    const std::uint32_t tail = vectors * kWidth + first;
    const bool has_tail = blockIdx.x == 0 && tail < count;
    const unsigned lanes = LanesOf<F>(has_tail);
    if (has_tail) {
      Vector<T, 1> last[kInputs];
      Vector<T, 1> results[kOutputs];
      strides.Locate(tail, offsets[0]);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) last[k].values[0] = in[k][offsets[0][kOutputs + k]];
      Apply(functor, lanes, results, last, kIndices);
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) out[k][offsets[0][k]] = results[k].values[0];
    }
  }
}

}  // namespace twinop::elementwise
