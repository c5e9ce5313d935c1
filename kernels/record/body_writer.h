// Writes the ONNX model of an op's body in C++ (twinop_op.row_body in kernels/abi.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <list>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "twinop/record/node_proto.h"

namespace twinop {

// A graph under construction, of standard operators, ONNX Runtime's MatMulNBits, and ops of
// twinop's own library. 16-bit inputs are computed in fp32.
class BodyWriter {
 public:
  explicit BodyWriter(DType dtype) : dtype_(dtype), is_narrow_(Info(dtype).size == 2) {}

  // Adds a node and returns the name of its output. `attributes` are Messages.
  template <class... Attributes>
  std::string_view Add(std::string_view op, const std::vector<std::string_view>& inputs,
                       const Attributes&... attributes) {
    const std::string_view name = NewName();
    AddNode(op, inputs, {name}, std::vector<Message>{attributes...});
    return name;
  }
  // Splits a value along an axis into equal parts, of which the last may be smaller.
  std::vector<std::string_view> Split(std::string_view value, std::int64_t count,
                                      std::int64_t axis = -1) {
    std::vector<std::string_view> parts;
    for (std::int64_t i = 0; i < count; ++i) parts.push_back(NewName());
    AddNode("Split", {value}, parts,
            {IntAttribute("axis", axis), IntAttribute("num_outputs", count)});
    return parts;
  }
  std::string_view Ints(std::initializer_list<std::int64_t> values) {
    return Add("Constant", {}, IntsAttribute("value_ints", values));
  }
  // A number of the type in which the body computes.
  std::string_view Number(double value) {
    return Cast(Add("Constant", {}, FloatAttribute("value_float", value)), Computed());
  }
  std::string_view Cast(std::string_view value, DType to) {
    return Add("Cast", {value}, IntAttribute("to", Info(to).onnx));
  }
  // An input in the type in which the body computes.
  std::string_view Input(std::string_view name) {
    return is_narrow_ ? Cast(name, DType::kFloat32) : name;
  }
  DType Computed() const { return is_narrow_ ? DType::kFloat32 : dtype_; }

  // Returns the model, with `value` as its output y. Models are kept while the library is loaded;
  // equal ones have one address (kernels/abi.h).
  std::string_view Finish(std::string_view value) {
    if (is_narrow_) value = Cast(value, dtype_);
    AddNode("Identity", {value}, {"y"}, {});
    graph_.Add(GraphField::kName, "body");
    graph_.Add(GraphField::kOutput, ValueProto("y", dtype_));
    enum : unsigned { kDomainOfOpset = 1, kVersionOfOpset = 2 };
    Message model;
    model.AddInt(ModelField::kIrVersion, 10);
    for (const char* domain : {"", kOwnDomain, kMicrosoft}) {
      Message opset;
      opset.Add(kDomainOfOpset, domain);
      opset.AddInt(kVersionOfOpset, *domain == '\0' ? 20 : 1);
      model.Add(ModelField::kOpset, opset);
    }
    model.Add(ModelField::kGraph, graph_);
    static std::mutex mutex;
    static auto& models = *new std::set<std::string>;
    const std::lock_guard<std::mutex> lock(mutex);
    return *models.insert(model.bytes).first;
  }

 private:
  std::string_view NewName() {
    names_.push_back("v" + std::to_string(names_.size()));
    return names_.back();
  }
  void AddNode(std::string_view op, const std::vector<std::string_view>& inputs,
               const std::vector<std::string_view>& outputs,
               const std::vector<Message>& attributes) {
    const std::string_view domain = op.substr(0, 6) == "Custom" ? kOwnDomain
                                    : op == "MatMulNBits"       ? kMicrosoft
                                                                : "";
    graph_.Add(GraphField::kNode, NodeProto(op, domain, inputs, outputs, attributes));
  }

  static constexpr const char* kOwnDomain = "custom_domain";
  static constexpr const char* kMicrosoft = "com.microsoft";

  DType dtype_;
  bool is_narrow_;
  Message graph_;
  std::list<std::string> names_;
};

}  // namespace twinop
