// From the arguments of a launch to the parameters of a kernel.
#pragma once

#include "twinop/aot_kernels/payload.h"

namespace twinop::aot_kernels {

// Returns the first variant whose requirements hold. `values` are the arguments; pointers are ints.
const Variant& ChooseVariant(const Launch& launch, const Value* values);

// Writes an argument of a launch, in the parameter's type, to `place`, which has 8 bytes. Throws
// std::runtime_error if it does not fit; the text begins with the kernel's label.
void StoreParameter(const Parameter& parameter, const Launch& launch, const Value* values,
                    const char* label, void* place);

}  // namespace twinop::aot_kernels
