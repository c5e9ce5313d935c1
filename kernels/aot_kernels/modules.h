// The kernels of the payload on each device.
#pragma once

#include <memory>

#include "twinop/aot_kernels/driver.h"
#include "twinop/aot_kernels/payload.h"

namespace twinop::aot_kernels {

// A kernel that is loaded, or null.
struct LoadedKernel {
  Function function = nullptr;
  const Image* image = nullptr;
};

struct Device {
  Context context = nullptr;                // the device's primary one
  int architecture = 0;                     // 90 for compute capability 9.0
  std::unique_ptr<LoadedKernel[]> kernels;  // by the index in Payload::kernels
};

// Loads the kernels that an op launches for a first input of this dtype (TWINOP_NONE: any), once
// for each device, and returns the device. Thread-safe. They stay loaded until the process ends.
// Throws std::runtime_error.
const Device& LoadKernels(const Payload& payload, const Op& op, const twinop_call& call);

}  // namespace twinop::aot_kernels
