// The device that a call is for, made the current one.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/record/call.h"

namespace twinop {

// Runs `launch(call)` with the call's device as the current one, and makes the previous one current
// again. Frameworks mostly have set it already; ONNX Runtime's CUDA plugin does not.
template <class Launch>
Status OnDevice(const Call& call, const Launch& launch) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  const int wanted = call.context->device_index;
  const bool other = error == cudaSuccess && previous != wanted;
  if (other) error = cudaSetDevice(wanted);
  if (error != cudaSuccess)
    return Status::Error("choosing CUDA device " + std::to_string(wanted) +
                         " failed: " + cudaGetErrorString(error));
  Status status = launch(call);
  if (other) cudaSetDevice(previous);
  return status;
}

}  // namespace twinop
