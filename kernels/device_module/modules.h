// The kernels of the payload on each device.
#pragma once

#include <memory>

#include "twinop/device_module/driver.h"
#include "twinop/device_module/payload.h"

namespace twinop::device_module {

struct Device {
  Context context = nullptr;  // the device's primary one
  int architecture = 0;       // 90 for compute capability 9.0
  // By the index in Payload::kernels; null: not loaded.
  std::unique_ptr<Function[]> functions;
};

// Loads the kernels that an op launches for a first input of this dtype (TWINOP_NONE: any), once
// for each device, and returns the device. Thread-safe. They stay loaded until the process ends.
// Throws std::runtime_error.
const Device& LoadKernels(const Payload& payload, const Op& op, const twinop_call& call);

}  // namespace twinop::device_module
