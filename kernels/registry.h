// How a record joins a library: linking its object file is all. The linker gathers the records of
// the objects at hand into the section `twinop_records`, and their JSON into `.twinop`.
//
// An op's header (kernels/ops/relu.h) is compiled twice (cmake/TwinopOp.cmake): by the C++ compiler
// for the record and the CPU launcher, and by nvcc for the CUDA launcher.
#pragma once

#include "kernels/json.h"
#include "kernels/record.h"
#include "kernels/validate.h"

#if defined(TWINOP_WITH_CUDA)
#define TWINOP_CUDA_LAUNCHER(id) id##_cuda
#else
#define TWINOP_CUDA_LAUNCHER(id) nullptr
#endif

// TWINOP_OP(id, record, cpu_launcher, cuda_launcher), in namespace twinop.
#if defined(__CUDACC__)
#define TWINOP_OP(id, record, cpu_launcher, ...) \
  Status id##_cuda(const Call& call) { return __VA_ARGS__(call); }
#else
#define TWINOP_OP(id, record, cpu_launcher, ...)                                                \
  Status id##_cuda(const Call& call);                                                           \
  namespace id##_op {                                                                           \
    constexpr Record kRecord = (record).cpu(cpu_launcher).cuda(TWINOP_CUDA_LAUNCHER(id));       \
    static_assert(kRecord.schema.name.view() == #id && Validate(kRecord));                      \
    constexpr JsonWriter kJson = WriteJson(kRecord);                                            \
    [[gnu::section(".twinop"), gnu::used]] constexpr auto kText = CutJson<kJson.size()>(kJson); \
    [[gnu::section("twinop_records"), gnu::used]] const Record* const kEntry = &kRecord;        \
  }
#endif

namespace twinop {

// The records of this shared library.
class Registry {
 public:
  const Record* const* begin() const;
  const Record* const* end() const;
  std::size_t size() const { return static_cast<std::size_t>(end() - begin()); }
};

}  // namespace twinop
