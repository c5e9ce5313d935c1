// Registers an op. An op joins a library when its object file is linked: the linker gathers the
// ops' entries in the section `twinop_ops`, and their records as JSON in the section `.twinop`.
//
// An op's header (kernels/ops/relu.h) is compiled twice (cmake/TwinopOp.cmake): by the C++ compiler
// for the record and the CPU launcher, and by nvcc for the CUDA launcher.
#pragma once

#include <string_view>
#include <type_traits>

#include "twinop/record/arguments.h"
#include "twinop/record/json.h"
#include "twinop/record/parse.h"
#if defined(__CUDACC__)
#include "twinop/primitives/launch.cuh"
#endif

// TWINOP_OP(id, record, launcher), in namespace twinop, registers an op:
//
//   id        the op's name, as in the schema
//   record    a Record (record.h)
//   launcher  a function of the call, which is `const Call&` or `const CallOf<Op>&` (arguments.h).
//             Both compilers compile it. Code that differs between the devices stands in
//             `#if defined(__CUDACC__)`.
//
// TWINOP_CPU_OP registers an op without a CUDA kernel, TWINOP_CUDA_OP one without a CPU kernel,
// whose launcher only nvcc compiles. The macros of kernels/elementwise.h and kernels/rowwise.h
// derive the launcher from a functor; kernels/kernel.h has what other launchers need.
#define TWINOP_RECORD(id, record, is_on_cuda)                    \
  namespace id##_op {                                            \
    struct Op;                                                   \
    constexpr Record kTexts = record;                            \
    constexpr OpSpec kRecord = Parse(kTexts);                    \
    struct Op {                                                  \
      static constexpr const OpSpec& kRecord = id##_op::kRecord; \
      static constexpr bool kIsOnCuda = is_on_cuda;              \
    };                                                           \
    static_assert(std::string_view(kRecord.name) == #id,         \
                  "the schema has another name than the op");    \
  }

// Declares the CUDA launcher of an op, which other ops of its library may call.
#define TWINOP_LAUNCH_ON_CUDA(id)                 \
  namespace id##_op {                             \
    template <bool kHere>                         \
    Status LaunchOnCuda(const twinop_call* call); \
  }

#if defined(__CUDACC__)
#define TWINOP_OP(id, record, ...)                                                  \
  TWINOP_RECORD(id, record, true)                                                   \
  namespace id##_op {                                                               \
    template <bool kHere>                                                           \
    Status LaunchOnCuda(const twinop_call* call) {                                  \
      if constexpr (kHere) {                                                        \
        return OnDevice(FromC(call), [](const Call& call) {                         \
          if constexpr (kHere && kRecord.two_pass)                                  \
            if (call.counts != nullptr) return kTexts.count_launch(&call);          \
          return __VA_ARGS__(NamedCall<std::conditional_t<kHere, Op, void>>(call)); \
        });                                                                         \
      } else {                                                                      \
        return {};                                                                  \
      }                                                                             \
    }                                                                               \
    template Status LaunchOnCuda<InThisPart(#id)>(const twinop_call* call);         \
  }
#define TWINOP_CUDA_OP TWINOP_OP
#define TWINOP_CPU_OP(id, record, ...)
#else
#if defined(TWINOP_WITH_CUDA)
#define TWINOP_CUDA_LAUNCHER LaunchOnCuda<true>
#else
#define TWINOP_CUDA_LAUNCHER nullptr
#endif
#define TWINOP_OP(id, record, ...)      \
  TWINOP_RECORD(id, record, true)       \
  TWINOP_LAUNCH_ON_CUDA(id)             \
  TWINOP_LAUNCH_ON_CPU(id, __VA_ARGS__) \
  TWINOP_ENTRY(id, LaunchOnCpu, TWINOP_CUDA_LAUNCHER)
