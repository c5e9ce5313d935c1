// The call that an adapter hands to a launcher: views of the framework's tensors, attributes, and
// where to run.
#pragma once

#include <algorithm>
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

// What is known of each dtype: its name here, in the C interface, and in NumPy and torch; its type
// in C++ (math/numeric.h); bytes; the numbers of ONNX's TensorProto.DataType and of DLPack's
// DLDataTypeCode.
#define TWINOP_DTYPES(F)                                              \
  F(kFloat32, FLOAT32, float32, float, 4, 1, 2)                       \
  F(kFloat16, FLOAT16, float16, Half, 2, 10, 2)                       \
  F(kBFloat16, BFLOAT16, bfloat16, BFloat16, 2, 16, 4)                \
  F(kFloat64, FLOAT64, float64, double, 8, 11, 2)                     \
  F(kInt8, INT8, int8, std::int8_t, 1, 3, 0)                          \
  F(kInt16, INT16, int16, std::int16_t, 2, 5, 0)                      \
  F(kInt32, INT32, int32, std::int32_t, 4, 6, 0)                      \
  F(kInt64, INT64, int64, std::int64_t, 8, 7, 0)                      \
  F(kUInt8, UINT8, uint8, std::uint8_t, 1, 2, 1)                      \
  F(kBool, BOOL, bool, bool, 1, 9, 6)                                 \
  F(kComplex64, COMPLEX64, complex64, NoType, 8, 14, 5)               \
  F(kComplex128, COMPLEX128, complex128, NoType, 16, 15, 5)           \
  F(kUInt16, UINT16, uint16, std::uint16_t, 2, 4, 1)                  \
  F(kUInt32, UINT32, uint32, std::uint32_t, 4, 12, 1)                 \
  F(kUInt64, UINT64, uint64, std::uint64_t, 8, 13, 1)                 \
  F(kFloat8E4M3, FLOAT8_E4M3FN, float8_e4m3fn, Float8E4M3, 1, 17, 10) \
  F(kFloat8E5M2, FLOAT8_E5M2, float8_e5m2, Float8E5M2, 1, 19, 12)

enum class DType : std::int32_t {
  kNone = TWINOP_NONE,
#define TWINOP_DTYPE(name, c_name, ...) name = TWINOP_##c_name,
  TWINOP_DTYPES(TWINOP_DTYPE)
#undef TWINOP_DTYPE
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::size_t size;
  int onnx, dlpack;
};
inline constexpr DTypeInfo kDTypes[] = {
    {DType::kNone, "unsupported", 0, 0, 3},  // to DLPack: opaque
#define TWINOP_DTYPE(name, c_name, text, type, ...) {DType::name, #text, __VA_ARGS__},
    TWINOP_DTYPES(TWINOP_DTYPE)
#undef TWINOP_DTYPE
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
  // Contiguous.
  constexpr Tensor(void* data, const std::int64_t* sizes, std::size_t rank, std::int64_t numel,
                   DType dtype)
      : twinop_tensor{data, sizes, nullptr, numel, rank, dtype, 1} {}

  bool HasSizes(const std::int64_t* others, std::size_t other_rank) const {
    return rank == other_rank && std::equal(sizes, sizes + rank, others);
  }
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
