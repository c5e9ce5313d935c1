// Moves a part of a row that may start at any element, through aligned vectors and shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "twinop/primitives/vector.cuh"

namespace twinop {

// What a thread moves: aligned vectors, and an element before the first and behind the last of
// them.
template <class T, int kVectors>
struct MovedVectors {
  Vector<T, kVectorBytes / sizeof(T)> vectors[kVectors];
  T head, tail;
};

// Global memory is accessed by aligned vectors, and by single elements at both ends. Each thread
// owns vectors counted from the first element, the i-th vector belongs to thread i % threads: the
// alignment changes only the accesses, never which thread adds what. An owned vector is the end of
// one aligned vector and the beginning of the next. A thread has one of the two itself; the other
// comes from its neighbour through shared memory, in accesses of whole vectors without bank
// conflicts. (docs/tuning.md compares this with two loads a vector.)
template <class T>
class Realigner {
 public:
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  using Aligned = Vector<T, kWidth>;

  // Vectors of shared memory that this many owned vectors need.
  static constexpr int SharedVectors(int vectors) { return vectors + 2; }

  // `count` elements from `start` on, shared by `threads` threads. `whole`: the thread owns
  // kVectors whole vectors, and another one follows its last. Most threads do; it saves them a
  // comparison for each access.
  __device__ __forceinline__ Realigner(const T* start, int count, int thread, int threads,
                                       bool whole, unsigned char* shared)
      : start_(start),
        count_(count),
        thread_(thread),
        threads_(threads),
        whole_(whole),
        shared_(reinterpret_cast<Aligned*>(shared) + thread) {
    const auto past = static_cast<int>(reinterpret_cast<std::uintptr_t>(start) % kVectorBytes);
    before_ = past == 0 ? 0 : kWidth - past / static_cast<int>(sizeof(T));
    head_ = min(before_, count);
    vectors_ = (count - head_) / kWidth;
    tail_ = head_ + static_cast<int>(vectors_) * kWidth;
  }

  template <int kVectors>
  __device__ __forceinline__ void Load(MovedVectors<T, kVectors>* pieces) const {
    ForEnds([&](int i) { pieces->head = start_[i]; }, [&](int i) { pieces->tail = start_[i]; });
    const auto* const first = reinterpret_cast<const Aligned*>(start_ + before_);
#pragma unroll  // without a branch for `whole`: each branch would wait for its own loads
    for (int k = 0; k < kVectors; ++k)
      if (Index(k) < vectors_) pieces->vectors[k] = first[Index(k)];
  }

  // Puts the loaded vectors into shared memory. Behind a barrier, Get turns them into the owned
  // ones.
  template <int kVectors>
  __device__ __forceinline__ void Put(const MovedVectors<T, kVectors>& pieces) const {
    // Aligned vectors lie from the second place on, the elements before them at the end of the
    // first.
    ForEachAligned<kVectors>([&](int k) { shared_[k * threads_ + 1] = pieces.vectors[k]; });
    T* const elements = reinterpret_cast<T*>(shared_ - thread_ + 1) - before_;
    ForEnds([&](int i) { elements[i] = pieces.head; }, [&](int i) { elements[i] = pieces.tail; });
  }
  template <int kVectors>
  __device__ __forceinline__ void Get(MovedVectors<T, kVectors>* pieces) const {
    if (!whole_) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        if (Index(k) >= vectors_) pieces->vectors[k] = shared_[k * threads_ + 1];
    }
    WithShift(kWidth - before_, [&](auto words, int bits) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        pieces->vectors[k] = Shifted<words>(shared_[k * threads_], pieces->vectors[k], bits);
    });
  }

  // The way back: PutOwned and, behind a barrier, Store.
  template <int kVectors>
  __device__ __forceinline__ void PutOwned(const Aligned (&owned)[kVectors]) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) shared_[k * threads_] = owned[k];
  }
  template <int kVectors>
  __device__ __forceinline__ void Store(Aligned (&owned)[kVectors], T* start) const {
    WithShift(before_, [&](auto words, int bits) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        owned[k] = Shifted<words>(owned[k], shared_[k * threads_ + 1], bits);
    });
    auto* const first = reinterpret_cast<uint4*>(start + before_);
    ForEachAligned<kVectors>([&](int k) { StoreAligned(owned[k], &first[Index(k)]); });
    const T* const elements = reinterpret_cast<const T*>(shared_ - thread_);
    ForEnds([&](int i) { start[i] = elements[i]; }, [&](int i) { start[i] = elements[i]; });
  }

  // The vector `kWords` words and `bits` bits behind the start of `low`; `high` follows it.
  template <int kWords>
  __device__ __forceinline__ static Aligned Shifted(const Aligned& low, const Aligned& high,
                                                    int bits) {
    std::uint32_t words[8];
    Aligned vector;
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = low.words[w], words[4 + w] = high.words[w];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      vector.words[w] = sizeof(T) == 2 && kWords < 4
                            ? __funnelshift_r(words[w + kWords], words[w + kWords + 1], bits)
                            : words[w + kWords];
    return vector;
  }

  // Calls body(words, bits) for a shift by some elements. The words are a constant, so that they
  // cost no instruction. All threads of the realigner branch the same way.
  template <class Body>
  __device__ __forceinline__ static void WithShift(int elements, const Body& body) {
    const int bytes = elements * static_cast<int>(sizeof(T));
    const int bits = bytes % 4 * 8;
    switch (bytes / 4) {
      case 0:
        return body(std::integral_constant<int, 0>{}, bits);
      case 1:
        return body(std::integral_constant<int, 1>{}, bits);
      case 2:
        return body(std::integral_constant<int, 2>{}, bits);
      case 3:
        return body(std::integral_constant<int, 3>{}, bits);
      default:
        return body(std::integral_constant<int, 4>{}, bits);
    }
  }

 private:
  // This thread's k-th vector. Unsigned, because an address from it is then one instruction.
  __device__ __forceinline__ std::uint32_t Index(int k) const { return k * threads_ + thread_; }

  template <int kVectors, class Body>
  __device__ __forceinline__ void ForEachAligned(const Body& body) const {
    if (whole_) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) body(k);
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        if (Index(k) < vectors_) body(k);
    }
  }
  // The first threads take the elements before and behind the aligned vectors.
  template <class Head, class Tail>
  __device__ __forceinline__ void ForEnds(const Head& head, const Tail& tail) const {
    if (thread_ >= kWidth) return;
    if (thread_ < head_) head(thread_);
    if (tail_ + thread_ < count_) tail(tail_ + thread_);
  }

  const T* start_;
  int count_, thread_, threads_;
  bool whole_;
  int before_;             // elements from the start to an aligned place
  int head_;               // those of them that exist
  std::uint32_t vectors_;  // aligned ones
  int tail_;               // where the elements behind them begin
  Aligned* shared_;        // from this thread's place on
};

}  // namespace twinop
