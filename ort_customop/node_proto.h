// Writes the node of an op in ONNX's protobuf format. Two protobuf messages one after the other are
// read as one that has the fields of both, so these bytes behind a model add the node to its graph.
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "twinop/record/record.h"

namespace twinop::ort {

// A message, to which fields are added by their numbers in onnx.proto.
struct Message {
  std::string bytes;

  void AddVarint(std::uint64_t value) {
    for (; value > 127; value >>= 7) bytes.push_back(static_cast<char>(value | 128));
    bytes.push_back(static_cast<char>(value));
  }
  void AddInt(unsigned field, std::int64_t value) {
    AddVarint(field << 3);
    AddVarint(static_cast<std::uint64_t>(value));
  }
  void AddFloat(unsigned field, float value) {
    static_assert(sizeof(value) == 4);
    AddVarint(field << 3 | 5);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Add(unsigned field, std::string_view text) {
    AddVarint(field << 3 | 2);
    AddVarint(text.size());
    bytes.append(text);
  }
  void Add(unsigned field, const Message& message) { Add(field, message.bytes); }
};

inline Message AttributeProto(const Argument& argument, const Attribute& value) {
  enum : unsigned { kName = 1, kF = 2, kI = 3, kS = 4, kInts = 8, kType = 20 };
  enum { kFloatType = 1, kIntType = 2, kStringType = 3, kIntsType = 7 };
  Message message;
  message.Add(kName, argument.name.view());
  if (argument.kind == Kind::kFloat) {
    message.AddInt(kType, kFloatType);
    message.AddFloat(kF, static_cast<float>(value.f));
  } else if (argument.kind == Kind::kString) {
    message.AddInt(kType, kStringType);
    message.Add(kS, std::string_view(value.s.data, value.s.size));
  } else if (argument.kind == Kind::kIntList) {
    message.AddInt(kType, kIntsType);
    for (std::size_t i = 0; i < value.count; ++i) message.AddInt(kInts, value.ints[i]);
  } else {  // bool is an int in ONNX
    message.AddInt(kType, kIntType);
    message.AddInt(kI, value.i);
  }
  return message;
}

// The model whose graph has the op's node. The tensors have the schema's names.
inline std::string ModelOfNode(const Record& record, const Tensor* inputs,
                               const Attribute* attributes) {
  enum : unsigned { kInput = 1, kOutput = 2, kOpType = 4, kAttribute = 5, kDomain = 7 };
  constexpr unsigned kGraphNode = 1, kModelGraph = 7;
  const Schema& schema = record.schema;
  Message node;
  for (std::size_t i = 0; i < schema.input_count; ++i)
    node.Add(kInput, inputs[i].present ? schema.input(i).name.view() : "");
  for (std::size_t i = 0; i < schema.output_count; ++i) node.Add(kOutput, schema.outputs[i].view());
  node.Add(kOpType, schema.onnx_name.view());
  node.Add(kDomain, record.domain);
  for (std::size_t i = 0; i < schema.attribute_count; ++i)
    node.Add(kAttribute, AttributeProto(schema.attribute(i), attributes[i]));
  Message graph;
  graph.Add(kGraphNode, node);
  Message model;
  model.Add(kModelGraph, graph);
  return model.bytes;
}

}  // namespace twinop::ort
