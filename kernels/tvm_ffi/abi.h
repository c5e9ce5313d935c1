// The part of tvm-ffi's C ABI that calls need. The layouts are those of the C API of apache-tvm-ffi
// 0.1, and of DLPack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace twinop::tvm_ffi {

// TVMFFITypeIndex. From kObject on, a value is a pointer to an Object.
inline constexpr std::int32_t kNone = 0, kInt = 1, kBool = 2, kFloat = 3, kDLTensor = 7,
                              kRawString = 8, kObject = 64, kString = 65, kError = 67, kShape = 69,
                              kFirstDynamic = 128;

// The low half of the count has the strong references, the high half the weak ones. All strong ones
// together hold a weak one.
struct Object {
  std::uint64_t references = kWeak + 1;
  std::int32_t type = kObject;
  std::uint32_t padding = 0;
  void (*deleter)(void* self, int flags) = nullptr;

  static constexpr std::uint64_t kWeak = std::uint64_t{1} << 32;
};

struct Any {
  std::int32_t type = kNone;
  std::uint32_t padding = 0;
  union {
    std::int64_t integer = 0;
    double number;
    const void* pointer;
    const char* text;
    Object* object;
  };
};

struct Bytes {
  const char* data = nullptr;
  std::size_t size = 0;
};

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Device {
  std::int32_t type, index;
};
inline constexpr std::int32_t kCpuDevice = 1, kCudaDevice = 2;

struct DLTensor {
  void* data;
  Device device;
  std::int32_t rank;
  DataType dtype;
  const std::int64_t* sizes;
  const std::int64_t* strides;
  std::uint64_t offset;
};

using Function = std::int32_t (*)(void* self, const Any* arguments, std::int32_t count,
                                  Any* result);

// What a call and the C functions share, for each thread (runtime.cpp). SetStream sets the stream
// that TVMFFIEnvGetStream gives, and returns the one before. TakeError returns the text of the
// error that the last function raised.
void* SetStream(void* stream);
std::string TakeError();
void Release(Object* object);

}  // namespace twinop::tvm_ffi
