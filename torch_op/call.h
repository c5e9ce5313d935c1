// One call of an op from torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "twinop/record/record.h"

namespace twinop::torch_op {

// An op of a library that is loaded.
struct LoadedOp {
  LoadedOp(const Record& record, std::string_view space) : record(record), space(space) {}

  const Record record;
  const std::string_view space;         // the namespace in torch
  std::mutex mutex;                     // of `states`
  std::map<std::string, void*> states;  // by attributes and device
};

// Unboxes the arguments, checks them, allocates the outputs, launches the kernel, and boxes the
// outputs in place of the arguments. Throws std::runtime_error with a message for the user.
void CallBoxed(LoadedOp* op, bool on_cuda, StableIValue* stack);

}  // namespace twinop::torch_op
