// Reads a node's attributes when its kernel is created.
#include "ort_customop/api.h"

namespace twinop::ort {
namespace {

using Getter = bool (*)(const OrtApi*, const OrtKernelInfo*, const char* name, Attribute*,
                        AttributeStorage*);

bool GetInt(const OrtApi* api, const OrtKernelInfo* info, const char* name, Attribute* value,
            AttributeStorage*) {
  return Ok(api, api->KernelInfoGetAttribute_int64(info, name, &value->i));
}

bool GetFloat(const OrtApi* api, const OrtKernelInfo* info, const char* name, Attribute* value,
              AttributeStorage*) {
  float narrow = 0;
  if (!Ok(api, api->KernelInfoGetAttribute_float(info, name, &narrow))) return false;
  value->f = narrow;
  return true;
}

bool GetString(const OrtApi* api, const OrtKernelInfo* info, const char* name, Attribute* value,
               AttributeStorage* storage) {
  std::size_t size = 0;
  // The first call asks for the size only. Some versions return a failure with it.
  Ok(api, api->KernelInfoGetAttribute_string(info, name, nullptr, &size));
  if (size == 0) return false;
  std::string& text = storage->text;
  text.resize(size);
  if (!Ok(api, api->KernelInfoGetAttribute_string(info, name, text.data(), &size))) return false;
  text.resize(size - 1);  // without the NUL
  value->set_text(text);
  return true;
}

bool GetIntList(const OrtApi* api, const OrtKernelInfo* info, const char* name, Attribute* value,
                AttributeStorage* storage) {
  std::size_t count = 0;
  Ok(api, api->KernelInfoGetAttributeArray_int64(info, name, nullptr, &count));
  if (count == 0) return false;
  value->count = count;
  if (count > kMaxList) return true;  // the caller refuses it
  value->ints = storage->ints;
  return Ok(api, api->KernelInfoGetAttributeArray_int64(info, name, storage->ints, &count));
}

struct Reader {
  Kind kind;
  const char* onnx_kind;
  Getter get;
};
constexpr Reader kReaders[] = {{Kind::kInt, "an int", GetInt},
                               {Kind::kFloat, "a float", GetFloat},
                               {Kind::kString, "a string", GetString},
                               {Kind::kIntList, "a list of ints", GetIntList}};

const Reader& ReaderOf(Kind kind) {
  for (const Reader& reader : kReaders)
    if (reader.kind == kind) return reader;
  return kReaders[0];  // bool is an int in ONNX
}

}  // namespace

Status ReadAttributes(const OpSpec& record, const OrtApi* api, const OrtKernelInfo* info,
                      Attribute* values, AttributeStorage* storage) {
  for (std::size_t i = 0; i < record.attribute_count; ++i) {
    const Argument& argument = record.attribute(i);
    const std::string name(argument.name);
    const Reader& wanted = ReaderOf(argument.kind);
    if (!wanted.get(api, info, name.c_str(), &values[i], &storage[i])) {
      // ORT has one error code for a missing attribute and for one of another type. Try all types.
      for (const Reader& reader : kReaders) {
        Attribute other;
        AttributeStorage other_storage;
        if (reader.get(api, info, name.c_str(), &other, &other_storage))
          return Status::Error("attribute " + name + " is " + reader.onnx_kind + ", expected " +
                               wanted.onnx_kind);
      }
      if (!argument.has_default)
        return Status::Error("attribute " + name + " (" + std::string(KindName(argument.kind)) +
                             ") is missing and has no default");
      SetDefault(argument, &values[i], &storage[i]);
    }
    TWINOP_RETURN_IF_ERROR(CheckAttribute(record, i, values[i]));
  }
  return {};
}

}  // namespace twinop::ort
