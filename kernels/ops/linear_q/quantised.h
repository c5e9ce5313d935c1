// linear_q and linear_q_swiglu: the sizes of a call, and its buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "twinop/ops/linear/body.h"
#include "twinop/ops/linear/buffers.h"

namespace twinop::linear::quantised {

struct QuantScratch {
  Operand x, weight, scale, zero;
  // For more rows: the weight [n, k], and the scratch memory of the product with it.
  void* dense = nullptr;
  void* inner = nullptr;
  std::int64_t scratch_bytes = 0;
};

template <class Op>
QuantScratch QuantScratchOf(const CallOf<Op>& call) {
  Arena arena{static_cast<char*>(call.scratch)};
  QuantScratch found;
  const Tensor& x = InputOf(call, "x"_name);
  const Sizes sizes = SizesOf(call);
  found.weight = Operand(InputOf(call, "weight"_name), &arena);
  found.scale = Operand(InputOf(call, "scale"_name), &arena);
  found.zero = Operand(InputOf(call, "zero"_name), &arena);
  if (sizes.m <= (AttributeOf<bool>(call, "invariant"_name) ? kMostRows : kFewRows)) {
    found.x = Operand(x, &arena);
  } else {
    const auto size = static_cast<std::int64_t>(Info(x.dtype).size);
    found.dense = arena.Allocate(sizes.n * sizes.k * size);
    // Copies of x, bias, residual and y at most, or gate and up: linear::BuffersOf.
    found.inner = arena.Allocate(kWorkspaceBytes + 8 * 256 +
                                 (sizes.m * (sizes.k + 2 * sizes.n) + sizes.n) * size);
  }
  found.scratch_bytes = arena.used;
  return found;
}

template <class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  return QuantScratchOf(call).scratch_bytes;
}

// ONNX Runtime packs a constant weight of 4 bits for its product. It makes every other weight dense
// in fp32 when it runs, so it gets these in slices of so many elements.
constexpr std::int64_t kSlice = 1 << 23;

// x times the weight, in fp32.
template <class Op>
std::string_view Product(const CallOf<Op>& call, BodyWriter* body, std::string_view x) {
  const Tensor &weight = InputOf(call, "weight"_name), &given = InputOf(call, "x"_name);
  const auto bits = AttributeOf<std::int64_t>(call, "bits"_name);
  const auto block = AttributeOf<std::int64_t>(call, "block"_name);
  const std::int64_t n = weight.sizes[0], whole = weight.sizes[1] * block;
  if (n == 0 || whole == 0) {  // which MatMulNBits refuses
    std::string_view dense = body->Number(0);
    for (const std::string_view name : {"weight", "scale", "zero"})
      if (name != "zero" || InputOf(call, "zero"_name).present)
        dense = body->Add(
            "Add", {dense, body->Add("Reshape",
                                     {body->Cast(name, DType::kFloat32), body->Ints({whole, n})},
                                     IntAttribute("allowzero", 1))});
    return body->Add("MatMul", {x, dense});
  }
  const bool is_whole = given.sizes != nullptr && given.sizes[given.rank - 1] == whole;
  if (!is_whole) {  // zeros for the rest of the last block
    const std::string_view width = body->Add("Shape", {x}, IntAttribute("start", 1));
    const std::string_view missing = body->Add("Sub", {body->Ints({whole}), width});
    x = body->Add(
        "Pad", {x, body->Add("Concat", {body->Ints({0, 0, 0}), missing}, IntAttribute("axis", 0))});
  }
  std::vector<std::vector<std::string_view>> parts = {{"weight"}, {body->Input("scale")}};
  if (InputOf(call, "zero"_name).present) parts.push_back({"zero"});
  const bool is_packed = bits == 4 && weight.data != nullptr;
  const std::int64_t rows = is_packed ? n : std::clamp<std::int64_t>(kSlice / whole, 1, n);
  const std::int64_t count = (n + rows - 1) / rows, of_slice = (n + count - 1) / count;
  if (count > 1)
    for (auto& part : parts) part = body->Split(part[0], count, 0);
  std::vector<std::string_view> slices;
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<std::string_view> inputs = {x};
    for (const auto& part : parts) inputs.push_back(part[static_cast<std::size_t>(i)]);
    slices.push_back(body->Add("MatMulNBits", inputs, IntAttribute("K", whole),
                               IntAttribute("N", std::min(of_slice, n - i * of_slice)),
                               IntAttribute("bits", bits), IntAttribute("block_size", block)));
  }
  return count > 1 ? body->Add("Concat", slices, IntAttribute("axis", -1)) : slices[0];
}

template <class Op>
std::string_view Body(const CallOf<Op>& call) {
  const std::size_t rank = InputOf(call, "weight"_name).rank;
  if (rank != 3)
    throw std::runtime_error("weight has " + std::to_string(rank) + " dimensions, expected 3");
  BodyWriter body(InputOf(call, "x"_name).dtype);
  return FinishBody(call, &body, [&](std::string_view x) {
    const std::string_view y = Product(call, &body, x);
    return InputOf(call, "bias"_name).present ? body.Add("Add", {y, body.Input("bias")}) : y;
  });
}

}  // namespace twinop::linear::quantised
