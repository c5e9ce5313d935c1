// What an op includes whose launcher is a function of an object file with tvm-ffi's C signature.
//
//   TWINOP_TVM_FFI(rms_norm);  // the object file has the function "rms_norm"
//   TWINOP_CUDA_OP(rms_norm, Record("rms_norm(Tensor x, Tensor w, float eps=1e-6) -> Tensor"),
//                  CallTvmFfi<__tvm_ffi_rms_norm>)
//
// The function gets the inputs, the attributes and the outputs, in the schema's order. A TWINOP_OP
// may have a function for each device: CallTvmFfi<__tvm_ffi_on_cpu, __tvm_ffi_on_cuda>.
#pragma once

#include "twinop/kernel.h"
#include "twinop/tvm_ffi/abi.h"

#define TWINOP_TVM_FFI(name)                                                          \
  extern "C" std::int32_t __tvm_ffi_##name(void* self, const tvm_ffi::Any* arguments, \
                                           std::int32_t count, tvm_ffi::Any* result)

namespace twinop {

namespace tvm_ffi {
Status Run(Function function, const OpSpec& record, const twinop_call& call);
}  // namespace tvm_ffi

template <tvm_ffi::Function kCpu, tvm_ffi::Function kCuda = kCpu, class Op>
Status CallTvmFfi(const CallOf<Op>& call) {
  static_assert(Op::kRecord.size_count == 0,
                "a function of tvm-ffi cannot count the sizes of outputs; count in a launcher");
  return tvm_ffi::Run(call.context->device_type == TWINOP_CUDA ? kCuda : kCpu, Op::kRecord, call);
}

}  // namespace twinop
