// A kernel, which ORT creates for a node (create.cpp) and runs (kernel.cpp).
#pragma once

#include <memory>
#include <string>

#include "ort_customop/api.h"
#include "ort_customop/cpu_graph.h"

namespace twinop::ort {

// The fields that a run reads come first and fit in one cache line.
struct Kernel {
  const Op* op;
  const OrtApi* api;
  TypeAndShapeReference type_and_shape;  // null before ORT 1.24
  OrtAllocator* allocator = nullptr;     // of the device; null if the op does not need it
  std::unique_ptr<Attribute[]> attributes;
  void* state = nullptr;
  std::int32_t device_index = 0;
  std::unique_ptr<AttributeStorage[]> storage;  // of the attributes
  std::string node;                             // its name in the model
  std::unique_ptr<CpuGraph> cpu_graph;          // where the op has no launcher

  ~Kernel() {
    if (state != nullptr) op->record->destroy(state);
    if (allocator != nullptr) api->ReleaseAllocator(allocator);
  }
};

inline Status AtNode(const Kernel& kernel, const Status& status) {
  const char* provider = kernel.op->on_cuda ? "CUDA" : "CPU";
  return Status::Error(std::string(kernel.op->record->onnx_name) + " node '" + kernel.node + "' (" +
                       provider + "): " + status.message());
}

// Reads the dimensions of a tensor: in ORT's own memory, or copied to `buffer` by runtimes before
// 1.24.
inline Status ReadShape(const OrtApi* api, TypeAndShapeReference type_and_shape,
                        const OrtValue* value, std::int64_t* buffer, Tensor* tensor) {
  if (type_and_shape != nullptr) {
    ONNXTensorElementDataType type;
    TWINOP_RETURN_IF_ORT_ERROR(api, type_and_shape(value, &type, &tensor->sizes, &tensor->rank));
  } else {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorTypeAndShape(value, &info));
    const Owned<OrtTensorTypeAndShapeInfo> owned(info, api->ReleaseTensorTypeAndShapeInfo);
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetDimensionsCount(info, &tensor->rank));
    if (tensor->rank <= kMaxRank)
      TWINOP_RETURN_IF_ORT_ERROR(api, api->GetDimensions(info, buffer, tensor->rank));
    tensor->sizes = buffer;
  }
  if (tensor->rank > kMaxRank)
    return Status::Error("a tensor has " + std::to_string(tensor->rank) + " dimensions, at most " +
                         std::to_string(kMaxRank) + " are supported");
  return {};
}

// Makes a view of `value`, which is the op's input `i`.
inline Status ReadTensor(const Kernel& kernel, const OrtValue* value, std::size_t i,
                         std::int64_t* buffer, Tensor* tensor) {
  TWINOP_RETURN_IF_ERROR(ReadShape(kernel.api, kernel.type_and_shape, value, buffer, tensor));
  // The only accessor is not const. Inputs are only read.
  TWINOP_RETURN_IF_ORT_ERROR(
      kernel.api, kernel.api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor->data));
  tensor->numel = Numel(tensor->sizes, tensor->rank);
  tensor->dtype = kernel.op->input_types[i];
  tensor->present = 1;
  return {};
}

inline Context ContextOf(const Kernel& kernel) {
  Context context;
  context.device_type = kernel.op->on_cuda ? TWINOP_CUDA : TWINOP_CPU;
  context.device_index = kernel.device_index;
  return context;
}

inline Call CallOf(const Kernel& kernel, const Tensor* inputs, Tensor* outputs) {
  Call call;
  call.inputs = inputs;
  call.input_count = kernel.op->record->input_count;
  call.outputs = outputs;
  call.attributes = kernel.attributes.get();
  call.state = kernel.state;
  return call;
}

}  // namespace twinop::ort
