// One call of a record's op from torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include "kernels/record.h"

namespace twinop::torch_op {

// Unboxes the arguments by the schema's kinds, checks, allocates the outputs, launches, and boxes
// the outputs in place of the arguments. Throws std::runtime_error with the record's message.
void CallBoxed(const Record& record, bool on_cuda, StableIValue* stack);

}  // namespace twinop::torch_op
