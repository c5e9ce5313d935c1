// What ONNX Runtime runs on the CPU, in its own operators (twinop_op.row_body in kernels/abi.h).
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "twinop/record/arguments.h"
#include "twinop/record/body_writer.h"

namespace twinop::attention_packed {

template <class Op>
std::string_view Body(const CallOf<Op>& call) {
  BodyWriter body(InputOf(call, "qkv"_name).dtype);
  const auto transposed = [&](std::string_view value, std::initializer_list<std::int64_t> order) {
    return body.Add("Transpose", {value}, IntsAttribute("perm", order));
  };
  const std::string_view qkv = body.Input("qkv");
  const std::vector<std::string_view> parts = body.Split(qkv, 3);
  const auto by_head = [&](int part, std::initializer_list<std::int64_t> order) {
    const auto heads = AttributeOf<std::int64_t>(call, "heads"_name);
    return transposed(body.Add("Reshape", {parts[part], body.Ints({0, 0, heads, -1})}), order);
  };
  std::string_view q = by_head(0, {0, 2, 1, 3});  // [B, H, S, D]
  if (const float scale = AttributeOf<float>(call, "scale"_name); scale != 0) {
    q = body.Add("Mul", {q, body.Number(scale)});
  } else {
    const std::string_view size = body.Add("Shape", {q}, IntAttribute("start", 3));
    q = body.Add("Div", {q, body.Add("Sqrt", {body.Cast(size, body.Computed())})});
  }
  std::string_view scores = body.Add("MatMul", {q, by_head(1, {0, 2, 3, 1})});
  if (InputOf(call, "bias"_name).present) scores = body.Add("Add", {scores, body.Input("bias")});
  if (AttributeOf<bool>(call, "causal"_name)) {
    const std::string_view tokens =
        body.Add("Shape", {qkv}, IntAttribute("start", 1), IntAttribute("end", 2));
    const std::string_view square = body.Add("Concat", {tokens, tokens}, IntAttribute("axis", 0));
    const std::string_view hidden =
        body.Add("Expand", {body.Number(-std::numeric_limits<double>::infinity()), square});
    const std::string_view one = body.Add("Constant", {}, IntAttribute("value_int", 1));
    scores = body.Add("Add", {scores, body.Add("Trilu", {hidden, one})});
  }
  const std::string_view weights = body.Add("Softmax", {scores}, IntAttribute("axis", -1));
  const std::string_view y = body.Add("MatMul", {weights, by_head(2, {0, 2, 1, 3})});
  return body.Finish(body.Add("Reshape", {transposed(y, {0, 2, 1, 3}), body.Ints({0, 0, -1})}));
}

}  // namespace twinop::attention_packed
