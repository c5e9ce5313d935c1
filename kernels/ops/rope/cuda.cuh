// rope on CUDA: q and k in one kernel, at memory bandwidth.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/ops/rope/params.h"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/vector.cuh"

namespace twinop::rope {

// kWidth pairs of a head, in the compute type.
template <class Number, int kWidth>
struct Pairs {
  Number a[kWidth], b[kWidth];
};

template <class T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> LoadVector(const T* memory) {
  Vector<T, kWidth> vector;
  LoadAligned(memory, &vector);
  return vector;
}

template <class T, int kWidth>
__device__ __forceinline__ void StoreVector(const Vector<T, kWidth>& vector, T* memory) {
  if constexpr (kWidth == 1) {
    *memory = vector.values[0];
  } else {
    StoreAligned(vector, memory);
  }
}
template <class T, int kWidth>
__device__ __forceinline__ void StoreVector(const Compute<T> (&numbers)[kWidth], T* memory) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    T rounded;
    Round(numbers[i], &rounded);
    vector.Append(i, rounded);
  }
  StoreVector(vector, memory);
}

// Loads the kWidth pairs from chunk * kWidth on. A pair is the i-th element of a head and the one
// `distance` after it in layout "half", two neighbours in "interleaved".
template <bool kInterleaved, int kWidth, class T>
__device__ __forceinline__ auto LoadPairs(const T* head, std::int64_t chunk,
                                          std::int64_t distance) {
  const T* const first = head + chunk * kWidth * (kInterleaved ? 2 : 1);
  const auto low = LoadVector<T, kWidth>(first);
  const auto high = LoadVector<T, kWidth>(first + (kInterleaved ? kWidth : distance));
  Pairs<Compute<T>, kWidth> found;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (!kInterleaved || kWidth == 1) {
      found.a[i] = ComputeAt(low, i);
      found.b[i] = ComputeAt(high, i);
    } else {
      const auto& half = i < kWidth / 2 ? low : high;
      found.a[i] = ComputeAt(half, 2 * i % kWidth);
      found.b[i] = ComputeAt(half, 2 * i % kWidth + 1);
    }
  }
  return found;
}

template <bool kInterleaved, int kWidth, class T>
__device__ __forceinline__ void StorePairs(const Pairs<Compute<T>, kWidth>& pairs,
                                           std::int64_t chunk, std::int64_t distance, T* head) {
  T* const first = head + chunk * kWidth * (kInterleaved ? 2 : 1);
  Compute<T> low[kWidth], high[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (!kInterleaved || kWidth == 1) {
      low[i] = pairs.a[i];
      high[i] = pairs.b[i];
    } else {
      auto& half = i < kWidth / 2 ? low : high;
      half[2 * i % kWidth] = pairs.a[i];
      half[2 * i % kWidth + 1] = pairs.b[i];
    }
  }
  StoreVector<T, kWidth>(low, first);
  StoreVector<T, kWidth>(high, first + (kInterleaved ? kWidth : distance));
}

