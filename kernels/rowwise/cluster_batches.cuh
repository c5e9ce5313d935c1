// How a thread reads its part of a slice again for each phase: a batch of vectors at a time.
#pragma once

#include <cstdint>

#include "twinop/rowwise/cluster_pipeline.cuh"

namespace twinop::rowwise {

// kBatch is the number of vectors of a thread in a batch.
template <class F, class S, class W, Source kSource, int kBatch>
class SliceBatches
    : protected RowSlices<F, S, W,
                          kSource == Source::kPipeline ? Pipeline::kAligned : Pipeline::kNone> {
 public:
  using Base =
      RowSlices<F, S, W, kSource == Source::kPipeline ? Pipeline::kAligned : Pipeline::kNone>;
  using typename Base::Storage;
  using typename Base::T;
  static constexpr int kWidth = Base::kWidth;
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kResident = Base::kResident;
  static constexpr int kColumns = Base::kColumns;

  using Base::Base;

  static std::int64_t SharedBytes(const ClusterSettings& settings, std::int64_t columns) {
    return Base::PipelineBytes(settings, SliceVectors(columns, kWidth, settings.cluster) * kWidth);
  }

 protected:
  using Base::arguments_, Base::thread_, Base::threads_, Base::group_;
  using Base::begin_, Base::length_;

  // This thread's vectors of the slice, kBatch at a time. All of them are loaded before the first
  // use.
  struct Batch {
    Vector<S, kWidth> row[kResident][kBatch];
    Vector<W, kWidth> columns[kColumns + 1][kBatch];
  };

  // Calls body(first, whole) for each batch: the first of its vectors, and whether all threads have
  // all of them. Every thread of a warp takes part in every batch. Batches from global memory are
  // never `whole`: code for both cases would be twice as large.
  template <class Body>
  __device__ __forceinline__ void ForEachBatch(const Body& body) const {
    const std::int64_t vectors = (length_ + kWidth - 1) / kWidth;
    const int batch = kBatch * threads_;
    std::int64_t start = 0;
    if constexpr (kSource == Source::kPipeline)
      for (; start + batch <= vectors; start += batch) body(start + thread_, std::true_type{});
    for (; start < vectors; start += batch) body(start + thread_, std::false_type{});
  }

  // Does the same for the one batch that starts at this vector of a slice in the pipeline.
  template <class Body>
  __device__ __forceinline__ void AtBatch(int start, const Body& body) const {
    static_assert(kSource == Source::kPipeline);
    const int vectors = static_cast<int>((length_ + kWidth - 1) / kWidth);
    if (start + kBatch * threads_ <= vectors) {
      body(start + thread_, std::true_type{});
    } else if (start < vectors) {
      body(start + thread_, std::false_type{});
    }
  }

  // Elements of the slice from the batch's b-th vector on.
  __device__ __forceinline__ std::int64_t Left(std::int64_t first, int b) const {
    return length_ - (first + b * threads_) * kWidth;
  }

  template <class U>
  __device__ __forceinline__ static bool IsAligned(const U* slice) {
    return reinterpret_cast<std::uintptr_t>(slice) % alignof(Vector<U, kWidth>) == 0;
  }

  // Loads a batch of a slice that may start at any element. Each branch surrounds all loads of the
  // batch: behind a branch of its own, a load would wait for the one before it.
  template <bool kWhole, class U>
  __device__ __forceinline__ void Load(const U* slice, std::int64_t first,
                                       Vector<U, kWidth> (&vectors)[kBatch]) const {
    const auto place = [&](int b) { return slice + (first + b * threads_) * kWidth; };
    if constexpr (kSource == Source::kPipeline) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (kWhole || Left(first, b) > 0) LoadAligned(place(b), &vectors[b]);
      return;
    }
    const std::int64_t left = Left(first, kBatch - 1);
    if (kBatch > 1 && left >= kWidth && IsAligned(slice)) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) LoadAligned(place(b), &vectors[b]);
      return;
    }
    if constexpr (sizeof(Vector<U, kWidth>) == kVectorBytes && sizeof(U) < 8) {
      // The slice has a vector on both sides, so the aligned vectors belong to it.
      if (first > 0 && left >= 2 * kWidth && !IsAligned(slice)) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) vectors[b] = LoadShifted<Vector<U, kWidth>>(place(b));
        return;
      }
    }
    LoadAnywhere(slice, first, vectors);
  }
  template <class U>
  __device__ __forceinline__ void LoadAnywhere(const U* slice, std::int64_t first,
                                               Vector<U, kWidth> (&vectors)[kBatch]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      twinop::LoadAnywhere(slice + (first + b * threads_) * kWidth,
                           static_cast<int>(min(Left(first, b), std::int64_t{kWidth})),
                           &vectors[b]);
  }

  template <bool kWhole>
  __device__ __forceinline__ void Store(const Vector<S, kWidth>& vector, S* slice,
                                        std::int64_t first, int b) const {
    S* const place = slice + (first + b * threads_) * kWidth;
    if constexpr (kSource == Source::kPipeline) {
      if (kWhole || Left(first, b) > 0) StoreAligned(vector, place);
    } else if (Left(first, b) >= kWidth && IsAligned(slice)) {
      StoreAligned(vector, place);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i < Left(first, b)) place[i] = vector.Get(i);
    }
  }

  template <bool kWhole, bool kWithColumns>
  __device__ __forceinline__ Batch LoadBatch(std::int64_t row, int stage,
                                             std::int64_t first) const {
    Batch batch = {};
#pragma unroll
    for (int j = 0; j < kResident; ++j) {
      if constexpr (kSource == Source::kPipeline) {
        Load<kWhole>(static_cast<const S*>(Base::Stage(stage, j)), first, batch.row[j]);
      } else {
        Load<kWhole>(Base::Input(j, row), first, batch.row[j]);
      }
    }
    if constexpr (kWithColumns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const W* const column = arguments_.Column(c, row);
        if (column == nullptr) continue;
        if constexpr (kSource == Source::kPipeline) {
          Load<kWhole>(static_cast<const W*>(Base::Column(c)), first, batch.columns[c]);
        } else {
          LoadAnywhere(column + begin_, first, batch.columns[c]);
        }
      }
    }
    return batch;
  }

  // The values of the batch's b-th vector as the phases before kPhase leave them, and those of the
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
    for (int j = 0; j < kResident; ++j) {
      Unpack(batch.row[j][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = unpacked[i];
    }
#pragma unroll
    for (int j = kResident; j < kInputs; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = T(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Unpack(batch.columns[c][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values.columns[i][c] =
            arguments_.columns[c] != nullptr ? unpacked[i] : T(functor.ColumnDefault(c));
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) Replay<kPhase, S>(functor, values.row[i], values.columns[i]);
    return values;
  }
};

}  // namespace twinop::rowwise
