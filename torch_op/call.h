// One call of an op from torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "twinop/record/op_spec.h"

namespace twinop::torch_op {

// The states of an op by attributes and device, those of the last calls first.
class States {
 public:
  // More are kept only where a CUDA graph was captured with them: it may point to their memory.
  static constexpr std::size_t kMost = 64;

  // Finds or makes the state for a call. The caller holds it until the work is queued.
  Status GetOrCreate(const OpSpec& record, const Call& call, std::shared_ptr<void>* state);

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<void> state;
    bool is_captured = false;
  };
  static std::string KeyOf(const OpSpec& record, const Call& call);

  std::mutex mutex_;
  std::list<Entry> entries_;
};

// An op of a library that is loaded.
struct LoadedOp {
  LoadedOp(const OpSpec& record, bool mutates, std::string_view space);

  const OpSpec& record;
  const bool mutates;            // it writes into inputs; its functional twin is another op
  const std::string_view space;  // the namespace in torch
  States& states;                // never deleted: at the end of the process CUDA is gone
};

// Unboxes the arguments, checks them, allocates the outputs, launches the kernel, and boxes the
// outputs in place of the arguments. Throws std::runtime_error with a message for the user.
void CallBoxed(LoadedOp* op, bool on_cuda, StableIValue* stack);

}  // namespace twinop::torch_op
