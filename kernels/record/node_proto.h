// Writes nodes and models in ONNX's protobuf format. Two protobuf messages one after the other are
// read as one that has the fields of both, so bytes behind a model add to its graph.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twinop/record/call.h"

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

// Numbers of fields.
struct ModelField {
  enum : unsigned { kIrVersion = 1, kGraph = 7, kOpset = 8 };
};
struct GraphField {
  enum : unsigned { kNode = 1, kName = 2, kInitializer = 5, kInput = 11, kOutput = 12 };
};
struct AttributeField {
  enum : unsigned { kName = 1, kFloat = 2, kInt = 3, kText = 4, kInts = 8, kType = 20 };
};

// An attribute without a value. Its type is a number of AttributeProto.AttributeType.
inline Message AttributeOfType(std::string_view name, int type) {
  Message attribute;
  attribute.Add(AttributeField::kName, name);
  attribute.AddInt(AttributeField::kType, type);
  return attribute;
}
inline Message FloatAttribute(std::string_view name, double value) {
  Message attribute = AttributeOfType(name, 1);
  attribute.AddFloat(AttributeField::kFloat, static_cast<float>(value));
  return attribute;
}
inline Message IntAttribute(std::string_view name, std::int64_t value) {
  Message attribute = AttributeOfType(name, 2);
  attribute.AddInt(AttributeField::kInt, value);
  return attribute;
}
inline Message TextAttribute(std::string_view name, std::string_view value) {
  Message attribute = AttributeOfType(name, 3);
  attribute.Add(AttributeField::kText, value);
  return attribute;
}
inline Message IntsAttribute(std::string_view name, const std::vector<std::int64_t>& values) {
  Message attribute = AttributeOfType(name, 7);
  for (const std::int64_t value : values) attribute.AddInt(AttributeField::kInts, value);
  return attribute;
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
