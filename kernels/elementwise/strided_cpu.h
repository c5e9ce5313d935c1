// Elementwise ops on the CPU where the tensors are not one flat sequence: in pieces that stay in
// the first-level cache. An operand that is not dense there is copied through a buffer, so that the
// arithmetic is the flat path's, vectorised whatever the strides are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elementwise/cpu.h"
#include "kernels/elementwise/strided.h"
#include "kernels/primitives/cpu_features.h"

namespace twinop::elementwise {

template <class T>
inline constexpr std::int64_t kPiece = 4096 / sizeof(T);

// Rows below this length are not worth a piece of their own: a piece then goes on in the next row.
inline constexpr std::int64_t kShortRow = 256;

// Runs below this length are copied by a loop: a call of memcpy takes longer.
inline constexpr std::int64_t kShortRun = 16;

// A place in the call's order of elements: the coordinates, innermost first.
struct Place {
  std::int64_t at[kMaxRank];

  Place(std::int64_t element, int rank, const std::int64_t* sizes) {
    for (int d = 0; d < rank; ++d) {
      at[d] = element % sizes[d];
      element /= sizes[d];
    }
  }
  std::int64_t Offset(int rank, const std::int64_t* strides) const {
    std::int64_t offset = 0;
    for (int d = 0; d < rank; ++d) offset += at[d] * strides[d];
    return offset;
  }
  // Goes to the next row; returns how far that is in an operand's memory.
  std::int64_t NextRow(int rank, const std::int64_t* sizes, const std::int64_t* strides) {
    std::int64_t distance = -at[0] * strides[0];
    at[0] = 0;
    for (int d = 1; d < rank; ++d) {
      distance += strides[d];
      if (++at[d] < sizes[d]) break;
      distance -= strides[d] * sizes[d];
      at[d] = 0;
    }
    return distance;
  }
};

// Calls run(offset in the operand, first, count) for each stretch of one row of `count` elements
// from `place` on.
template <class Run>
TWINOP_INLINE void ForEachRun(Place place, std::int64_t count, int rank, const std::int64_t* sizes,
                              const std::int64_t* strides, const Run& run) {
  std::int64_t offset = place.Offset(rank, strides);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t length = std::min(count - done, sizes[0] - place.at[0]);
    run(offset, done, length);
    done += length;
    offset += place.NextRow(rank, sizes, strides);
  }
}

template <class T>
TWINOP_INLINE void FillLoop(T* to, T value, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}
template <class T>
void FillBaseline(T* to, T value, std::int64_t count) {
  FillLoop(to, value, count);
}
#if defined(__x86_64__)
template <class T>
TWINOP_TARGET_AVX2 void FillAvx2(T* to, T value, std::int64_t count) {
  FillLoop(to, value, count);
}
#endif

// The widest stores count: the copies of an operand with stride 0 cost as much as the arithmetic.
template <class T>
inline void (*const kFill)(T* to, T value, std::int64_t count) =
#if defined(__x86_64__)
    CpuLevel() != Level::kBaseline ? FillAvx2<T> :
#endif
                                   FillBaseline<T>;

template <class T>
[[gnu::noinline]] void Gather(const T* from, T* to, const Place& place, std::int64_t count,
                              int rank, const std::int64_t* sizes, const std::int64_t* strides) {
  const std::int64_t stride = strides[0];
  ForEachRun(place, count, rank, sizes, strides,
             [=](std::int64_t offset, std::int64_t first, std::int64_t length) {
               const T* source = from + offset;
               if (stride == 0 && length >= kShortRun) {
                 kFill<T>(to + first, *source, length);
               } else if (stride == 1 && length >= kShortRun) {
                 std::copy_n(source, length, to + first);
               } else {
                 for (std::int64_t i = 0; i < length; ++i) to[first + i] = source[i * stride];
               }
             });
}

template <class T>
[[gnu::noinline]] void Scatter(const T* from, T* to, const Place& place, std::int64_t count,
                               int rank, const std::int64_t* sizes, const std::int64_t* strides) {
  const std::int64_t stride = strides[0];
  ForEachRun(place, count, rank, sizes, strides,
             [=](std::int64_t offset, std::int64_t first, std::int64_t length) {
               T* target = to + offset;
               for (std::int64_t i = 0; i < length; ++i) target[i * stride] = from[first + i];
             });
}

