// Wide rows on sm_90, with a slice of each in the registers of a group of threads: a stage of the
// pipeline is read once, and filled again while the slice is reduced and written.
#pragma once

#include "twinop/primitives/realigner.cuh"
#include "twinop/rowwise/cluster_pipeline.cuh"

namespace twinop::rowwise {

// kVectors is the number of vectors of a thread, for each input.
template <class F, class S, class W, bool kAligned, int kVectors>
class ResidentSlices : RowSlices<F, S, W, kAligned ? Pipeline::kAligned : Pipeline::kUnaligned> {
  using Base = RowSlices<F, S, W, kAligned ? Pipeline::kAligned : Pipeline::kUnaligned>;
  using Base::arguments_, Base::settings_, Base::thread_, Base::threads_, Base::length_;

 public:
  using typename Base::Storage;
  using typename Base::T;
  static constexpr int kWidth = Base::kWidth;
  static constexpr int kResident = Base::kResident;
  static_assert(F::kEpilogueInputs == 0 && kTraitsOf<F, S, W>.IsPlain());

  __device__ ResidentSlices(const F& functor, const Arguments<F, S, W>& arguments,
                            const ClusterSettings& settings, const L2ReadPolicy& reads,
                            Storage* storage, unsigned char* memory)
      : Base(arguments, settings, reads, storage, memory),
        functor_(functor),
        vectors_(static_cast<int>((length_ + kWidth - 1) / kWidth)),
        whole_((Index(kVectors - 1) / 32 * 32 + (kAligned ? 32 : 33)) * kWidth <= length_),
        shared_(reinterpret_cast<unsigned char*>(Base::StageOf(settings.groups, 0, 0)) +
                Base::group_ * Realigner<S>::SharedVectors(kVectors * threads_) * kVectorBytes) {}

  __device__ __forceinline__ void Run(F*, Compute<S>*) {
    Base::Begin();
    PipelineState state;
    for (std::int64_t row = Base::first_row_; row < arguments_.rows.count;
         row += Base::row_stride_) {
      Row(row, state);
      state.Advance(settings_.stages);
    }
    Base::End();
  }

 private:
  using RowValues = Values<T, kResident>[kVectors][kWidth];

  // The index of this thread's k-th vector in the slice, and the elements of the slice from there
  // on.
  __device__ __forceinline__ int Index(int k) const { return k * threads_ + thread_; }
  __device__ __forceinline__ int Remaining(int k) const {
    return static_cast<int>(length_) - Index(k) * kWidth;
  }

