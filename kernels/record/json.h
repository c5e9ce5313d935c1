// Writes a record as JSON at compile time: its texts, by their names in record.h, and where the op
// runs. It lies in the library's ELF section `.twinop`, from which tools read ops and dtypes
// without loading the library (twinop/libraries/library.py). twinop/record/schema_text.py parses
// the texts, as it does those of ops that are declared in Python.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "twinop/record/op_spec.h"
#include "twinop/record/record.h"

namespace twinop {

class JsonWriter {
 public:
  static constexpr std::size_t kCapacity = 16384;

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
  // A text of the record, unless it says nothing.
  constexpr JsonWriter& Text(std::string_view name, std::string_view text) {
    return text.empty() ? *this : String(name).Raw(":").String(text).Raw(",");
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

constexpr JsonWriter WriteJson(const Record& record, const OpSpec& op) {
  JsonWriter json;
  json.Raw("{")
      .Text("schema", record.schema_text)
      .Text("dtypes", record.dtypes_text)
      .Text("shapes", record.shapes_text)
      .Text("sizes", record.sizes_text)
      .Text("input_shapes", record.input_shapes_text)
      .Text("in_place", record.in_place_text)
      .Text("choices", record.choices_text)
      .Text("limits", record.limits_text)
      .Text("gradient", record.gradient_text)
      .Text("autocast", record.autocast_text)
      .Text("rows", record.rows_text)
      .Text("memory", record.memory_text);
  const bool on_cpu = op.cpu != nullptr || record.body_model != nullptr,
             on_cuda = op.cuda != nullptr;
  return json.Raw("\"elementwise\":")
      .Raw(record.is_elementwise ? "true" : "false")
      .Raw(",\"devices\":[")
      .Raw(on_cpu ? "\"cpu\"" : "")
      .Raw(on_cpu && on_cuda ? "," : "")
      .Raw(on_cuda ? "\"cuda\"]}" : "]}");
}

// The text, cut to its size, and a NUL, which separates it from the text of the next object.
template <std::size_t N>
constexpr std::array<char, N + 1> CutJson(const JsonWriter& json) {
  std::array<char, N + 1> text{};
  for (std::size_t i = 0; i < N; ++i) text[i] = json[i];
  return text;
}

}  // namespace twinop
