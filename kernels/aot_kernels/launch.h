// The functions of an op that the payload describes, as kernels/abi.h has them.
#pragma once

#include "twinop/aot_kernels/modules.h"

namespace twinop::aot_kernels {

// What `create` makes for a kernel of a session.
struct State {
  const Payload* payload;
  const Op* op;
  const Device* device;
};

// All of them throw std::runtime_error.
void RunPlan(const twinop_call& call);
std::int64_t ScratchBytes(const twinop_call& call);
const Body& FindBody(const Op& op, const twinop_call& call);

}  // namespace twinop::aot_kernels