  // Calls body(k, whole) for each vector that this thread may have. `whole` says that all vectors
  // exist and all their elements are the slice's, as in most warps; it spares comparisons. The
  // other warps compute vectors that nobody uses, because branches would make each vector wait for
  // the one before it.
  template <class Body>
  __device__ __forceinline__ void ForEachVector(const Body& body) const {
    if (whole_) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) body(k, std::true_type{});
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) body(k, std::false_type{});
    }
  }

  __device__ __forceinline__ void Row(std::int64_t row, const PipelineState& state) {
    // Hides that these are the same for each row: the compiler would keep what it derives from
    // them.
    if constexpr (!kAligned) asm volatile("" : "+r"(thread_), "+r"(threads_));
    F functor = functor_;
    RowValues values;
    Base::WaitForStage(state);
    Load(row, state.stage, values);
    ReducePhase<0>(&functor, values, state, [&] {
      // All threads of the group have read the stage.
      if (thread_ == Base::Producer())
        Base::Produce(row + settings_.stages * Base::row_stride_, state.stage);
    });
    if constexpr (Base::kPhaseCount > 1) ReducePhase<1>(&functor, values, state, [] {});
    static_assert(Base::kPhaseCount <= 2);
    Write(functor, values, row);
  }

  __device__ __forceinline__ void Load(std::int64_t row, int stage, RowValues& values) const {
    if constexpr (kAligned) {
      ForEachVector([&](int k, auto whole) {
#pragma unroll
        for (int j = 0; j < kResident; ++j) {
          Vector<S, kWidth> vector;
          LoadAligned(Base::Stage(stage, j) + Place<whole>(k), &vector);
          SetValues(vector, j, values[k]);
        }
      });
    } else {
#pragma unroll
      for (int j = 0; j < kResident; ++j) LoadAnywhere(j, row, stage, values);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) Replay<0, S>(functor_, values[k][i], Values<T, 0>{});
  }
  // The vector's place in the slice; any other place if the vector does not exist.
  template <bool kWhole>
  __device__ __forceinline__ int Place(int k) const {
    return (kWhole ? Index(k) : max(min(Index(k), vectors_ - 1), 0)) * kWidth;
  }
  __device__ __forceinline__ static void SetValues(const Vector<S, kWidth>& vector, int j,
                                                   Values<T, kResident> (&values)[kWidth]) {
    T unpacked[kWidth];
    Unpack(vector, unpacked);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i][j] = unpacked[i];
  }

  // Each vector is the end of one aligned vector and the beginning of the next. What lies behind
  // the slice is not used.
  __device__ __forceinline__ void LoadAnywhere(int j, std::int64_t row, int stage,
                                               RowValues& values) const {
    const S* const slice = Base::Stage(stage, j) + thread_ * kWidth;
    Realigner<S>::WithShift(Base::PastAligned(Base::Input(j, row)), [&](auto words, int bits) {
      const S* place = slice;
#pragma unroll
      for (int k = 0; k < kVectors; ++k, place += threads_ * kWidth) {
        Vector<S, kWidth> low, high;
        LoadAligned(place, &low);
        LoadAligned(place + kWidth, &high);
        SetValues(Realigner<S>::template Shifted<words>(low, high, bits), j, values[k]);
      }
    });
  }

  template <int kPhase, class Between>
  __device__ __forceinline__ void ReducePhase(F* functor, RowValues& values,
                                              const PipelineState& state,
                                              const Between& between) const {
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<F::Phases::At(kPhase), Total, kWidth> totals;
    ForEachVector([&](int k, auto whole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto term = functor->Term(Phase<kPhase>{}, values[k][i], Values<T, 0>{});
        if (whole || (kAligned ? Index(k) < vectors_ : i < Remaining(k))) totals.Add(i, term);
      }
    });
    functor->Finish(Phase<kPhase>{}, Base::template Reduce<kPhase>(totals.Sum(), state, between));
  }

  __device__ __forceinline__ void Write(const F& functor, const RowValues& values,
                                        std::int64_t row) const {
    if constexpr (kAligned) {
      ForEachVector([&](int k, auto whole) {
        T out[F::kRowOutputs][kWidth];
        Results(functor, values, k, out);
#pragma unroll
        for (int o = 0; o < F::kRowOutputs; ++o)
          if (arguments_.outputs[o] != nullptr && (whole || Index(k) < vectors_))
            StoreAligned(Pack<S>(out[o]), Base::Output(o, row) + Index(k) * kWidth);
      });
    } else {
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o) {
        if (arguments_.outputs[o] == nullptr) continue;
        Vector<S, kWidth> results[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          T out[F::kRowOutputs][kWidth];
          Results(functor, values, k, out);
          results[k] = Pack<S>(out[o]);
        }
        S* const slice = Base::Output(o, row);
        const Realigner<S> realigner(slice, static_cast<int>(length_), thread_, threads_, whole_,
                                     shared_);
        if (o > 0) Base::SyncGroup();  // the reductions were barriers
        realigner.PutOwned(results);
        Base::SyncGroup();
        realigner.Store(results, slice);
      }
    }
  }

  __device__ __forceinline__ static void Results(const F& functor, const RowValues& values, int k,
                                                 T (&out)[F::kRowOutputs][kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto result = functor.Result(values[k][i], Values<T, 0>{});
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o) out[o][i] = result[o];
    }
  }

  const F& functor_;
  const int vectors_;  // of the slice
  const bool whole_;   // this warp's vectors and, if misaligned, the one behind them
  unsigned char* const shared_;
};

}  // namespace twinop::rowwise
