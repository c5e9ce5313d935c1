// Register-resident rows: column sums on the way.
#pragma once

#include <cstdint>

#include "twinop/rowwise/resident_access.cuh"

namespace twinop::rowwise {

// What one thread adds up for the columns that it has of every row.
template <class Traits>
class ResidentColumnSums {
 public:
  using Access = ResidentAccess<Traits>;
  using F = typename Traits::F;
  using S = typename Traits::S;
  static constexpr int kLanes = Traits::kLanes;
  static constexpr int kVectors = Traits::kVectors;
  using Sum = Compute<S>;
  using T = ElementCompute<S>;
  static constexpr int kWidth = Access::kWidth;
  static constexpr int kSums = F::kColumnSums;
  static_assert(kSums == 0 || Access::kLaneStride == 1);  // a vector is of neighbouring columns

  template <class Term>
  __device__ __forceinline__ void Add(int k, int i, const Term& term) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums_[s][k][i] = Plain(WithTerm(T(sums_[s][k][i]), term, s));
  }

  // Writes partials[sum][block][column]. The groups of a block first add theirs up, one after the
  // other.
  __device__ __forceinline__ void Write(const Access& access, std::int64_t columns,
                                        Sum* partials) const {
    if constexpr (kLanes > 0) {
      __shared__ Sum shared[kSums][kLanes * kVectors * kWidth];
      for (int g = 0; g < Access::kGroups; ++g) {
        if (g == access.Group())
          Put(access, g > 0, [&](int s, int column) { return &shared[s][column]; });
        __syncthreads();
      }
      for (int s = 0; s < kSums; ++s)
        for (int c = threadIdx.x; c < columns; c += kGroupThreads)
          partials[(s * gridDim.x + blockIdx.x) * columns + c] = shared[s][c];
    } else {
      Put(access, false, [&](int s, int column) {
        return &partials[(s * gridDim.x + blockIdx.x) * columns + column];
      });
    }
  }

 private:
  template <class Place>
  __device__ __forceinline__ void Put(const Access& access, bool to_others,
                                      const Place& place) const {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (access.Left(k) <= i) continue;
          Sum* const sum = place(s, access.Column(k) + i);
          *sum = to_others ? *sum + sums_[s][k][i] : sums_[s][k][i];
        }
  }

  Sum sums_[kSums + 1][kVectors][kWidth] = {};
};

}  // namespace twinop::rowwise
