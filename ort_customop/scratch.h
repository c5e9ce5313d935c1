// The scratch memory of one launch, from ORT's arena.
#pragma once

#include <string>

#include "ort_customop/api.h"

namespace twinop::ort {

// Frees the memory when it leaves the scope. The memory belongs to the run's stream: on CUDA, where
// the kernel is only queued by then, the arena makes other streams wait before they reuse it.
class Scratch {
 public:
  // `allocator` is that of the kernel's execution provider, or null if the op needs no scratch.
  explicit Scratch(OrtAllocator* allocator) : allocator_(allocator) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (data_ != nullptr) allocator_->Free(allocator_, data_);
  }
  void* data() const { return data_; }

  Status Allocate(const OrtApi* api, OrtKernelContext* context, bool on_cuda, std::size_t bytes) {
    if (bytes == 0) return {};
    if (on_cuda) {
      const OrtMemoryInfo* memory = nullptr;
      TWINOP_RETURN_IF_ORT_ERROR(api, api->AllocatorGetInfo(allocator_, &memory));
      TWINOP_RETURN_IF_ORT_ERROR(
          api, api->KernelContext_GetScratchBuffer(context, memory, bytes, &data_));
    } else {
      // GetScratchBuffer crashes without a stream (1.18, 1.20).
      data_ = allocator_->Alloc(allocator_, bytes);
    }
    return data_ != nullptr
               ? Status()
               : Status::Error("no memory for " + std::to_string(bytes) + " bytes of scratch");
  }

 private:
  OrtAllocator* allocator_;
  void* data_ = nullptr;
};

}  // namespace twinop::ort
