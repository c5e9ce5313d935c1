// Calls of an op whose outputs have sizes that come from the data (Record::sizes_text).
#pragma once

#include <functional>

#include "twinop/record/check.h"

namespace twinop {

// What an adapter allocates for such a call.
struct CountedMemory {
  // Memory on the call's device, aligned as scratch memory, until the call's work is done.
  std::function<Status(std::int64_t bytes, void** data)> temporary;
  // The outputs, where the data has these sizes.
  std::function<Status(const std::int64_t* counts, Tensor* outputs)> outputs;
};

// Runs the launcher, reads the sizes on the call's stream, and waits for them. `call` has no
// outputs, which have the dtypes `types`, and no scratch memory yet. Fails, before anything is
// queued, while the stream is captured in a CUDA graph.
Status RunCounted(const OpSpec& record, twinop_launch launch, const DType* types, Call call,
                  const CountedMemory& memory);

// Whether a CUDA graph is captured on the call's stream, or may be.
bool IsCaptured(const Context& context);

}  // namespace twinop
