// What ONNX Runtime runs on the CPU: its own Gemm and twinop's kernels for the activation. All
// tensors have two dimensions (twinop_op.row_body in kernels/abi.h).
#pragma once

#include <string_view>
#include <vector>

#include "twinop/record/arguments.h"
#include "twinop/record/body_writer.h"

namespace twinop::linear {

inline std::string_view AddActivation(BodyWriter* body, std::string_view value,
                                      std::string_view activation) {
  if (activation == "none") return value;
  if (activation == "relu") return body->Add("Relu", {value});
  if (activation == "silu") return body->Add("CustomSilu", {value});
  return body->Add("CustomGelu", {value},
                   TextAttribute("approximate", activation == "gelu_tanh" ? "tanh" : "none"));
}

// Writes what the op has around its product: `multiply` gives that of x and the weight, with the
// bias.
template <class Op, class Multiply>
std::string_view FinishBody(const CallOf<Op>& call, BodyWriter* body, Multiply&& multiply) {
  constexpr int kResidual = Op::kRecord.FindInput("residual");
  const auto activation = AttributeOf<std::string_view>(call, "activation"_name);
  std::string_view x = body->Input("x");
  if constexpr (Op::kRecord.FindAttribute("rms_eps") >= 0)
    if (const auto eps = AttributeOf<float>(call, "rms_eps"_name); eps > 0)
      x = body->Add("CustomRmsNorm", {x}, FloatAttribute("eps", eps));
  std::string_view y = multiply(x);
  if constexpr (kResidual >= 0) {
    if (call.inputs[kResidual].present) y = body->Add("Add", {y, body->Input("residual")});
    y = AddActivation(body, y, activation);
  } else if (activation == "silu") {
    y = body->Add("CustomSwigluPacked", {y});
  } else {
    const std::vector<std::string_view> halves = body->Split(y, 2);
    y = body->Add("Mul", {AddActivation(body, halves[0], activation), halves[1]});
  }
  return body->Finish(y);
}

template <class Op>
std::string_view Body(const CallOf<Op>& call) {
  BodyWriter body(InputOf(call, "x"_name).dtype);
  return FinishBody(call, &body, [&](std::string_view x) {
    std::vector<std::string_view> factors = {x, body.Input("weight")};
    if (InputOf(call, "bias"_name).present) factors.push_back(body.Input("bias"));
    const bool transposed = AttributeOf<std::string_view>(call, "layout"_name) == "nk";
    return body.Add("Gemm", factors, IntAttribute("transB", transposed ? 1 : 0));
  });
}

}  // namespace twinop::linear