// threadIdx.z is a token, threadIdx.y a head (those of q and then those of k), and threadIdx.x a
// chunk of the head.
template <class T, class Table, int kWidth, bool kInterleaved>
static __global__ void RopeKernel(RopeParams p, const T* q, const T* k, const Table* cos,
                                  const Table* sin, T* turned_q, T* turned_k) {
  using Number = Compute<T>;
  PdlTriggerAndWait();
  const std::int64_t token =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.z + static_cast<std::int64_t>(threadIdx.z);
  if (token >= p.tokens) return;
  const std::int64_t row = TableRow(p, token) * p.pairs;
  for (std::int64_t chunk = threadIdx.x; chunk < p.pairs / kWidth; chunk += blockDim.x) {
    const auto coses = LoadVector<Table, kWidth>(cos + row + chunk * kWidth);
    const auto sines = LoadVector<Table, kWidth>(sin + row + chunk * kWidth);
    for (std::int64_t i = threadIdx.y; i < p.q_heads + p.k_heads; i += blockDim.y) {
      const bool of_q = i < p.q_heads;
      const std::int64_t at =
          (of_q ? token * p.q_heads + i : token * p.k_heads + i - p.q_heads) * p.head_size;
      auto pairs = LoadPairs<kInterleaved, kWidth>((of_q ? q : k) + at, chunk, p.pairs);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Number angle_sin = Number(ComputeAt(sines, j));
        ApplyRope(Number(ComputeAt(coses, j)), p.is_inverse ? -angle_sin : angle_sin, &pairs.a[j],
                  &pairs.b[j]);
      }
      StorePairs<kInterleaved, kWidth>(pairs, chunk, p.pairs, (of_q ? turned_q : turned_k) + at);
    }
  }
  // Copies the elements that are not rotated. They may be in place already.
  for (std::int64_t n = 2 * p.pairs + threadIdx.x * kWidth; n < p.head_size;
       n += blockDim.x * kWidth) {
    for (std::int64_t i = threadIdx.y; i < p.q_heads + p.k_heads; i += blockDim.y) {
      const bool of_q = i < p.q_heads;
      const std::int64_t at =
          (of_q ? token * p.q_heads + i : token * p.k_heads + i - p.q_heads) * p.head_size + n;
      const auto numbers = LoadVector<T, kWidth>((of_q ? q : k) + at);
      StoreVector(numbers, (of_q ? turned_q : turned_k) + at);
    }
  }
}

template <class T, class Table, int kWidth, bool kInterleaved, class Op>
Status Launch(const CallOf<Op>& call, const RopeParams& p) {
  constexpr std::int64_t kThreads = 128, kHeadsPerThread = 4;
  const std::int64_t heads = p.q_heads + p.k_heads;
  const std::int64_t x = std::min<std::int64_t>(p.pairs / kWidth, 32);
  const std::int64_t y =
      std::min(kThreads / x, std::max<std::int64_t>(heads / kHeadsPerThread, std::int64_t{1}));
  const std::int64_t z = std::clamp<std::int64_t>(kThreads / (x * y), 1, 64);  // CUDA's limit
  const Grid grid{(p.tokens + z - 1) / z, dim3(static_cast<unsigned>(x), static_cast<unsigned>(y),
                                               static_cast<unsigned>(z))};
  return LaunchKernel(RopeKernel<T, Table, kWidth, kInterleaved>, WithPdl(grid), call, p,
                      InputData<T>(call, "q"_name), InputData<T>(call, "k"_name),
                      InputData<Table>(call, "cos"_name), InputData<Table>(call, "sin"_name),
                      OutputData<T>(call, "turned_q"_name), OutputData<T>(call, "turned_k"_name));
}

template <class Op>
Status Run(const CallOf<Op>& call) {
  RopeParams p;
  TWINOP_RETURN_IF_ERROR(ParamsOf(call, &p));
  if (p.tokens == 0 || p.q_heads + p.k_heads == 0) return {};
  bool aligned = true;
  for (std::size_t i = 0; i < 4; ++i) aligned = aligned && IsAligned(call.inputs[i].data, 16);
  for (std::size_t i = 0; i < 2; ++i) aligned = aligned && IsAligned(call.outputs[i].data, 16);
  return DispatchTypes(call, [&](auto type, auto table) {
    using T = typename decltype(type)::Type;
    using Table = typename decltype(table)::Type;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const bool wide = aligned && p.pairs % kWidth == 0 && p.head_size % kWidth == 0;
    if (p.is_interleaved)
      return wide ? Launch<T, Table, kWidth, true>(call, p) : Launch<T, Table, 1, true>(call, p);
    return wide ? Launch<T, Table, kWidth, false>(call, p) : Launch<T, Table, 1, false>(call, p);
  });
}

}  // namespace twinop::rope
