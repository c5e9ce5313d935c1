// Creates a kernel: the node's attributes, the device and the op's state.
#include <memory>

#include "ort_customop/kernel.h"

namespace twinop::ort {
namespace {

// Finds the device's allocator and, on CUDA, the index of the device.
Status FindDevice(const OrtKernelInfo* info, Kernel* kernel) {
  const OrtApi* api = kernel->api;
  const bool has_scratch =
      kernel->op->launch != nullptr &&
      (kernel->op->record->scratch_size != nullptr || kernel->op->record->size_count > 0);
  if (!kernel->op->on_cuda && !has_scratch) return {};
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &kernel->allocator));
  if (!kernel->op->on_cuda) return {};
  const OrtMemoryInfo* memory = nullptr;
  int index = 0;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->AllocatorGetInfo(kernel->allocator, &memory));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->MemoryInfoGetId(memory, &index));
  kernel->device_index = index;
  return {};
}

// Makes the op's state. The constant inputs are the initializers of the model.
Status CreateState(const OrtKernelInfo* info, Kernel* kernel) {
  const OrtApi* api = kernel->api;
  const OpSpec& record = *kernel->op->record;
  if (record.create == nullptr) return {};
  std::size_t given = 0;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->KernelInfo_GetInputCount(info, &given));
  Tensor inputs[kMaxArguments];
  std::int64_t sizes[kMaxArguments][kMaxRank];
  for (std::size_t i = 0; i < record.input_count; ++i) inputs[i].dtype = kernel->op->input_types[i];
  for (std::size_t i = 0; i < given; ++i) {
    int constant = 0;
    const OrtValue* value = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api,
                               api->KernelInfoGetConstantInput_tensor(info, i, &constant, &value));
    if (constant == 0 || value == nullptr) continue;
    TWINOP_RETURN_IF_ERROR(ReadTensor(*kernel, value, i, sizes[i], &inputs[i]));
  }
  const Context context = ContextOf(*kernel);
  Call call = CallOf(*kernel, inputs, nullptr);
  call.context = &context;
  return twinop::CreateState(record, call, &kernel->state);
}

}  // namespace

OrtStatusPtr CreateKernel(const OrtCustomOp* ort_op, const OrtApi* api, const OrtKernelInfo* info,
                          void** result) {
  return Guard(api, [&] {
    const Op& op = *static_cast<const Op*>(ort_op);
    auto kernel = std::make_unique<Kernel>();
    kernel->op = &op;
    kernel->api = api;
    kernel->type_and_shape = GetTypeAndShapeReference(op.api24);
    std::size_t size = 0;
    Ok(api, api->KernelInfo_GetNodeName(info, nullptr, &size));
    kernel->node.resize(size);
    if (size > 0) Ok(api, api->KernelInfo_GetNodeName(info, kernel->node.data(), &size));
    if (!kernel->node.empty()) kernel->node.pop_back();  // the NUL
    kernel->attributes = std::make_unique<Attribute[]>(op.record->attribute_count);
    kernel->storage = std::make_unique<AttributeStorage[]>(op.record->attribute_count);
    Status status =
        ReadAttributes(*op.record, api, info, kernel->attributes.get(), kernel->storage.get());
    if (!status.ok()) return ToOrt(api, AtNode(*kernel, status), ORT_INVALID_GRAPH);
    status = FindDevice(info, kernel.get());
    if (status.ok())
      status = op.launch != nullptr
                   ? CreateState(info, kernel.get())
                   : CpuGraph::Create(op, kernel->attributes.get(), info, &kernel->cpu_graph);
    if (!status.ok()) return ToOrt(api, AtNode(*kernel, status));
    *result = kernel.release();
    return static_cast<OrtStatusPtr>(nullptr);
  });
}

void DestroyKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

}  // namespace twinop::ort
