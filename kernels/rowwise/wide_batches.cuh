// Wide rows whose elements are read again for each phase: how a thread reads its part of a slice, a
// batch of vectors at a time.
#pragma once

#include <cstdint>

#include "kernels/rowwise/wide_pipeline.cuh"

namespace twinop::rowwise {

// kBatch: vectors of a thread.
template <class F, class S, class W, Source kSource, int kBatch>
class WideBatches
    : protected WideSlices<F, S, W, kSource == Source::kRing ? Ring::kWhole : Ring::kNone> {
 public:
  using Base = WideSlices<F, S, W, kSource == Source::kRing ? Ring::kWhole : Ring::kNone>;
  using typename Base::Storage;
  using typename Base::T;
  static constexpr int kWidth = Base::kWidth;
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kHeld = Base::kHeld;
  static constexpr int kColumns = Base::kColumns;

  using Base::Base;

  static std::int64_t SharedBytes(const WideSettings& settings, std::int64_t columns) {
    const std::int64_t slice = SliceVectors(columns, kWidth, settings.cluster) * kWidth;
    return Base::RingBytes(settings, slice) + settings.groups * RoomBytes(settings.threads);
  }
  // For each group: a batch of a misaligned row.
  static constexpr __host__ __device__ int RoomBytes(int threads) {
    if (kSource != Source::kMisaligned) return 0;
    return Stretch<S>::RoomVectors(kBatch * threads) * kVectorBytes;
  }

 protected:
  using Base::arguments_, Base::thread_, Base::threads_, Base::group_;
  using Base::begin_, Base::length_, Base::ring_;

  // This thread's vectors of the slice, kBatch at a time, all of them loaded before the first is
  // used.
  struct Batch {
    Vector<S, kWidth> row[kHeld][kBatch];
    Vector<W, kWidth> columns[kColumns + 1][kBatch];
  };

  // body(first, whole): the first of the batch's vectors, and whether all threads have all of them.
  // Every thread of a warp takes part in every batch.
  template <class Body>
  __device__ __forceinline__ void ForEachBatch(const Body& body) const {
    const std::int64_t vectors = (length_ + kWidth - 1) / kWidth;
    const int batch = kBatch * threads_;
    std::int64_t start = 0;
    if (kSource != Source::kMisaligned)
      for (; start + batch <= vectors; start += batch) body(start + thread_, std::true_type{});
    for (; start < vectors; start += batch) body(start + thread_, std::false_type{});
  }

  // The same for the batch that starts at this vector of the slice, if there is one.
  template <class Body>
  __device__ __forceinline__ void AtBatch(int start, const Body& body) const {
    const int vectors = static_cast<int>((length_ + kWidth - 1) / kWidth);
    if (kSource != Source::kMisaligned && start + kBatch * threads_ <= vectors) {
      body(start + thread_, std::true_type{});
    } else if (start < vectors) {
      body(start + thread_, std::false_type{});
    }
  }

  // Elements of the slice from the batch's b-th vector on.
  __device__ __forceinline__ std::int64_t Left(std::int64_t first, int b) const {
    return length_ - (first + b * threads_) * kWidth;
  }

  template <bool kWhole, class U>
  __device__ __forceinline__ void Load(const U* slice, std::int64_t first,
                                       Vector<U, kWidth> (&vectors)[kBatch]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const U* const place = slice + (first + b * threads_) * kWidth;
      if constexpr (kSource == Source::kMisaligned) {
        LoadAnywhere(place, static_cast<int>(min(Left(first, b), std::int64_t{kWidth})),
                     &vectors[b]);
      } else if (kWhole || Left(first, b) > 0) {
        LoadAligned(place, &vectors[b]);
      }
    }
  }

  // The batch's part of a misaligned row, in this group's share of shared memory. To be loaded, it
  // goes on for `ahead` elements: the last owned vector ends in the aligned one behind the batch.
  __device__ __forceinline__ Stretch<S> InRoom(const S* slice, std::int64_t first,
                                               int ahead) const {
    const std::int64_t left = length_ - (first - thread_) * kWidth;
    const int batch = kBatch * threads_ * kWidth;
    return {slice + (first - thread_) * kWidth,
            static_cast<int>(min(left, std::int64_t{batch + ahead})),
            thread_,
            threads_,
            left >= batch + kWidth,
            ring_ + group_ * RoomBytes(threads_)};
  }

  __device__ __forceinline__ void LoadMisaligned(std::int64_t row, std::int64_t first,
                                                 Batch* batch) const {
    Pieces<S, kBatch> pieces[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) InRoom(Base::Input(j, row), first, kWidth).Load(&pieces[j]);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const Stretch<S> stretch = InRoom(Base::Input(j, row), first, kWidth);
      Base::SyncGroup();
      stretch.Put(pieces[j]);
      Base::SyncGroup();
      stretch.Get(&pieces[j]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) batch->row[j][b] = pieces[j].vectors[b];
    }
  }

  template <bool kWhole, bool kWithColumns>
  __device__ __forceinline__ Batch LoadBatch(std::int64_t row, int stage,
                                             std::int64_t first) const {
    Batch batch = {};
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if constexpr (kSource == Source::kRing) {
        Load<kWhole>(static_cast<const S*>(Base::Stage(stage, j)), first, batch.row[j]);
      } else if constexpr (kSource == Source::kAligned) {
        Load<kWhole>(Base::Input(j, row), first, batch.row[j]);
      }
    }
    if constexpr (kSource == Source::kMisaligned) LoadMisaligned(row, first, &batch);
    if constexpr (kWithColumns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const W* const column = arguments_.columns[c];
        if (column == nullptr) continue;
        if constexpr (kSource == Source::kRing) {
          Load<kWhole>(static_cast<const W*>(Base::Column(c)), first, batch.columns[c]);
        } else {
          Load<kWhole>(column + begin_, first, batch.columns[c]);
        }
      }
    }
    return batch;
  }

  // The values of the batch's b-th vector as the phases before kPhase leave them, and of the
  // columns.
  struct VectorValues {
    Values<T, kInputs> row[kWidth];
    Values<T, kColumns> columns[kWidth];
  };

  template <int kPhase>
  __device__ __forceinline__ VectorValues Read(const F& functor, const Batch& batch, int b) const {
    VectorValues values;
    T unpacked[kWidth];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      Unpack(batch.row[j][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = unpacked[i];
    }
#pragma unroll
    for (int j = kHeld; j < kInputs; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = T(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Unpack(batch.columns[c][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values.columns[i][c] =
            arguments_.columns[c] != nullptr ? unpacked[i] : T(functor.Neutral(c));
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) Replay<kPhase, S>(functor, values.row[i], values.columns[i]);
    return values;
  }
};

}  // namespace twinop::rowwise
