// The sizes of a call of `linear`, and the addresses of its operands and of its scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>

#include "twinop/record/arguments.h"

namespace twinop::linear {

// The largest workspace of an algorithm that cuBLASLt may choose. torch gives it as much.
inline constexpr std::int64_t kWorkspaceBytes = 32 << 20;
// cuBLASLt also chooses by alignment. Operands with less are copied to keep the same bits.
inline constexpr std::size_t kAlignment = 16;

// Up to so many rows of x kernels of their own multiply by a quantised weight (few_rows.cuh): it
// would have to be made dense. Of an invariant product they take all.
inline constexpr std::int64_t kFewRows = 64, kMostRows = INT32_MAX / 4;

template <class Op>
inline constexpr bool kGated = Op::kRecord.FindInput("residual") < 0;

// y = x W, with x [m, k] and W [n, k], or [k, n] if `is_kn`.
struct Sizes {
  std::int64_t m, n, k;
  bool is_kn;
};

template <class Op>
Sizes SizesOf(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& weight = InputOf(call, "weight"_name);
  bool is_kn = false;
  if constexpr (Op::kRecord.FindAttribute("layout") >= 0)
    is_kn = AttributeOf<std::string_view>(call, "layout"_name) == "kn";
  return {Numel(x.sizes, x.rank - 1), weight.sizes[is_kn ? 1 : 0], x.sizes[x.rank - 1], is_kn};
}

// Which inputs are constants of the model: the weight is then read before the kernel before ends.
template <class Op>
struct Constants {
  bool known[kMaxArguments] = {};

  static Status Create(const CallOf<Op>& call, std::unique_ptr<Constants>* state) {
    *state = std::make_unique<Constants>();
    for (std::size_t i = 0; i < Op::kRecord.input_count; ++i)
      (*state)->known[i] = call.inputs[i].present != 0;
    return {};
  }
  static bool HasWeight(const CallOf<Op>& call) {
    const auto* const constants = static_cast<const Constants*>(call.state);
    for (const char* name : {"weight", "scale", "zero"}) {
      const int i = Op::kRecord.FindInput(name);
      if (i >= 0 && call.inputs[i].present && (constants == nullptr || !constants->known[i]))
        return false;
    }
    return true;
  }
};

// Allocates from the scratch memory, or only counts the bytes if there is none yet.
struct Arena {
  char* memory = nullptr;
  std::int64_t used = 0;

  void* Allocate(std::int64_t bytes) {
    char* const block = memory == nullptr ? nullptr : memory + used;
    used += (bytes + 255) / 256 * 256;
    return block;
  }
};

// A tensor, and the aligned memory that the product uses: the tensor's, or scratch memory.
struct Operand {
  const Tensor* tensor = nullptr;
  void* data = nullptr;

  Operand() = default;
  Operand(const Tensor& tensor, Arena* arena) : tensor(&tensor), data(tensor.data) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0;
    if (!aligned) data = arena->Allocate(tensor.bytes());
  }
  bool is_moved() const { return tensor != nullptr && data != tensor->data; }
};

struct GemmBuffers {
  Operand x, weight, bias, residual, y;
  Operand x_scale, weight_scale;  // of float8
  DType operands;                 // of x and weight
  void* normed = nullptr;         // x over its root mean square
  std::int64_t one_kernel_bytes;
  // After them, where one kernel does not compute all:
  void* workspace;
  void* packed = nullptr;  // gate and up of linear_swiglu
  std::int64_t scratch_bytes;
};

template <class Op>
GemmBuffers BuffersOf(const CallOf<Op>& call) {
  Arena arena{static_cast<char*>(call.scratch)};
  GemmBuffers buffers;
  const Sizes sizes = SizesOf(call);
  const auto size = static_cast<std::int64_t>(Info(InputOf(call, "x"_name).dtype).size);
  buffers.x = Operand(InputOf(call, "x"_name), &arena);
  buffers.operands = InputOf(call, "x"_name).dtype;
  buffers.weight = Operand(InputOf(call, "weight"_name), &arena);
  buffers.bias = Operand(InputOf(call, "bias"_name), &arena);
  if (call.outputs != nullptr) buffers.y = Operand(OutputOf(call, "y"_name), &arena);
  if constexpr (!kGated<Op>) buffers.residual = Operand(InputOf(call, "residual"_name), &arena);
  if (AttributeOf<float>(call, "rms_eps"_name) > 0)
    buffers.normed = arena.Allocate(sizes.m * sizes.k * size);
  buffers.one_kernel_bytes = arena.used;
  buffers.workspace = arena.Allocate(kWorkspaceBytes);
  if (kGated<Op>) buffers.packed = arena.Allocate(sizes.m * sizes.n * size);
  buffers.scratch_bytes = arena.used;
  return buffers;
}

// Up to so many rows have kernels of their own, if the product suits them.
template <class Op>
std::int64_t MostFewRows(const CallOf<Op>& call) {
  if (AttributeOf<bool>(call, "invariant"_name)) return kMostRows;
  return std::min(kMostRows, AttributeOf<std::int64_t>(call, "few_rows"_name));
}

// Whether one kernel computes the call on its device (cuda.cuh).
template <bool kHere>
Status IsOneKernel(const twinop_call* call, const GemmBuffers& at, const Sizes& sizes, DType dtype,
                   std::string_view activation, bool gated, std::int64_t few, bool* is_one);

template <class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  const GemmBuffers at = BuffersOf(call);
  bool is_one = false;
#if defined(TWINOP_WITH_CUDA)
  const auto activation = AttributeOf<std::string_view>(call, "activation"_name);
  if (call.context == nullptr ||
      !IsOneKernel<true>(&call, at, SizesOf(call), InputOf(call, "x"_name).dtype, activation,
                         kGated<Op>, MostFewRows(call), &is_one)
           .ok())
    is_one = false;
#endif
  return is_one ? at.one_kernel_bytes : at.scratch_bytes;
}

}  // namespace twinop::linear
