// The body that ONNX Runtime runs on the CPU: its own Gemm and twinop's kernels for the activation.
// 16-bit tensors are computed in fp32. All tensors have two dimensions (twinop_op.row_body in
// kernels/abi.h).
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "twinop/linear/operands.h"
#include "twinop/record/node_proto.h"

namespace twinop::linear {

inline constexpr const char* kDomain = "custom_domain";

inline Message IntAttribute(std::string_view name, std::int64_t value) {
  Attribute attribute;
  attribute.i = value;
  return AttributeProto(name, Kind::kInt, attribute);
}

inline Message TextAttribute(std::string_view name, std::string_view value) {
  Attribute attribute;
  attribute.s = value;
  return AttributeProto(name, Kind::kString, attribute);
}

// A graph under construction. Add returns the name of the node's output.
class GraphWriter {
 public:
  std::string_view Add(std::string_view op, const std::vector<std::string_view>& inputs,
                       const Message& attribute = {}, std::string_view domain = "") {
    names_.push_back("v" + std::to_string(names_.size()));
    std::vector<Message> attributes;
    if (!attribute.bytes.empty()) attributes.push_back(attribute);
    AddNode(op, domain, inputs, {names_.back()}, attributes);
    return names_.back();
  }
  // Adds a node that splits the columns of a value into two halves.
  std::vector<std::string_view> Halves(std::string_view value) {
    std::vector<Message> attributes;
    attributes.push_back(IntAttribute("axis", -1));
    attributes.push_back(IntAttribute("num_outputs", 2));
    AddNode("Split", "", {value}, {"gate", "others"}, attributes);
    return {"gate", "others"};
  }
  std::string_view Cast(std::string_view value, DType to) {
    return Add("Cast", {value}, IntAttribute("to", OnnxCode(to)));
  }

  // Returns the model, with `value` as its output y.
  std::string Finish(std::string_view value, DType dtype) {
    AddNode("Identity", "", {value}, {"y"}, {});
    graph_.Add(kGraphName, "body");
    graph_.Add(kGraphOutput, ValueProto("y", dtype));
    enum : unsigned { kDomainOfOpset = 1, kVersionOfOpset = 2 };
    Message model, standard, own;
    standard.Add(kDomainOfOpset, "");
    standard.AddInt(kVersionOfOpset, 20);
    own.Add(kDomainOfOpset, kDomain);
    own.AddInt(kVersionOfOpset, 1);
    model.AddInt(kModelIrVersion, 10);
    model.Add(kModelOpset, standard);
    model.Add(kModelOpset, own);
    model.Add(kModelGraph, graph_);
    return model.bytes;
  }

 private:
  void AddNode(std::string_view op, std::string_view domain,
               const std::vector<std::string_view>& inputs,
               const std::vector<std::string_view>& outputs,
               const std::vector<Message>& attributes) {
    graph_.Add(kGraphNode, NodeProto(op, domain, inputs, outputs, attributes));
  }

  Message graph_;
  std::list<std::string> names_;
};

inline std::string_view AddActivation(GraphWriter* graph, std::string_view value,
                                      std::string_view activation) {
  if (activation == "none") return value;
  if (activation == "relu") return graph->Add("Relu", {value});
  if (activation == "silu") return graph->Add("CustomSilu", {value}, {}, kDomain);
  return graph->Add("CustomGelu", {value},
                    TextAttribute("approximate", activation == "gelu_tanh" ? "tanh" : "none"),
                    kDomain);
}

template <class Op>
Status Body(const CallOf<Op>& call, const std::string** model) {
  constexpr int kResidual = Op::kRecord.schema.FindInput("residual");
  const auto activation = AttributeOf<std::string_view>(call, "activation"_name);
  const bool has_residual = kResidual >= 0 && call.inputs[kResidual < 0 ? 0 : kResidual].present;
  const DType dtype = InputOf(call, "x"_name).dtype;
  const bool narrow = Info(dtype).size == 2;
  GraphWriter graph;
  const auto wide = [&](std::string_view name) {
    return narrow ? graph.Cast(name, DType::kFloat32) : name;
  };
  std::vector<std::string_view> factors = {wide("x"), wide("weight")};
  const bool has_bias = InputOf(call, "bias"_name).present;
  if (has_bias) factors.push_back(wide("bias"));
  const bool transposed = AttributeOf<std::string_view>(call, "layout"_name) == "nk";
  std::string_view y = graph.Add("Gemm", factors, IntAttribute("transB", transposed ? 1 : 0));
  if (has_residual) y = graph.Add("Add", {y, wide("residual")});
  if constexpr (kResidual >= 0) {
    y = AddActivation(&graph, y, activation);
  } else if (activation == "silu") {
    y = graph.Add("CustomSwigluPacked", {y}, {}, kDomain);
  } else {
    const std::vector<std::string_view> halves = graph.Halves(y);
    y = graph.Add("Mul", {AddActivation(&graph, halves[0], activation), halves[1]});
  }
  if (narrow) y = graph.Cast(y, dtype);
  // Models are kept while the library is loaded; equal ones have one address (kernels/abi.h).
  static std::mutex mutex;
  static auto& models = *new std::set<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  *model = &*models.insert(graph.Finish(y, dtype)).first;
  return {};
}

}  // namespace twinop::linear
