// What the parts of `linear` share: the sizes of a call, and where its operands and its scratch
// lie.
#pragma once

#include <cstdint>
#include <string_view>

#include "twinop/record/arguments.h"

namespace twinop::linear {

// cuBLASLt's algorithms differ in the workspace that they need. This is what torch gives it too.
inline constexpr std::int64_t kWorkspaceBytes = 32 << 20;
// cuBLASLt chooses by alignment as well. Copies of operands with less keep the bits the same.
inline constexpr std::size_t kAlignment = 16;

// y = x W, with x [m, k] and W [n, k], or [k, n] if `is_kn`.
struct Sizes {
  std::int64_t m, n, k;
  bool is_kn;
};

template <class Op>
Sizes SizesOf(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& weight = InputOf(call, "weight"_name);
  Sizes sizes{1, 0, 0, AttributeOf<std::string_view>(call, "layout"_name) == "kn"};
  sizes.n = weight.sizes[sizes.is_kn ? 1 : 0];
  sizes.k = x.sizes[x.rank - 1];
  for (std::size_t i = 0; i + 1 < x.rank; ++i) sizes.m *= x.sizes[i];
  return sizes;
}

// Takes pieces of the scratch memory, or only counts them where there is none yet.
struct Pieces {
  char* memory = nullptr;
  std::int64_t used = 0;

  void* Take(std::int64_t bytes) {
    char* const piece = memory == nullptr ? nullptr : memory + used;
    used += (bytes + 255) / 256 * 256;
    return piece;
  }
};

// A tensor, and where the product has it: in scratch memory if its own is not aligned.
struct Operand {
  const Tensor* tensor = nullptr;
  void* data = nullptr;

  Operand() = default;
  Operand(const Tensor& tensor, Pieces* pieces) : tensor(&tensor), data(tensor.data) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0;
    if (!aligned) data = pieces->Take(tensor.bytes());
  }
  bool is_moved() const { return tensor != nullptr && data != tensor->data; }
};

struct Operands {
  void* workspace;
  Operand x, weight, bias, residual, y;
  void* packed = nullptr;  // the product of linear_swiglu
  std::int64_t scratch_bytes;
};

template <class Op>
Operands OperandsOf(const CallOf<Op>& call) {
  Pieces pieces{static_cast<char*>(call.scratch)};
  Operands operands;
  operands.workspace = pieces.Take(kWorkspaceBytes);
  operands.x = Operand(InputOf(call, "x"_name), &pieces);
  operands.weight = Operand(InputOf(call, "weight"_name), &pieces);
  operands.bias = Operand(InputOf(call, "bias"_name), &pieces);
  if (call.outputs != nullptr) operands.y = Operand(OutputOf(call, "y"_name), &pieces);
  if constexpr (Op::kRecord.schema.FindInput("residual") >= 0) {
    operands.residual = Operand(InputOf(call, "residual"_name), &pieces);
  } else {
    const Sizes sizes = SizesOf(call);
    const auto size = static_cast<std::int64_t>(Info(InputOf(call, "x"_name).dtype).size);
    operands.packed = pieces.Take(sizes.m * sizes.n * size);
  }
  operands.scratch_bytes = pieces.used;
  return operands;
}

template <class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  return OperandsOf(call).scratch_bytes;
}

}  // namespace twinop::linear
