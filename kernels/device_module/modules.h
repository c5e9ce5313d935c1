// The kernels of the payload on each device.
#pragma once

#include <memory>

#include "twinop/device_module/driver.h"
#include "twinop/device_module/payload.h"

namespace twinop::device_module {

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

}  // namespace twinop::device_module
