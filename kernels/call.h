// What a binding hands to a launcher: views of the framework's tensors, attributes, where to run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/shape.h"
#include "kernels/status.h"

namespace twinop {

// ---------------------------------------------------------------------------------- element types

// Kernels exist for some of these; the others have a name so that an error can say what was given.
enum class DType : std::uint8_t {
  kNone,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // numpy's and torch's
  std::size_t size;       // bytes
};
inline constexpr DTypeInfo kDTypes[] = {
    {DType::kNone, "unsupported", 0},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat64, "float64", 8},
    {DType::kInt8, "int8", 1},
    {DType::kInt16, "int16", 2},
    {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},
    {DType::kUInt8, "uint8", 1},
    {DType::kBool, "bool", 1},
    {DType::kComplex64, "complex64", 8},
    {DType::kComplex128, "complex128", 16},
};

constexpr const DTypeInfo& Info(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }

constexpr DType DTypeNamed(std::string_view name) {
  for (const DTypeInfo& info : kDTypes)
    if (info.name == name && info.dtype != DType::kNone) return info.dtype;
  throw "a record names a dtype that does not exist";
}

// ---------------------------------------------------------------------------------- a call

// A view of a framework's tensor: nothing is owned. Inputs of an elementwise op may have any
// strides (0 where they are expanded), inputs of an op with `rows` those that Record::rows_text
// allows, all others are contiguous. Where all tensors of an elementwise call have one shape and
// one dense order, their strides are null whatever that order is.
struct Tensor {
  void* data = nullptr;  // null where an optional input is absent
  DType dtype = DType::kNone;
  std::size_t rank = 0;
  const std::int64_t* sizes = nullptr;
  const std::int64_t* strides = nullptr;  // in elements, zero or more; null: dense
  std::int64_t numel = 0;
  bool present = false;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  std::int64_t bytes() const { return numel * static_cast<std::int64_t>(Info(dtype).size); }
};

// Where a launch runs. `parallel_for` is the framework's own thread pool.
struct Context {
  using Range = void (*)(std::int64_t begin, std::int64_t end, void* argument);

  void* stream = nullptr;  // cudaStream_t; null on the CPU
  void (*parallel_for)(void* pool, std::int64_t count, std::int64_t grain, Range range,
                       void* argument) = nullptr;
  void* pool = nullptr;

  // Calls body(begin, end) over [0, count) in pieces of at least `grain`, on this thread if one is
  // enough.
  template <class Body>
  void ParallelFor(std::int64_t count, std::int64_t grain, const Body& body) const {
    if (count <= grain) return body(0, count);
    parallel_for(
        pool, count, grain,
        [](std::int64_t begin, std::int64_t end, void* argument) {
          (*static_cast<const Body*>(argument))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

struct Call {
  const Tensor* inputs = nullptr;         // in schema order, absent ones not `present`
  Tensor* outputs = nullptr;              // allocated by the binding
  const Attribute* attributes = nullptr;  // in schema order
  void* scratch = nullptr;  // Record::scratch bytes; aligned to 64 bytes, on CUDA to 256
  const Context* context = nullptr;
};

// Queues the work and returns: no allocation, no synchronize, no exception.
using Launcher = Status (*)(const Call& call);

}  // namespace twinop
