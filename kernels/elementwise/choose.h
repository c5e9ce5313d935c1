// Chooses the CUDA kernel for the tensors of an elementwise call, by the numbers in choices.h.
// Every element is computed alone, so that its bits do not depend on the kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/elementwise/choices.h"
#include "twinop/primitives/target.h"

namespace twinop::elementwise {

// What the choice knows of the tensors.
struct CallShape {
  bool is_flat;           // all are one flat sequence of aligned vectors
  bool has_vectors;       // a vector of the output is an aligned vector of each output
  std::int64_t bytes;     // of an output
  std::int64_t row;       // elements of the innermost dimension
  int inputs;             // in all
  int shifted, gathered;  // those whose vectors are not aligned, or not consecutive
};

enum class Kernel {
  kFlat,        // the functor's number of vectors a thread
  kFlatSmall,   // kLoads vectors
  kFlatCached,  // kCachedLoads vectors, or the functor's number if that is more than kLoads
  kVectors,     // vectors of the output, whose inputs are aligned vectors or one element
  kGathered,    // vectors of the output, whose inputs lie anywhere
  kElements,    // the elements of the output one by one
};

constexpr const char* NameOf(Kernel kernel) {
  constexpr const char* kNames[] = {
      "one flat sequence of aligned vectors",
      "one flat sequence of aligned vectors, few",
      "one flat sequence of aligned vectors, the output stays in L2",
      "not one aligned sequence: vectors, whose operands are aligned or one element",
      "not one aligned sequence: vectors, whose operands lie anywhere",
      "not one aligned sequence: element by element"};
  return kNames[static_cast<int>(kernel)];
}

// `element_bytes`: of the dtype. float64 has vectors of two elements: one kernel for flat tensors
// is enough, and others are taken element by element.
constexpr Kernel Choose(const CallShape& call, int element_bytes, const Target& target) {
  if (call.is_flat) {
    if (element_bytes == 8 || call.bytes > std::min(kMaxCachedBytes, target.l2_bytes))
      return Kernel::kFlat;
    return call.bytes < kMinCachedBytes ? Kernel::kFlatSmall : Kernel::kFlatCached;
  }
  const int others = call.shifted + call.gathered;
  // A vector that is gathered may lie in two rows, but not in three.
  if (element_bytes == 8 || !call.has_vectors ||
      (others > 0 && call.row < kVectorBytes / element_bytes) ||
      (element_bytes == 4 && call.shifted == call.inputs))
    return Kernel::kElements;
  // One input alone has few enough registers for both.
  return others > 0 || call.inputs == 1 ? Kernel::kGathered : Kernel::kVectors;
}

}  // namespace twinop::elementwise
