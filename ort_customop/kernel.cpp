// A run of a kernel: views of the inputs, checks, outputs, empty return, scratch, stream, launch.
// ORT has checked the dtypes and allocates the outputs. The launcher makes the kernel's device the
// current one.
#include "ort_customop/kernel.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "twinop/aot_kernels/driver.h"
#include "twinop/math/numeric.h"
#include "twinop/record/counted.h"

namespace twinop::ort {
namespace {

Status ReadInputs(const Kernel& kernel, OrtKernelContext* context, Tensor* inputs,
                  std::int64_t (*sizes)[kMaxRank]) {
  std::size_t given = 0;  // a node may omit optional inputs at its end
  TWINOP_RETURN_IF_ORT_ERROR(kernel.api, kernel.api->KernelContext_GetInputCount(context, &given));
  for (std::size_t i = 0; i < given; ++i) {
    const OrtValue* value = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(kernel.api, kernel.api->KernelContext_GetInput(context, i, &value));
    if (value == nullptr) continue;
    TWINOP_RETURN_IF_ERROR(ReadTensor(kernel, value, i, sizes[i], &inputs[i]));
  }
  return {};
}

Status AllocateOutputs(const Kernel& kernel, OrtKernelContext* context, const Tensor* inputs,
                       Tensor* outputs, std::int64_t (*sizes)[kMaxRank],
                       const std::int64_t* counts = nullptr) {
  const OpSpec& record = *kernel.op->record;
  for (std::size_t i = 0; i < record.output_count; ++i) {
    std::size_t rank = 0;
    OrtValue* value = nullptr;
    void* data = nullptr;
    TWINOP_RETURN_IF_ERROR(
        OutputShape(record, i, inputs, kernel.attributes.get(), sizes[i], &rank, counts));
    TWINOP_RETURN_IF_ORT_ERROR(
        kernel.api, kernel.api->KernelContext_GetOutput(context, i, sizes[i], rank, &value));
    if (value == nullptr) continue;  // the node omits it
    TWINOP_RETURN_IF_ORT_ERROR(kernel.api, kernel.api->GetTensorMutableData(value, &data));
    outputs[i] = Tensor(data, sizes[i], rank, Numel(sizes[i], rank), kernel.op->output_types[i]);
  }
  return {};
}

// Copies the inputs that the launcher writes to their outputs, unless they are one memory.
Status CopyWritten(const Kernel& kernel, void* stream, Tensor* inputs, const Tensor* outputs) {
  const OpSpec& record = *kernel.op->record;
  for (std::size_t i = record.returned_count; i < record.output_count; ++i) {
    Tensor& input = inputs[record.WrittenInput(i)];
    if (!outputs[i].present)
      return Status::Error(std::string("the node has no output ") + record.outputs[i].name +
                           "; give it a name");
    const auto bytes = static_cast<std::size_t>(input.bytes());
    void* from = std::exchange(input.data, outputs[i].data);
    if (input.data == from || bytes == 0) continue;
    if (kernel.op->on_cuda)
      aot_kernels::CopyOnDevice(input.data, from, bytes, stream);
    else
      std::memcpy(input.data, from, bytes);
  }
  return {};
}

// The scratch memory of one launch, from ORT's arena. It belongs to the run's stream: on CUDA,
// where the kernel is only queued by then, the arena makes other streams wait before they reuse it.
struct Free {
  OrtAllocator* allocator;
  void operator()(void* data) const { allocator->Free(allocator, data); }
};
using Scratch = std::unique_ptr<void, Free>;

Status Allocate(const Kernel& kernel, OrtKernelContext* context, std::int64_t bytes,
                Scratch* scratch) {
  if (bytes == 0) return {};
  const OrtApi* api = kernel.api;
  const auto size = static_cast<std::size_t>(bytes);
  void* data = nullptr;
  if (kernel.op->on_cuda) {
    const OrtMemoryInfo* memory = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->AllocatorGetInfo(kernel.allocator, &memory));
    TWINOP_RETURN_IF_ORT_ERROR(api,
                               api->KernelContext_GetScratchBuffer(context, memory, size, &data));
  } else {
    data = kernel.allocator->Alloc(kernel.allocator, size);  // the other crashes in 1.18 and 1.20
  }
  if (data == nullptr)
    return Status::Error("no memory for " + std::to_string(bytes) + " bytes of scratch");
  *scratch = Scratch(data, Free{kernel.allocator});
  return {};
}

struct Pool {
  const OrtApi* api;
  OrtKernelContext* context;
};

// ORT's intra-op pool runs a call for each piece of the range, in one batch for each thread (the 0
// below).
void ParallelFor(void* pool, std::int64_t count, std::int64_t grain, Context::Range range,
                 void* argument) {
  struct Work : FirstError {
    std::int64_t count, grain;
    Context::Range range;
    void* argument;
  } work;
  work.count = count;
  work.grain = grain;
  work.range = range;
  work.argument = argument;
  auto [api, context] = *static_cast<Pool*>(pool);
  auto pieces = static_cast<std::size_t>((count + grain - 1) / grain);
  const bool is_done =
      Ok(api, api->KernelContext_ParallelFor(
                  context,
                  [](void* data, std::size_t piece) {
                    Work& work = *static_cast<Work*>(data);
                    std::int64_t begin = static_cast<std::int64_t>(piece) * work.grain;
                    std::int64_t end =
                        begin + work.grain < work.count ? begin + work.grain : work.count;
                    work.Run([&] { work.range(begin, end, work.argument); });
                  },
                  pieces, 0, &work));
  work.Rethrow();                           // to the op, whose own boundary takes it
  if (!is_done) range(0, count, argument);  // without a pool, this thread does all the work
}

// Where a run works. `pool` outlives it.
TWINOP_INLINE Status ContextOf(const Kernel& kernel, Pool* pool, Context* context) {
  *context = ContextOf(kernel);
  context->parallel_for = ParallelFor;
  context->pool = pool;
  if (kernel.op->on_cuda)  // in every call, because ORT may use another stream in the next run
    TWINOP_RETURN_IF_ORT_ERROR(
        pool->api, pool->api->KernelContext_GetGPUComputeStream(pool->context, &context->stream));
  return {};
}

Status Compute(const Kernel& kernel, OrtKernelContext* ort_context) {
  const Op& op = *kernel.op;
  const OpSpec& record = *op.record;
  Tensor inputs[kMaxArguments], outputs[kMaxOutputs];
  std::int64_t input_sizes[kMaxArguments][kMaxRank], output_sizes[kMaxOutputs][kMaxRank];
  TWINOP_RETURN_IF_ERROR(ReadInputs(kernel, ort_context, inputs, input_sizes));
  TWINOP_RETURN_IF_ERROR(CheckShapes(record, inputs, kernel.attributes.get()));
  Pool pool{kernel.api, ort_context};
  Context context;
  TWINOP_RETURN_IF_ERROR(ContextOf(kernel, &pool, &context));
  Call call = CallOf(kernel, inputs, outputs);
  call.context = &context;
  Scratch scratch(nullptr, Free{});
  if (record.size_count == 0) {
    TWINOP_RETURN_IF_ERROR(AllocateOutputs(kernel, ort_context, inputs, outputs, output_sizes));
    TWINOP_RETURN_IF_ERROR(CheckAliases(record, call));
    if (AllEmpty(record, outputs)) return {};
  }
  if (kernel.cpu_graph != nullptr) return kernel.cpu_graph->Run(ort_context, call);
  if (record.size_count > 0) {
    const CountedMemory memory{[&](std::int64_t bytes, void** data) {
                                 Status status = Allocate(kernel, ort_context, bytes, &scratch);
                                 *data = scratch.get();
                                 return status;
                               },
                               [&](const std::int64_t* counts, Tensor* made) {
                                 return AllocateOutputs(kernel, ort_context, inputs, made,
                                                        output_sizes, counts);
                               }};
    return RunCounted(record, op.launch, op.output_types, call, memory);
  }
  if (record.WritesInputs())
    TWINOP_RETURN_IF_ERROR(CopyWritten(kernel, context.stream, inputs, outputs));
  std::int64_t bytes = 0;
  TWINOP_RETURN_IF_ERROR(ScratchBytes(record, call, &bytes));
  TWINOP_RETURN_IF_ERROR(Allocate(kernel, ort_context, bytes, &scratch));
  call.scratch = scratch.get();
  return Launch(record, op.launch, call);
}

OrtStatusPtr ComputeKernel(void* data, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(data);
  return Guard(kernel.api, [&] {
    Status status = Compute(kernel, context);
    return status.ok() ? nullptr : ToOrt(kernel.api, AtNode(kernel, status));
  });
}

// The same sequence for an op with one input, one output of its shape and no scratch, such as most
// elementwise ops: without loops, arrays and messages, which would cost a fifth of a small node.
// ComputeKernel handles, or refuses, all other cases.
OrtStatusPtr RunUnary(const Kernel& kernel, void* data, OrtKernelContext* context) {
  const Op& op = *kernel.op;
  const OrtApi* api = kernel.api;
  const OrtValue* x;
  OrtValue* y;
  void* x_data;
  void* y_data;
  const std::int64_t* sizes;
  std::size_t rank;
  ONNXTensorElementDataType type;
  if (!Ok(api, api->KernelContext_GetInput(context, 0, &x)) ||
      !Ok(api, kernel.type_and_shape(x, &type, &sizes, &rank)) ||
      !Ok(api, api->GetTensorMutableData(const_cast<OrtValue*>(x), &x_data)))
    return ComputeKernel(data, context);

  const std::int64_t numel = Numel(sizes, rank);
  const Tensor input(x_data, sizes, rank, numel, op.input_types[0]);
  if (numel == 0 || rank > kMaxRank ||
      !CheckShapes(*op.record, &input, kernel.attributes.get()).ok() ||
      !Ok(api, api->KernelContext_GetOutput(context, 0, sizes, rank, &y)) ||
      !Ok(api, api->GetTensorMutableData(y, &y_data)))
    return ComputeKernel(data, context);
  Tensor output(y_data, sizes, rank, numel, op.output_types[0]);
  const bool in_place =
      y_data == x_data && input.dtype == output.dtype && op.record->InPlaceInput(0) == 0;
  Call call = CallOf(kernel, &input, &output);
  if (!in_place && !CheckAliases(*op.record, call).ok()) return ComputeKernel(data, context);
  Pool pool{api, context};
  Context where;
  Status status = ContextOf(kernel, &pool, &where);
  call.context = &where;
  if (status.ok()) status = Launch(*op.record, op.launch, call);
  return status.ok() ? nullptr : ToOrt(api, AtNode(kernel, status));
}
OrtStatusPtr ComputeUnary(void* data, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(data);
  return Guard(kernel.api, [&] { return RunUnary(kernel, data, context); });
}

}  // namespace

ComputeFunction FindCompute(const Op& op) {
  const OpSpec& record = *op.record;
  const bool unary = record.input_count == 1 && !record.HasOptionalInput() &&
                     record.output_count == 1 && record.SameShapeInput(0) == 0 &&
                     record.scratch_size == nullptr && !record.WritesInputs();
  return unary && op.launch != nullptr && op.api24 != nullptr ? ComputeUnary : ComputeKernel;
}

}  // namespace twinop::ort
