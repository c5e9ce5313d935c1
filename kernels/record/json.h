// Writes a record as JSON at compile time. The text lies in the library's ELF section `.twinop`,
// from which tools read ops, dtypes and architectures without loading the library
// (twinop/libraries/library.py).
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "twinop/record/record.h"

namespace twinop {

class JsonWriter {
 public:
  static constexpr std::size_t kCapacity = 8192;

  constexpr JsonWriter& Raw(std::string_view text) {
    for (char c : text) Put(c);
    return *this;
  }
  constexpr JsonWriter& String(std::string_view text) {
    Put('"');
    for (char c : text) {
      if (c == '"' || c == '\\') Put('\\');
      Put(c);
    }
    Put('"');
    return *this;
  }
  constexpr JsonWriter& Key(std::string_view name) {
    if (text_[size_ - 1] != '{') Put(',');
    return String(name).Raw(":");
  }
  constexpr JsonWriter& Field(std::string_view name, std::string_view value) {
    return Key(name).String(value);
  }
  // Separates the entries of a list.
  constexpr JsonWriter& Next() {
    if (text_[size_ - 1] != '[') Put(',');
    return *this;
  }
  constexpr std::size_t size() const { return size_; }
  constexpr char operator[](std::size_t i) const { return text_[i]; }

 private:
  constexpr void Put(char c) {
    if (size_ == kCapacity) throw "a record's JSON is longer than JsonWriter::kCapacity";
    text_[size_++] = c;
  }
  char text_[kCapacity] = {};
  std::size_t size_ = 0;
};

constexpr JsonWriter WriteJson(const Record& record) {
  const Schema& schema = record.schema;
  JsonWriter json;
  json.Raw("{").Field("name", schema.name.view()).Field("onnx_name", schema.onnx_name.view());
  json.Field("schema", schema.text).Key("inputs").Raw("[");
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    bool optional = schema.input(i).kind == Kind::kOptionalTensor;
    json.Next().Raw("{").Field("name", schema.input(i).name.view());
    json.Key("optional").Raw(optional ? "true" : "false");
    if (schema.input(i).kind == Kind::kTensorList) json.Key("repeated").Raw("true");
    if (schema.input(i).alias != '\0') json.Key("written").Raw("true");
    json.Raw("}");
  }
  json.Raw("]").Key("attributes").Raw("[");
  for (std::size_t i = 0; i < schema.attribute_count; ++i) {
    const Argument& attribute = schema.attribute(i);
    json.Next()
        .Raw("{")
        .Field("name", attribute.name.view())
        .Field("kind", KindName(attribute.kind));
    if (attribute.has_default) json.Field("default", attribute.default_text);
    json.Raw("}");
  }
  json.Raw("]").Key("outputs").Raw("[");
  for (std::size_t i = 0; i < schema.output_count; ++i)
    json.Next().String(schema.outputs[i].view());
  json.Raw("]").Field("dtypes", record.dtypes_text).Field("shapes", record.shapes_text);
  json.Field("input_shapes", record.input_shapes_text).Field("limits", record.limits_text);
  json.Field("in_place", record.in_place_text).Field("choices", record.choices_text);
  json.Field("gradient", record.gradient_text).Field("autocast", record.autocast_text);
  json.Field("rows", record.rows_text).Field("memory", record.memory_text);
  if (!record.sizes_text.empty()) json.Field("sizes", record.sizes_text);
  json.Field("layout", record.is_elementwise ? "elementwise" : "contiguous")
      .Key("devices")
      .Raw("[");
  if (record.cpu_launch != nullptr || record.body_model != nullptr) json.Next().String("cpu");
  if (record.cuda_launch != nullptr) json.Next().String("cuda");
  json.Raw("]}");
  return json;
}

// The text, cut to its size, and a NUL, which separates it from the text of the next object.
template <std::size_t N>
constexpr std::array<char, N + 1> CutJson(const JsonWriter& json) {
  std::array<char, N + 1> text{};
  for (std::size_t i = 0; i < N; ++i) text[i] = json[i];
  return text;
}

}  // namespace twinop