// How a call is cut: where the layout alone says, wherever the pool cuts between the pieces. A
// piece is part of a row or, where rows are short, of several.
template <class T>
struct Pieces {
  bool by_rows;
  std::int64_t segment;  // elements that are cut together: a row, or all
  std::int64_t each;     // pieces of a segment
  std::int64_t count;

  Pieces(std::int64_t numel, std::int64_t row)
      : by_rows(row >= kShortRow),
        segment(by_rows ? row : numel),
        each((segment + kPiece<T> - 1) / kPiece<T>),
        count(numel / segment * each) {}

  std::int64_t First(std::int64_t piece) const {
    return piece / each * segment + piece % each * kPiece<T>;
  }
  // Pieces below which a second thread costs more than it brings.
  std::int64_t Grain() const { return kGrain * kBlock / std::min(segment, kPiece<T>) + 1; }
};

template <class F, class T, int kOutputs, int kInputs>
[[gnu::noinline]] void Strided(const Call& call, const F& functor) {
  constexpr int kOperands = kOutputs + kInputs;
  const auto layout = MakeLayout<kOutputs, kInputs>(call);
  const auto all_out = OutputPointers<T, kOutputs>(call);
  const auto all_in = InputPointers<T, kInputs>(call);
  bool flat[kOperands];
  bool scalar[kOperands];
  for (int k = 0; k < kOperands; ++k) {
    flat[k] = layout.IsFlat(k);
    scalar[k] = layout.IsScalar(k);
  }
  const int rank = layout.rank;
  const std::int64_t* const sizes = layout.sizes;
  const Pieces<T> pieces(layout.numel, sizes[0]);

  call.context->ParallelFor(
      pieces.count, pieces.Grain(), [&](std::int64_t begin, std::int64_t end) {
        alignas(64) T buffers[kOperands][kPiece<T>];
        for (int k = 0; k < kInputs; ++k)
          if (scalar[kOutputs + k])
            kFill<T>(buffers[kOutputs + k], *all_in[k], std::min(kPiece<T>, layout.numel));

        std::int64_t first = pieces.First(begin);
        Place place(first, rank, sizes);
        for (std::int64_t piece = begin; piece < end; ++piece) {
          const std::int64_t rest = pieces.by_rows ? sizes[0] - place.at[0] : layout.numel - first;
          const std::int64_t count = std::min(kPiece<T>, rest);
          // The operand's elements where they are one stretch of its memory, else null.
          auto stretch = [&](auto* data, int k) {
            if (flat[k]) return data + first;
            const bool dense = layout.strides[k][0] == 1 && place.at[0] + count <= sizes[0];
            return dense ? data + place.Offset(rank, layout.strides[k]) : nullptr;
          };
          Inputs<T, kInputs> in;
          for (int k = 0; k < kInputs; ++k) {
            const int operand = kOutputs + k;
            in.pointers[k] = scalar[operand] ? buffers[operand] : stretch(all_in[k], operand);
            if (in.pointers[k] != nullptr) continue;
            Gather(all_in[k], buffers[operand], place, count, rank, sizes, layout.strides[operand]);
            in.pointers[k] = buffers[operand];
          }
          Outputs<T, kOutputs> out;
          for (int k = 0; k < kOutputs; ++k) {
            T* direct = stretch(all_out[k], k);
            out.pointers[k] = direct != nullptr ? direct : buffers[k];
          }
          kRange<F, T, kOutputs, kInputs>(functor, out, in, count);
          for (int k = 0; k < kOutputs; ++k)
            if (out[k] == buffers[k])
              Scatter(buffers[k], all_out[k], place, count, rank, sizes, layout.strides[k]);

          first += count;
          if (!pieces.by_rows) {
            place = Place(first, rank, sizes);
          } else if (count < rest) {
            place.at[0] += count;
          } else {
            place.NextRow(rank, sizes, layout.strides[0]);
          }
        }
      });
}

}  // namespace twinop::elementwise
