// Reads a node's attributes when its kernel is created.
#include "ort_customop/api.h"

namespace twinop::ort {
namespace {

// What ONNX calls the kinds of attributes. bool is an int there.
struct OnnxKind {
  Kind kind;
  const char* name;
};
constexpr OnnxKind kOnnxKinds[] = {{Kind::kInt, "an int"},
                                   {Kind::kFloat, "a float"},
                                   {Kind::kString, "a string"},
                                   {Kind::kIntList, "a list of ints"}};

// Whether the node has the attribute with this kind.
bool Read(const OrtApi* api, const OrtKernelInfo* info, const char* name, Kind kind,
          Attribute* value, AttributeStorage* storage) {
  float narrow = 0;
  std::size_t size = 0;
  switch (kind) {
    case Kind::kFloat:
      if (!Ok(api, api->KernelInfoGetAttribute_float(info, name, &narrow))) return false;
      value->f = narrow;
      return true;
    case Kind::kString:
      // The first call asks for the size only. Some versions return a failure with it.
      Ok(api, api->KernelInfoGetAttribute_string(info, name, nullptr, &size));
      storage->text.resize(size);
      if (size == 0 ||
          !Ok(api, api->KernelInfoGetAttribute_string(info, name, storage->text.data(), &size)))
        return false;
      storage->text.resize(size - 1);  // without the NUL
      value->set_text(storage->text);
      return true;
    case Kind::kIntList:
      if (!Ok(api, api->KernelInfoGetAttributeArray_int64(info, name, nullptr, &size)))
        return false;
      // Of an attribute of another kind, too, ORT says that it is an empty list.
      for (const Kind other : {Kind::kInt, Kind::kFloat, Kind::kString})
        if (size == 0 && Read(api, info, name, other, value, storage)) return false;
      value->count = size;
      value->ints = storage->ints;
      if (size == 0 || size > kMaxList) return true;  // the caller refuses a long one
      return Ok(api, api->KernelInfoGetAttributeArray_int64(info, name, storage->ints, &size));
    default:
      return Ok(api, api->KernelInfoGetAttribute_int64(info, name, &value->i));
  }
}

}  // namespace

Status ReadAttributes(const OpSpec& record, const OrtApi* api, const OrtKernelInfo* info,
                      Attribute* values, AttributeStorage* storage) {
  for (std::size_t i = 0; i < record.attribute_count; ++i) {
    const Argument& argument = record.attribute(i);
    const std::string name(argument.name);
    if (!Read(api, info, argument.name, argument.kind, &values[i], &storage[i])) {
      // ORT has one error code for a missing attribute and for one of another type. Try all types.
      const char* expected = kOnnxKinds[0].name;
      for (const OnnxKind& each : kOnnxKinds)
        if (each.kind == argument.kind) expected = each.name;
      for (const OnnxKind& each : kOnnxKinds) {
        Attribute other;
        AttributeStorage other_storage;
        if (Read(api, info, argument.name, each.kind, &other, &other_storage))
          return Status::Error("attribute " + name + " is " + each.name + ", expected " + expected);
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
