// linear_q and linear_q_swiglu: the sizes of a call, and its operands.
#pragma once

#include <cstdint>

#include "twinop/linear/body.h"
#include "twinop/linear/operands.h"

namespace twinop::linear::quantised {

template <class Op>
Sizes SizesOf(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  return {Numel(x.sizes, x.rank - 1), InputOf(call, "weight"_name).sizes[0], x.sizes[x.rank - 1],
          false};
}

struct Packing {
  Operand x, weight, scale, zero;
  // For more rows: the weight [n, k], and the scratch memory of the product with it.
  void* dense = nullptr;
  void* inner = nullptr;
  std::int64_t scratch_bytes = 0;
};

template <class Op>
Packing PackingOf(const CallOf<Op>& call) {
  Arena arena{static_cast<char*>(call.scratch)};
  Packing found;
  const Tensor& x = InputOf(call, "x"_name);
  const Sizes sizes = quantised::SizesOf(call);
  found.weight = Operand(InputOf(call, "weight"_name), &arena);
  found.scale = Operand(InputOf(call, "scale"_name), &arena);
  found.zero = Operand(InputOf(call, "zero"_name), &arena);
  if (sizes.m <= (AttributeOf<bool>(call, "invariant"_name) ? kMostRows : kFewRows)) {
    found.x = Operand(x, &arena);
  } else {
    const auto size = static_cast<std::int64_t>(Info(x.dtype).size);
    found.dense = arena.Allocate(sizes.n * sizes.k * size);
    // Copies of x, bias, residual and y at most, or gate and up: linear::OperandsOf.
    found.inner = arena.Allocate(kWorkspaceBytes + 8 * 256 +
                                 (sizes.m * (sizes.k + 2 * sizes.n) + sizes.n) * size);
  }
  found.scratch_bytes = arena.used;
  return found;
}

template <class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  return PackingOf(call).scratch_bytes;
}

// The weight [n, k] as standard operators make it, which ONNX Runtime does once for a constant.
template <class Op>
std::string_view DenseWeight(const CallOf<Op>& call, BodyWriter* body) {
  const auto bits = AttributeOf<std::int64_t>(call, "bits"_name);
  const auto block = AttributeOf<std::int64_t>(call, "block"_name);
  const std::string_view width = body->Add("Shape", {"x"}, IntAttribute("start", -1));
  const auto flat = [&](std::string_view value) {
    return body->Add("Flatten", {value}, IntAttribute("axis", 1));
  };
  const auto until_k = [&](std::string_view value) {
    return body->Add("Slice", {flat(value), body->Ints({0}), width, body->Ints({1})});
  };
  const auto apart = [&](std::string_view value) {
    return body->Add("Unsqueeze", {value, body->Ints({-1})});
  };
  const auto integers = [&](std::string_view bytes) {
    bytes = body->Cast(bytes, DType::kInt32);
    if (bits == 8) return bytes;
    const std::string_view sixteen = body->Cast(body->Ints({16}), DType::kInt32);
    bytes = apart(bytes);
    return body->Add("Concat",
                     {body->Add("Mod", {bytes, sixteen}), body->Add("Div", {bytes, sixteen})},
                     IntAttribute("axis", -1));
  };
  const auto of_columns = [&](std::string_view value) {  // given one for each block
    return until_k(body->Add("Expand", {apart(value), body->Ints({1, 1, block})}));
  };
  const std::string_view zero =
      InputOf(call, "zero"_name).present
          ? of_columns(flat(body->Cast(integers("zero"), body->Computed())))
          : body->Number(bits == 4 ? 8 : 128);
  const std::string_view codes = body->Cast(until_k(integers("weight")), body->Computed());
  return body->Add("Mul", {body->Add("Sub", {codes, zero}), of_columns(body->Input("scale"))});
}

template <class Op>
Status Body(const CallOf<Op>& call, const std::string** model) {
  BodyWriter body(InputOf(call, "x"_name).dtype);
  const std::string_view weight = DenseWeight(call, &body);
  *model = FinishBody(call, &body, weight, true);
  return {};
}

}  // namespace twinop::linear::quantised
