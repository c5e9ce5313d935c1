// Registers an op. An op joins a library when its object file is linked: the linker gathers the
// ops' entries in the section `twinop_ops`, and their records as JSON in the section `.twinop`.
//
// An op's header (kernels/ops/relu.h) is compiled twice (cmake/TwinopOp.cmake): by the C++ compiler
// for the record and the CPU launcher, and by nvcc for the CUDA launcher.
#pragma once

#include "kernels/record/arguments.h"
#include "kernels/record/json.h"
#include "kernels/record/record.h"
#include "kernels/record/validate.h"
#if defined(__CUDACC__)
#include "kernels/primitives/device_guard.cuh"
#endif

#if defined(TWINOP_WITH_CUDA)
#define TWINOP_CUDA_LAUNCHER(id) id##_cuda
#else
#define TWINOP_CUDA_LAUNCHER(id) nullptr
#endif

// TWINOP_PART(id)(code) is the code if the op's CUDA code belongs to this object file. The forward
// and the backward ops of a header become one object file each (cmake/TwinopOp.cmake), because the
// first call of an op loads the code of its whole object file. The generated source defines
// TWINOP_PART_<id> for some of the ops and TWINOP_OTHER_PARTS for the others.
#define TWINOP_KEEP(...) __VA_ARGS__
#define TWINOP_DROP(...)
#if !defined(TWINOP_OTHER_PARTS)
#define TWINOP_OTHER_PARTS TWINOP_KEEP
#endif
#define TWINOP_SECOND(first, second, ...) second
#define TWINOP_FIND_PART(part) TWINOP_SECOND(part, TWINOP_OTHER_PARTS, )
#define TWINOP_PART(id) TWINOP_FIND_PART(TWINOP_PART_##id)

// TWINOP_OP(id, record, launcher), in namespace twinop, registers an op:
//
//   id        the op's name, as in the schema
//   record    a Record (record.h)
//   launcher  a function of the call, which is `const Call&` or `const CallOf<Op>&` (arguments.h).
//             Both compilers compile it. Code that differs between the devices stands in
//             `#if defined(__CUDACC__)`.
//
// TWINOP_CPU_OP registers an op without a CUDA kernel. The macros of kernels/elementwise.h and
// kernels/rowwise.h derive the launcher from a functor.
#define TWINOP_RECORD(id, record)                                                                \
  namespace id##_op {                                                                            \
    struct Op;                                                                                   \
    constexpr Record kRecord = record;                                                           \
    struct Op {                                                                                  \
      static constexpr const Record& kRecord = id##_op::kRecord;                                 \
    };                                                                                           \
    static_assert(kRecord.schema.name.view() == #id, "the schema has another name than the op"); \
  }

#if defined(__CUDACC__)
#define TWINOP_OP(id, record, ...)                                                               \
  TWINOP_PART(id)                                                                                \
  (TWINOP_RECORD(id, record) Status id##_cuda(const Call& call) {                                \
    return OnDevice(call,                                                                        \
                    [](const Call& call) { return __VA_ARGS__(NamedCall<id##_op::Op>(call)); }); \
  })
#define TWINOP_CPU_OP(id, record, ...)
#else
#define TWINOP_OP(id, record, ...)    \
  TWINOP_RECORD(id, record)           \
  Status id##_cuda(const Call& call); \
  TWINOP_ENTRY(id, TWINOP_CUDA_LAUNCHER(id), __VA_ARGS__)
#define TWINOP_CPU_OP(id, record, ...) \
  TWINOP_RECORD(id, record)            \
  TWINOP_ENTRY(id, nullptr, __VA_ARGS__)
#define TWINOP_ENTRY(id, cuda_launcher, ...)                                                      \
  namespace id##_op {                                                                             \
    inline Status LaunchOnCpu(const Call& call) { return __VA_ARGS__(NamedCall<Op>(call)); }      \
    constexpr Record kEntry = kRecord.cpu(CLaunch<LaunchOnCpu>()).cuda(CLaunch<cuda_launcher>()); \
    static_assert(Validate(kEntry));                                                              \
    constexpr JsonWriter kJson = WriteJson(kEntry);                                               \
    [[gnu::section(".twinop"), gnu::used]] constexpr auto kText = CutJson<kJson.size()>(kJson);   \
    constexpr twinop_op kOp = OpOf(kEntry);                                                       \
    [[gnu::section("twinop_ops"), gnu::used]] const twinop_op* const kPlace = &kOp;               \
  }
#endif

namespace twinop {

// A launcher as a C function, or null.
template <Launcher kLauncher>
constexpr twinop_launch CLaunch() {
  if constexpr (kLauncher == nullptr) {
    return nullptr;
  } else {
    return [](const twinop_call* call, twinop_error* error) -> std::int32_t {
      return AtBoundary(error, [call] { return kLauncher(FromC(call)); });
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
          record.destroy_state};
}

}  // namespace twinop
