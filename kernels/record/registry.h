// How an op joins a library: linking its object file is all. The linker gathers the entries of the
// objects at hand into the section `twinop_ops`, and the records' JSON into `.twinop`.
//
// An op's header (kernels/ops/relu.h) is compiled twice (cmake/TwinopOp.cmake): by the C++ compiler
// for the record and the CPU launcher, and by nvcc for the CUDA launcher.
#pragma once

#include "kernels/record/check.h"
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

// TWINOP_PART(id)(code): the code, if the CUDA code of the op belongs to this object file. The
// forward and the backward ops of a header become one object file each (cmake/TwinopOp.cmake),
// because the first call of an op loads the code of its whole object file. The generated source
// defines TWINOP_PART_<id> for some of the ops and TWINOP_OTHER_PARTS for the others.
#define TWINOP_KEEP(...) __VA_ARGS__
#define TWINOP_DROP(...)
#if !defined(TWINOP_OTHER_PARTS)
#define TWINOP_OTHER_PARTS TWINOP_KEEP
#endif
#define TWINOP_SECOND(first, second, ...) second
#define TWINOP_FIND_PART(part) TWINOP_SECOND(part, TWINOP_OTHER_PARTS, )
#define TWINOP_PART(id) TWINOP_FIND_PART(TWINOP_PART_##id)

// TWINOP_OP(id, record, cpu_launcher, cuda_launcher), in namespace twinop; TWINOP_CPU_OP(id,
// record, cpu_launcher) for an op without a CUDA kernel.
#if defined(__CUDACC__)
#define TWINOP_OP(id, record, cpu_launcher, ...)                               \
  TWINOP_PART(id)                                                              \
  (Status id##_cuda(const Call& call) {                                        \
    return OnDevice(call, [](const Call& call) { return __VA_ARGS__(call); }); \
  })
#define TWINOP_CPU_OP(id, record, cpu_launcher)
#else
#define TWINOP_OP(id, record, cpu_launcher, ...) \
  Status id##_cuda(const Call& call);            \
  TWINOP_ENTRY(id,                               \
               (record).cpu(CLaunch<(cpu_launcher)>()).cuda(CLaunch<TWINOP_CUDA_LAUNCHER(id)>()))
#define TWINOP_CPU_OP(id, record, cpu_launcher) \
  TWINOP_ENTRY(id, (record).cpu(CLaunch<(cpu_launcher)>()))
#define TWINOP_ENTRY(id, ...)                                                                   \
  namespace id##_op {                                                                           \
    constexpr Record kRecord = __VA_ARGS__;                                                     \
    static_assert(kRecord.schema.name.view() == #id && Validate(kRecord));                      \
    constexpr JsonWriter kJson = WriteJson(kRecord);                                            \
    [[gnu::section(".twinop"), gnu::used]] constexpr auto kText = CutJson<kJson.size()>(kJson); \
    constexpr twinop_op kOp = OpOf(kRecord, ScratchFunction<kRecord>());                        \
    [[gnu::section("twinop_ops"), gnu::used]] const twinop_op* const kEntry = &kOp;             \
  }
#endif

namespace twinop {

// A launcher as a C function; null for a null launcher.
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

// The size function of a record's scratch expression; null where it needs none.
template <const Record& kRecord>
constexpr decltype(twinop_op::scratch_size) ScratchFunction() {
  if constexpr (kRecord.scratch_text == "0") {
    return nullptr;
  } else {
    return [](const twinop_call* call, std::int64_t* bytes, twinop_error* error) -> std::int32_t {
      return AtBoundary(error, [=] { return EvaluateScratch(kRecord, FromC(call), bytes); });
    };
  }
}

// The entry of an op in the library's table.
constexpr twinop_op OpOf(const Record& record, decltype(twinop_op::scratch_size) scratch_size) {
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
          scratch_size,
          record.create_state,
          record.destroy_state};
}

}  // namespace twinop
