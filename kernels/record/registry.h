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
#include "twinop/record/record.h"
#include "twinop/record/validate.h"
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
#define TWINOP_RECORD(id, record, is_on_cuda)                                                    \
  namespace id##_op {                                                                            \
    struct Op;                                                                                   \
    constexpr Record kRecord = record;                                                           \
    struct Op {                                                                                  \
      static constexpr const Record& kRecord = id##_op::kRecord;                                 \
      static constexpr bool kIsOnCuda = is_on_cuda;                                              \
    };                                                                                           \
    static_assert(kRecord.schema.name.view() == #id, "the schema has another name than the op"); \
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
            if (call.counts != nullptr) return kRecord.count_launch(&call);         \
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
        if (call->counts != nullptr) return kRecord.count_launch(call);              \
      return CallLauncher(kLauncher, NamedCall<Op>(FromC(call)));                    \
    }                                                                                \
  }
#define TWINOP_ENTRY(id, cpu_launcher, cuda_launcher)                                              \
  namespace id##_op {                                                                              \
    constexpr Record kEntry = kRecord.cpu(CLaunch<cpu_launcher>()).cuda(CLaunch<cuda_launcher>()); \
    static_assert(                                                                                 \
        kEntry.cpu_launch != nullptr || kEntry.cuda_launch != nullptr || kEntry.body_pieces != 0,  \
        "a TWINOP_CUDA_OP has no kernel in a build without CUDA: nvcc is missing");                \
    static_assert(Validate(kEntry));                                                               \
    constexpr JsonWriter kJson = WriteJson(kEntry);                                                \
    [[gnu::section(".twinop"), gnu::used]] constexpr auto kText = CutJson<kJson.size()>(kJson);    \
    constexpr twinop_op kOp = OpOf(kEntry);                                                        \
    [[gnu::section("twinop_ops"), gnu::used]] const twinop_op* const kPlace = &kOp;                \
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

// The entry of an op in the library's table.
constexpr twinop_op OpOf(const Record& record) {
  return {sizeof(twinop_op),
          record.schema.text.data(),
          record.dtypes_text.data(),
          record.shapes_text.data(),
          record.input_shapes_text.data(),
          record.limits_text.data(),
          record.in_place_text.data(),
          record.choices_text.data(),
          record.rows_text.data(),
          record.is_elementwise ? "elementwise" : "contiguous",
          record.memory_text.data(),
          record.cpu_launch,
          record.cuda_launch,
          record.scratch_size,
          record.create_state,
          record.destroy_state,
          record.body_model,
          record.body_pieces,
          record.sizes_text.data(),
          record.two_pass};
}

}  // namespace twinop
