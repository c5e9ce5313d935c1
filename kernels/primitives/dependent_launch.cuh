// The halves of WaitForPreviousKernel() in launch.cuh, for a kernel that has work to do between
// them.
#pragma once

namespace twinop {

__device__ __forceinline__ void LetNextKernelBegin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void WaitUntilPreviousKernelEnds() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace twinop
