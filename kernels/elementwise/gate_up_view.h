// A gate and what it multiplies in one tensor.
#pragma once

#include <cstdint>

#include "twinop/record/call.h"

namespace twinop {

// One tensor that holds both. Of its 2n columns, the first n are the gate and the others the value.
struct GateUpView {
  Tensor value, gate;
  std::int64_t sizes[kMaxRank];
  std::int64_t strides[kMaxRank];

  explicit GateUpView(const Tensor& packed) : gate(packed) {
    const std::size_t rank = packed.rank;
    std::int64_t dense = 1;
    for (std::size_t i = rank; i-- > 0; dense *= packed.sizes[i]) {
      sizes[i] = packed.sizes[i];
      strides[i] = packed.strides != nullptr ? packed.strides[i] : dense;
    }
    sizes[rank - 1] /= 2;
    gate.sizes = sizes;
    gate.strides = strides;
    gate.numel /= 2;
    value = gate;
    value.data = gate.as<char>() + sizes[rank - 1] * strides[rank - 1] *
                                       static_cast<std::int64_t>(Info(gate.dtype).size);
  }
  GateUpView(const GateUpView&) = delete;
  GateUpView& operator=(const GateUpView&) = delete;
};

}  // namespace twinop
