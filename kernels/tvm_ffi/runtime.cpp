// The C functions of libtvm_ffi that functions in object files call. The linker takes them for
// libraries with such objects, and no library exports them: tvm-ffi in the same process has its
// own.
#include <atomic>
#include <string>
#include <string_view>
#include <utility>

#include "twinop/tvm_ffi/abi.h"

#pragma GCC visibility push(hidden)

namespace twinop::tvm_ffi {
namespace {

// Of a thread. They need no destructor: a library may be gone before its threads.
thread_local void* stream = nullptr;
thread_local Object* raised = nullptr;

// A string, which has the first text only, or an error: its kind, message and backtrace.
struct Texts : Object {
  Bytes text, message, backtrace;
  void (*update_backtrace)(void* self, const Bytes* text, std::int32_t mode) = [](auto...) {};
  void *cause = nullptr, *context = nullptr;
  std::string own[2];

  Texts(std::int32_t index, std::string first, std::string second)
      : own{std::move(first), std::move(second)} {
    type = index;
    text = {own[0].data(), own[0].size()};
    message = {own[1].data(), own[1].size()};
    deleter = [](void* self, int flags) {
      if ((flags & 2) != 0) delete static_cast<Texts*>(static_cast<Object*>(self));
    };
  }
};

void Raise(std::string kind, std::string message) {
  Release(std::exchange(raised, new Texts(kError, std::move(kind), std::move(message))));
}

int Give(std::string text, Any* out) {
  *out = {};
  out->type = kString;
  out->object = new Texts(kString, std::move(text), {});
  return 0;
}

// TVMFFITypeInfo, of a type without ancestors and without reflection.
struct TypeInfo {
  std::int32_t index, depth = 0;
  Bytes key;
  std::uint64_t others[6] = {};

  constexpr TypeInfo(std::int32_t index, std::string_view name)
      : index(index), key{name.data(), name.size()} {}
};

}  // namespace

void* SetStream(void* wanted) { return std::exchange(stream, wanted); }

void Release(Object* object) {
  if (object == nullptr) return;
  const std::uint64_t before = __atomic_fetch_sub(&object->references, 1, __ATOMIC_ACQ_REL);
  if (static_cast<std::uint32_t>(before) != 1) return;
  if (before == Object::kWeak + 1) return object->deleter(object, 3);
  object->deleter(object, 1);
  if (__atomic_fetch_sub(&object->references, Object::kWeak, __ATOMIC_ACQ_REL) == Object::kWeak)
    object->deleter(object, 2);
}

std::string TakeError() {
  Object* const error = std::exchange(raised, nullptr);
  if (error == nullptr) return "the function failed, and raised no error";
  const auto* cell = static_cast<const Texts*>(error);  // the fields of an error of any code
  const Bytes &kind = cell->text, &message = cell->message;
  std::string said(kind.data, kind.size);
  said.append(": ").append(message.data, message.size);
  Release(error);
  return said;
}

}  // namespace twinop::tvm_ffi

using namespace twinop::tvm_ffi;

extern "C" {

void* TVMFFIEnvGetStream(std::int32_t device_type, std::int32_t) {
  return device_type == kCudaDevice ? stream : nullptr;
}

int TVMFFIObjectIncRef(void* object) {
  __atomic_fetch_add(&static_cast<Object*>(object)->references, 1, __ATOMIC_RELAXED);
  return 0;
}

int TVMFFIObjectDecRef(void* object) {
  Release(static_cast<Object*>(object));
  return 0;
}

void TVMFFIErrorSetRaised(void* error) {
  TVMFFIObjectIncRef(error);
  Release(std::exchange(raised, static_cast<Object*>(error)));
}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) { Raise(kind, message); }

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, std::int32_t count) {
  std::string message;
  for (std::int32_t i = 0; i < count; ++i) message += parts[i] == nullptr ? "" : parts[i];
  Raise(kind, std::move(message));
}

void TVMFFIErrorMoveFromRaised(void** result) { *result = std::exchange(raised, nullptr); }

const Bytes* TVMFFIBacktrace(const char*, int, const char*, int) {
  static constexpr Bytes kNothing{"", 0};
  return &kNothing;
}

int TVMFFIStringFromByteArray(const Bytes* text, Any* out) {
  return Give(std::string(text->data, text->size), out);
}

int TVMFFIDataTypeToString(const DataType* type, Any* out) {
  constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string name = type->code < 7 ? kNames[type->code] : "float";
  return Give(type->code == 6 ? name : name + std::to_string(type->bits), out);
}

// Each type of the objects' code asks once, when the library is loaded.
std::int32_t TVMFFITypeGetOrAllocIndex(const Bytes*, std::int32_t index, std::int32_t,
                                       std::int32_t slots, std::int32_t, std::int32_t parent) {
  static std::atomic<std::int32_t> next{kFirstDynamic};
  if (parent == -2) return -2;  // the question whether there is such a type
  return index >= 0 ? index : next.fetch_add(1 + slots);
}

// Functions ask for the names of what they get, for their messages.
const TypeInfo* TVMFFIGetTypeInfo(std::int32_t index) {
  static constexpr TypeInfo kTypes[] = {
      {0, "None"},     {1, "int"},    {2, "bool"},      {3, "float"},       {4, "void*"},
      {5, "DataType"}, {6, "Device"}, {7, "DLTensor*"}, {8, "const char*"}, {kObject, "object"}};
  return &kTypes[index >= 0 && index <= kRawString ? index : kRawString + 1];
}

// Of CuTe DSL's runtime, by which its objects report CUDA's errors.
void CuteDSLRT_TVMFFISetRaisedCudaError(const void*, std::int32_t code) {
  Raise("CUDAError", "code " + std::to_string(code));
}

}  // extern "C"
