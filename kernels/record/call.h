// The call that an adapter hands to a launcher: views of the framework's tensors, attributes, and
// where to run.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "twinop/abi.h"
#include "twinop/record/shape.h"
#include "twinop/record/status.h"

namespace twinop {

// ---------------------------------------------------------------------------------- element types

enum class DType : std::int32_t {
  kNone = TWINOP_NONE,
  kFloat32 = TWINOP_FLOAT32,
  kFloat16 = TWINOP_FLOAT16,
  kBFloat16 = TWINOP_BFLOAT16,
  kFloat64 = TWINOP_FLOAT64,
  kInt8 = TWINOP_INT8,
  kInt16 = TWINOP_INT16,
  kInt32 = TWINOP_INT32,
  kInt64 = TWINOP_INT64,
  kUInt8 = TWINOP_UINT8,
  kBool = TWINOP_BOOL,
  kComplex64 = TWINOP_COMPLEX64,
  kComplex128 = TWINOP_COMPLEX128,
  kUInt16 = TWINOP_UINT16,
  kUInt32 = TWINOP_UINT32,
  kUInt64 = TWINOP_UINT64,
  kFloat8E4M3 = TWINOP_FLOAT8_E4M3FN,
  kFloat8E5M2 = TWINOP_FLOAT8_E5M2,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // as in NumPy and torch
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
    {DType::kUInt16, "uint16", 2},
    {DType::kUInt32, "uint32", 4},
    {DType::kUInt64, "uint64", 8},
    {DType::kFloat8E4M3, "float8_e4m3fn", 1},
    {DType::kFloat8E5M2, "float8_e5m2", 1},
};

constexpr const DTypeInfo& Info(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }

constexpr DType DTypeNamed(std::string_view name) {
  for (const DTypeInfo& info : kDTypes)
    if (info.name == name && info.dtype != DType::kNone) return info.dtype;
  throw "a record names a dtype that does not exist";
}

// ---------------------------------------------------------------------------------- a call

// A view of a framework's tensor. It owns nothing. Inputs of an elementwise op may have any strides
// (0 along expanded dimensions). Inputs of an op with `rows` may have the strides that
// Record::rows_text allows. All other tensors are contiguous. If all tensors of an elementwise call
// have one shape and one dense order, their strides are null, whatever that order is.
struct Tensor : twinop_tensor {
  constexpr Tensor() : twinop_tensor{} {}

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  std::int64_t bytes() const { return Times(numel, static_cast<std::int64_t>(Info(dtype).size)); }
};

// Keeps the first exception of the pieces of some work: none may leave a thread of a framework.
class FirstError {
 public:
  template <class Piece>
  void Run(const Piece& piece) noexcept {
    if (failed_) return;
    try {
      piece();
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }
  // Throws it, once all threads have ended.
  void Rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

// Where a launch runs. `parallel_for` is the framework's own thread pool.
struct Context : twinop_context {
  using Range = twinop_range;

  constexpr Context() : twinop_context{} {}

  // Calls body(begin, end) over [0, count) in pieces of at least `grain`. One piece runs on this
  // thread. What a piece throws, on any thread, is thrown here once all others have ended.
  template <class Body>
  void ParallelFor(std::int64_t count, std::int64_t grain, const Body& body) const {
    if (count <= grain) return body(0, count);
    struct Work : FirstError {
      const Body& body;
      explicit Work(const Body& body) : body(body) {}
    } work(body);
    parallel_for(
        pool, count, grain,
        [](std::int64_t begin, std::int64_t end, void* argument) {
          Work& work = *static_cast<Work*>(argument);
          work.Run([&] { work.body(begin, end); });
        },
        &work);
    work.Rethrow();
  }
};

// The two compilers have types of their own for a call. A function of one may then have the name
// and the arguments of a function of the other: without that, the linker would keep one of the two.
#if defined(__CUDACC__)
inline namespace cuda_code {
#else
inline namespace cpu_code {
#endif

struct Call : twinop_call {
  constexpr Call() : twinop_call{} {}
};

// A call of the op whose record is Op::kRecord: its arguments have names (arguments.h).
template <class Op>
struct CallOf : Call {};

}  // namespace

// Queues the work and returns. It neither allocates, nor synchronizes, nor throws.
using Launcher = Status (*)(const twinop_call* call);

inline const Call& FromC(const twinop_call* call) { return static_cast<const Call&>(*call); }
template <class Op>
const CallOf<Op>& NamedCall(const Call& call) {
  static_assert(sizeof(CallOf<Op>) == sizeof(Call));
  return static_cast<const CallOf<Op>&>(call);
}

// Receives the text of a failure.
struct ErrorText : twinop_error {
  std::string text;

  ErrorText() : twinop_error{Set} {}

 private:
  static void Set(twinop_error* self, const char* text, std::size_t size) {
    static_cast<ErrorText*>(self)->text.assign(text, size);
  }
};

// Runs `body`, which returns a Status, at the C boundary. No C++ exception crosses it.
template <class Body>
std::int32_t AtBoundary(twinop_error* error, Body&& body) noexcept {
  const auto fail = [error](std::string_view text) {
    error->set(error, text.data(), text.size());
    return 1;
  };
  try {
    const Status status = body();
    return __builtin_expect(status.ok(), true) ? 0 : fail(status.message());
  } catch (const std::exception& exception) {
    return fail(exception.what());
  } catch (const char* reason) {
    return fail(reason);
  } catch (...) {
    return fail("an exception that is not a std::exception");
  }
}

}  // namespace twinop
