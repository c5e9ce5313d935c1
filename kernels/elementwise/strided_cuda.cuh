// Elementwise ops on CUDA whose tensors are not one flat sequence. A thread takes a 16-byte vector
// of the output and loads its operands as their strides allow. Elements are counted in 32 bits, and
// a larger call becomes several launches; offsets have 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "twinop/elementwise/cuda.cuh"
#include "twinop/elementwise/launch_settings.h"
#include "twinop/elementwise/strided.h"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/vector.cuh"

namespace twinop::elementwise {

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

// The same threads take the same vectors of the output as in ElementwiseKernel
// (kernels/elementwise/cuda.cuh). Without gathers the kernel needs fewer registers.
template <class F, class T, int kWidth, bool kGathers, int kThreads, int kLoads, int kOutputs,
          int kInputs>
__global__ void __launch_bounds__(kThreads, kOutputs + kInputs <= 3 && sizeof(T) < 8
                                                ? BlocksOf(kThreads, kStridedRegisters<F>)
                                                : 0)
    StridedKernel(F functor, std::uint32_t count, Outputs<T, kOutputs> out, Inputs<T, kInputs> in,
                  Accesses<kInputs> accesses, Strides<kOutputs + kInputs> strides, Reads reads) {
  using V = Vector<T, kWidth>;
  constexpr int kOperands = kOutputs + kInputs;
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  WaitForPreviousKernel();
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

template <int kWidth, bool kGathers, int kThreads, int kLoads, class F, class T, int kOutputs,
          int kInputs>
Status LaunchStridedKernel(const Call& call, const F& functor,
                           const Layout<kOutputs + kInputs>& layout,
                           const Outputs<T, kOutputs>& out, const Inputs<T, kInputs>& in,
                           const Accesses<kInputs>& accesses) {
  const std::int64_t per_block = std::int64_t{kThreads} * kLoads * kWidth;
  const std::int64_t blocks = (layout.numel + per_block - 1) / per_block;
  return LaunchKernel(StridedKernel<F, T, kWidth, kGathers, kThreads, kLoads, kOutputs, kInputs>,
                      Dependent({blocks, dim3(kThreads)}), call, functor,
                      static_cast<std::uint32_t>(layout.numel), out, in, accesses,
                      Strides<kOutputs + kInputs>(layout),
                      ReadsOf<T>(layout.numel, kOutputs + kInputs));
}

// Whether a vector of the output is one of the operand, too, and aligned.
template <int kWidth, class T, int kOperands>
bool IsVector(const Layout<kOperands>& layout, int operand, const T* data) {
  const std::int64_t* strides = layout.strides[operand];
  if (!IsAligned(data, sizeof(T) * kWidth)) return false;
  if (layout.IsFlat(operand)) return true;
  bool vector = strides[0] == 1 && layout.sizes[0] % kWidth == 0;
  for (int d = 1; d < layout.rank; ++d) vector = vector && strides[d] % kWidth == 0;
  return vector;
}

template <class F, class T, int kOutputs, int kInputs>
Status LaunchLayout(const Call& call, const F& functor, Layout<kOutputs + kInputs> layout,
                    const Outputs<T, kOutputs>& out, const Inputs<T, kInputs>& in) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if (layout.numel > kMaxStridedElements) {  // halve the outermost dimension
    while (layout.sizes[layout.rank - 1] == 1) --layout.rank;
    const int d = layout.rank - 1;
    const std::int64_t size = layout.sizes[d];
    std::int64_t half = size / 2;
    if (d == 0) half -= half % kWidth;  // both halves stay aligned
    Outputs<T, kOutputs> back_out = out;
    Inputs<T, kInputs> back_in = in;
    for (int k = 0; k < kOutputs; ++k) back_out.pointers[k] += half * layout.strides[k][d];
    for (int k = 0; k < kInputs; ++k) back_in.pointers[k] += half * layout.strides[kOutputs + k][d];
    Layout<kOutputs + kInputs> back = layout;
    layout.sizes[d] = half;
    layout.numel = layout.numel / size * half;
    back.sizes[d] -= half;
    back.numel -= layout.numel;
    TWINOP_RETURN_IF_ERROR(LaunchLayout(call, functor, layout, out, in));
    return LaunchLayout(call, functor, back, back_out, back_in);
  }
  bool vectors = true;
  for (int k = 0; k < kOutputs; ++k) vectors = vectors && IsVector<kWidth>(layout, k, out[k]);
  const bool whole_rows = layout.sizes[0] % kWidth == 0;
  bool gathers = false;
  int shifted = 0;
  Accesses<kInputs> accesses;
  for (int k = 0; k < kInputs; ++k) {
    const int operand = kOutputs + k;
    Access& access = accesses.values[k];
    if (IsVector<kWidth>(layout, operand, in[k])) {
      access = Access::kVector;
    } else if (layout.IsScalar(operand) || (whole_rows && layout.strides[operand][0] == 0)) {
      access = Access::kScalar;
    } else {
      access = layout.strides[operand][0] == 1 ? Access::kShifted : Access::kGather;
      shifted += access == Access::kShifted;
      gathers = true;
    }
  }
  // A vector that is gathered may lie in two rows, but not in three.
  const bool elements =
      !vectors || (gathers && layout.sizes[0] < kWidth) || (sizeof(T) == 4 && shifted == kInputs);
  if constexpr (sizeof(T) < 8) {
    if (!elements) {
      // One input alone has few enough registers for both.
      if (gathers || kInputs == 1)
        return LaunchStridedKernel<kWidth, true, kStridedThreads, kStridedLoads>(
            call, functor, layout, out, in, accesses);
      if constexpr (kInputs > 1)
        return LaunchStridedKernel<kWidth, false, kStridedThreads, kStridedLoads>(
            call, functor, layout, out, in, accesses);
    }
  }
  return LaunchStridedKernel<1, false, kStridedThreads, kStridedElements<T>>(call, functor, layout,
                                                                             out, in, accesses);
}

template <class F, class T, int kOutputs, int kInputs>
Status LaunchStrided(const Call& call, const F& functor, const Outputs<T, kOutputs>& out,
                     const Inputs<T, kInputs>& in) {
  const auto layout = MakeLayout<kOutputs, kInputs>(call);
  // Tensors that have strides may still be flat: a range of whole rows, for example.
  if (layout.IsFlat() && AreAligned(in) && AreAligned(out))
    return LaunchFlat(call, functor, out, in);
  return LaunchLayout(call, functor, layout, out, in);
}

}  // namespace twinop::elementwise