#define TWINOP_CPU_OP(id, record, ...)  \
  TWINOP_RECORD(id, record, false)      \
  TWINOP_LAUNCH_ON_CPU(id, __VA_ARGS__) \
  TWINOP_ENTRY(id, LaunchOnCpu, nullptr)
#define TWINOP_CUDA_OP(id, record, ...) \
  TWINOP_RECORD(id, record, true)       \
  TWINOP_LAUNCH_ON_CUDA(id)             \
  TWINOP_ENTRY(id, nullptr, TWINOP_CUDA_LAUNCHER)
#define TWINOP_LAUNCH_ON_CPU(id, ...)                                                \
  namespace id##_op {                                                                \
    constexpr auto kLauncher = [](const auto& call) -> decltype(__VA_ARGS__(call)) { \
      return __VA_ARGS__(call);                                                      \
    };                                                                               \
    inline Status LaunchOnCpu(const twinop_call* call) {                             \
      if constexpr (kRecord.two_pass)                                                \
        if (call->counts != nullptr) return kTexts.count_launch(call);               \
      return CallLauncher(kLauncher, NamedCall<Op>(FromC(call)));                    \
    }                                                                                \
  }
#define TWINOP_ENTRY(id, cpu_launcher, cuda_launcher)                                           \
  namespace id##_op {                                                                           \
    constexpr OpSpec kOp =                                                                      \
        WithLaunchers(kRecord, CLaunch<cpu_launcher>(), CLaunch<cuda_launcher>());              \
    static_assert(kOp.cpu != nullptr || kOp.cuda != nullptr || kOp.row_body != 0,               \
                  "a TWINOP_CUDA_OP has no kernel in a build without CUDA: nvcc is missing");   \
    constexpr JsonWriter kJson = WriteJson(kTexts, kOp);                                        \
    [[gnu::section(".twinop"), gnu::used]] constexpr auto kText = CutJson<kJson.size()>(kJson); \
    [[gnu::section("twinop_ops"), gnu::used]] const twinop_op* const kPlace = &kOp;             \
  }
#endif

namespace twinop {

// Whether this object file has the CUDA code of an op. cmake/TwinopOp.cmake compiles the forward
// and the backward ops of a header as one object file each, because the first call of an op loads
// the code of its whole object file. Without that definition an object file has all ops.
constexpr bool InThisPart([[maybe_unused]] std::string_view op) {
#if defined(TWINOP_BACKWARD_PART)
  constexpr std::string_view kSuffix = "_backward";
  const bool backward =
      op.size() > kSuffix.size() && op.substr(op.size() - kSuffix.size()) == kSuffix;
  return backward == (TWINOP_BACKWARD_PART == 1);
#else
  return true;
#endif
}

template <class Function, class Op>
Status CallLauncher(const Function& launcher, const CallOf<Op>& call) {
  constexpr bool kFits = std::is_invocable_r_v<Status, const Function&, const CallOf<Op>&>;
  static_assert(kFits,
                "a launcher is `template <class Op> Status Launch(const CallOf<Op>& call)`, or a "
                "function of `const Call&`");
  if constexpr (kFits) {
    return launcher(call);
  } else {
    return {};
  }
}

// A launcher as a C function, or null.
template <Launcher kLauncher>
constexpr twinop_launch CLaunch() {
  if constexpr (kLauncher == nullptr) {
    return nullptr;
  } else {
    return [](const twinop_call* call, twinop_error* error) -> std::int32_t {
      return AtBoundary(error, [call] { return kLauncher(call); });
    };
  }
}

// The domain of the library, which its TWINOP_LIBRARY (library.h) defines.
extern "C" [[gnu::weak, gnu::visibility("hidden")]] const char twinop_domain[];

// The entry of an op in the library's table.
constexpr OpSpec WithLaunchers(OpSpec op, twinop_launch cpu, twinop_launch cuda) {
  op.domain = twinop_domain;
  op.cpu = cpu;
  op.cuda = cuda;
  return op;
}

}  // namespace twinop
