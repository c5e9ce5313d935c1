// Writes nodes and models in ONNX's protobuf format. Two protobuf messages one after the other are
// read as one that has the fields of both, so bytes behind a model add to its graph.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "twinop/record/record.h"

namespace twinop {

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

inline Message AttributeProto(std::string_view name, Kind kind, const Attribute& value) {
  enum : unsigned { kName = 1, kF = 2, kI = 3, kS = 4, kInts = 8, kType = 20 };
  enum { kFloatType = 1, kIntType = 2, kStringType = 3, kIntsType = 7 };
  Message message;
  message.Add(kName, name);
  if (kind == Kind::kFloat) {
    message.AddInt(kType, kFloatType);
    message.AddFloat(kF, static_cast<float>(value.f));
  } else if (kind == Kind::kString) {
    message.AddInt(kType, kStringType);
    message.Add(kS, value.text());
  } else if (kind == Kind::kIntList) {
    message.AddInt(kType, kIntsType);
    for (std::size_t i = 0; i < value.count; ++i) message.AddInt(kInts, value.ints[i]);
  } else {  // bool is an int in ONNX
    message.AddInt(kType, kIntType);
    message.AddInt(kI, value.i);
  }
  return message;
}

inline Message NodeProto(std::string_view op, std::string_view domain,
                         const std::vector<std::string_view>& inputs,
                         const std::vector<std::string_view>& outputs,
                         const std::vector<Message>& attributes) {
  enum : unsigned { kInput = 1, kOutput = 2, kOpType = 4, kAttribute = 5, kDomain = 7 };
  Message node;
  for (std::string_view input : inputs) node.Add(kInput, input);
  for (std::string_view output : outputs) node.Add(kOutput, output);
  node.Add(kOpType, op);
  node.Add(kDomain, domain);
  for (const Message& attribute : attributes) node.Add(kAttribute, attribute);
  return node;
}

enum : unsigned {  // fields of GraphProto and ModelProto
  kGraphNode = 1,
  kGraphName = 2,
  kGraphInitializer = 5,
  kGraphInput = 11,
  kGraphOutput = 12,
  kModelIrVersion = 1,
  kModelGraph = 7,
  kModelOpset = 8
};

// The model whose graph has the op's node. The tensors have the schema's names.
inline std::string ModelOfNode(const Record& record, const Tensor* inputs,
                               const Attribute* values) {
  const Schema& schema = record.schema;
  std::vector<std::string_view> given, outputs;
  std::vector<Message> attributes;
  for (std::size_t i = 0; i < schema.input_count; ++i)
    given.push_back(inputs[i].present ? schema.input(i).name.view() : "");
  for (std::size_t i = 0; i < schema.output_count; ++i) outputs.push_back(schema.outputs[i].view());
  for (std::size_t i = 0; i < schema.attribute_count; ++i) {
    const Argument& argument = schema.attribute(i);
    attributes.push_back(AttributeProto(argument.name.view(), argument.kind, values[i]));
  }
  Message graph;
  graph.Add(kGraphNode,
            NodeProto(schema.onnx_name.view(), record.domain, given, outputs, attributes));
  Message model;
  model.Add(kModelGraph, graph);
  return model.bytes;
}

// An input or output of a graph, of any shape.
inline Message ValueProto(std::string_view name, DType dtype) {
  enum : unsigned { kName = 1, kType = 2, kTensorType = 1, kElementType = 1 };
  Message tensor, type, value;
  tensor.AddInt(kElementType, Info(dtype).onnx);
  type.Add(kTensorType, tensor);
  value.Add(kName, name);
  value.Add(kType, type);
  return value;
}

}  // namespace twinop
