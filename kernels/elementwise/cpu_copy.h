// Moves elements between an operand and a contiguous buffer, on the CPU, for any strides. Only the
// size of an element matters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "twinop/math/numeric.h"
#include "twinop/primitives/cpu_features.h"

namespace twinop::elementwise {

// Runs below this length are copied by a loop: a call of memcpy takes longer.
constexpr std::int64_t kShortRun = 16;

// A position in the call's order of elements: the coordinates, innermost first.
struct Position {
  std::int64_t at[kMaxRank];

  Position(std::int64_t element, int rank, const std::int64_t* sizes) {
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
  // Moves to the next row; returns the distance in an operand's memory.
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

// Elements of one size, whatever their type is.
template <class Bits>
struct [[gnu::may_alias]] Word {
  Bits bits;
};
using Word8 = Word<std::uint8_t>;
using Word16 = Word<std::uint16_t>;
using Word32 = Word<std::uint32_t>;
using Word64 = Word<std::uint64_t>;

template <class Word>
struct Fill {
  template <Level kLevel>
  TWINOP_INLINE static void Run(void* to, const void* value, std::int64_t count) {
    const Word word = *static_cast<const Word*>(value);
    for (std::int64_t i = 0; i < count; ++i) static_cast<Word*>(to)[i] = word;
  }
};
template <class Word>
void FillWith(void* to, const void* value, std::int64_t count) {
  kByLevel<Fill<Word>, void(void*, const void*, std::int64_t)>(to, value, count);
}

// Copies `count` elements from `position` on between an operand and a contiguous buffer.
template <class Word, bool kGather>
void Copy(void* operand, void* buffer, Position position, std::int64_t count, int rank,
          const std::int64_t* sizes, const std::int64_t* strides) {
  const std::int64_t stride = strides[0];
  std::int64_t offset = position.Offset(rank, strides);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t length = std::min(count - done, sizes[0] - position.at[0]);
    Word* const strided = static_cast<Word*>(operand) + offset;
    Word* const dense = static_cast<Word*>(buffer) + done;
    if (!kGather) {
      for (std::int64_t i = 0; i < length; ++i) strided[i * stride] = dense[i];
    } else if (stride == 0 && length >= kShortRun) {
      FillWith<Word>(dense, strided, length);
    } else if (stride == 1 && length >= kShortRun) {
      std::memcpy(dense, strided, static_cast<std::size_t>(length) * sizeof(Word));
    } else {
      for (std::int64_t i = 0; i < length; ++i) dense[i] = strided[i * stride];
    }
    done += length;
    offset += position.NextRow(rank, sizes, strides);
  }
}

// Calls body(Tag<Word>) with the word of an element's size.
template <class Body>
void WithWord(std::size_t size, const Body& body) {
  if (size == sizeof(Word8)) return body(Tag<Word8>{});
  if (size == sizeof(Word16)) return body(Tag<Word16>{});
  if (size == sizeof(Word32)) return body(Tag<Word32>{});
  return body(Tag<Word64>{});
}

}  // namespace twinop::elementwise
