// A kernel: what ORT creates for a node and calls for a run.
//
// Compute is the sequence that every binding has: views of the inputs, outputs, check, empty
// return, stream, launch. ORT has set the device and checked the dtypes; it allocates the outputs.
#include <memory>

#include "kernels/check.h"
#include "kernels/numeric.h"
#include "ort_customop/api.h"
#include "ort_customop/scratch.h"

namespace twinop::ort {
namespace {

// Small: what a run reads of each node's kernel is one cache line, and few pages for a model of
// many nodes.
struct Kernel {
  const Op* op;
  const OrtApi* api;
  TypeAndShapeReference type_and_shape;       // null before ORT 1.24
  OrtAllocator* scratch_allocator = nullptr;  // null if the op needs no scratch memory
  std::unique_ptr<Attribute[]> attributes;
  std::unique_ptr<std::string[]> strings;  // what `attributes[i].s` points to
  std::string node;                        // its name in the model

  ~Kernel() {
    if (scratch_allocator != nullptr) api->ReleaseAllocator(scratch_allocator);
  }
};

Status AtNode(const Kernel& kernel, const Status& status) {
  const char* provider = kernel.op->on_cuda ? "CUDA" : "CPU";
  return Status::Error(std::string(kernel.op->record->schema.onnx_name.view()) + " node '" +
                       kernel.node + "' (" + provider + "): " + status.message());
}

// Dimensions of a tensor: ORT's own memory where the runtime shows it, else copied to `buffer`.
Status ReadShape(const Kernel& kernel, const OrtValue* value, std::int64_t* buffer,
                 Tensor* tensor) {
  const OrtApi* api = kernel.api;
  if (kernel.type_and_shape != nullptr) {
    ONNXTensorElementDataType type;
    TWINOP_RETURN_IF_ORT_ERROR(api,
                               kernel.type_and_shape(value, &type, &tensor->sizes, &tensor->rank));
  } else {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorTypeAndShape(value, &info));
    auto release = [api](OrtTensorTypeAndShapeInfo* info) {
      api->ReleaseTensorTypeAndShapeInfo(info);
    };
    std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owned(info, release);
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

std::int64_t Numel(const std::int64_t* sizes, std::size_t rank) {
  std::int64_t numel = 1;
  for (std::size_t i = 0; i < rank; ++i) numel *= sizes[i];
  return numel;
}

Status ReadInputs(const Kernel& kernel, OrtKernelContext* context, Tensor* inputs,
                  std::int64_t (*buffers)[kMaxRank]) {
  const OrtApi* api = kernel.api;
  std::size_t given = 0;  // a node may leave out optional inputs at its end
  TWINOP_RETURN_IF_ORT_ERROR(api, api->KernelContext_GetInputCount(context, &given));
  for (std::size_t i = 0; i < given; ++i) {
    const OrtValue* value = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->KernelContext_GetInput(context, i, &value));
    if (value == nullptr) continue;
    Tensor& tensor = inputs[i];
    TWINOP_RETURN_IF_ERROR(ReadShape(kernel, value, buffers[i], &tensor));
    // The C API has one accessor, which is not const; inputs are only read.
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
    tensor.numel = Numel(tensor.sizes, tensor.rank);
    tensor.dtype = kernel.op->input_types[i];
    tensor.present = true;
  }
  return {};
}

Status AllocateOutputs(const Kernel& kernel, OrtKernelContext* context, const Tensor* inputs,
                       Tensor* outputs, std::int64_t (*sizes)[kMaxRank]) {
  const Record& record = *kernel.op->record;
  for (std::size_t i = 0; i < record.schema.output_count; ++i) {
    Tensor& tensor = outputs[i];
    TWINOP_RETURN_IF_ERROR(
        OutputShape(record, i, inputs, kernel.attributes.get(), sizes[i], &tensor.rank));
    OrtValue* value = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(
        kernel.api, kernel.api->KernelContext_GetOutput(context, i, sizes[i], tensor.rank, &value));
    TWINOP_RETURN_IF_ORT_ERROR(kernel.api, kernel.api->GetTensorMutableData(value, &tensor.data));
    tensor.sizes = sizes[i];
    tensor.numel = Numel(tensor.sizes, tensor.rank);
    tensor.dtype = kernel.op->output_types[i];
    tensor.present = true;
  }
  return {};
}

struct Pool {
  const OrtApi* api;
  OrtKernelContext* context;
};

// ORT's intra-op pool runs `pieces` calls, each an equal share of the range, in one batch per
// thread (0 below; a batch per piece measured the same, with a busy neighbour too).
void ParallelFor(void* pool, std::int64_t count, std::int64_t grain, Context::Range range,
                 void* argument) {
  struct Work {
    std::int64_t count, grain;
    Context::Range range;
    void* argument;
  } work{count, grain, range, argument};
  auto [api, context] = *static_cast<Pool*>(pool);
  auto pieces = static_cast<std::size_t>((count + grain - 1) / grain);
  OwnedStatus status(api, api->KernelContext_ParallelFor(
                              context,
                              [](void* data, std::size_t piece) {
                                const Work& work = *static_cast<const Work*>(data);
                                std::int64_t begin = static_cast<std::int64_t>(piece) * work.grain;
                                std::int64_t end = begin + work.grain < work.count
                                                       ? begin + work.grain
                                                       : work.count;
                                work.range(begin, end, work.argument);
                              },
                              pieces, 0, &work));
  if (!status.ok()) range(0, count, argument);  // no pool: this thread does it all
}

// Queues the kernel.
TWINOP_INLINE Status Launch(const Kernel& kernel, OrtKernelContext* ort_context,
                            const Tensor* inputs, Tensor* outputs, void* scratch) {
  const OrtApi* api = kernel.api;
  Pool pool{api, ort_context};
  Context context;
  context.parallel_for = ParallelFor;
  context.pool = &pool;
  if (kernel.op->on_cuda)  // in every call: ORT may run a session on another stream next time
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->KernelContext_GetGPUComputeStream(ort_context, &context.stream));

  Call call;
  call.inputs = inputs;
  call.outputs = outputs;
  call.attributes = kernel.attributes.get();
  call.scratch = scratch;
  call.context = &context;
  Status status = kernel.op->launcher(call);
  if (!status.ok()) return Failure(*kernel.op->record, inputs, status.message());
  return {};
}

Status Compute(const Kernel& kernel, OrtKernelContext* context) {
  const Record& record = *kernel.op->record;
  Tensor inputs[kMaxArguments];
  Tensor outputs[kMaxOutputs];
  std::int64_t input_sizes[kMaxArguments][kMaxRank];
  std::int64_t output_sizes[kMaxOutputs][kMaxRank];
  TWINOP_RETURN_IF_ERROR(ReadInputs(kernel, context, inputs, input_sizes));
  TWINOP_RETURN_IF_ERROR(CheckShapes(record, inputs, kernel.attributes.get()));
  TWINOP_RETURN_IF_ERROR(AllocateOutputs(kernel, context, inputs, outputs, output_sizes));
  TWINOP_RETURN_IF_ERROR(CheckAliases(record, inputs, outputs));

  bool empty = true;
  for (std::size_t i = 0; i < record.schema.output_count; ++i)
    empty = empty && outputs[i].numel == 0;
  if (empty) return {};
  Scratch scratch(kernel.scratch_allocator);
  std::int64_t bytes = 0;
  TWINOP_RETURN_IF_ERROR(ScratchBytes(record, inputs, kernel.attributes.get(), &bytes));
  TWINOP_RETURN_IF_ERROR(
      scratch.Allocate(kernel.api, context, kernel.op->on_cuda, static_cast<std::size_t>(bytes)));
  return Launch(kernel, context, inputs, outputs, scratch.data());
}

OrtStatusPtr ComputeKernel(void* data, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(data);
  return Guard(kernel.api, [&] {
    Status status = Compute(kernel, context);
    return status.ok() ? nullptr : ToOrt(kernel.api, AtNode(kernel, status));
  });
}

// The same sequence for an op with one input, one output of its shape and no scratch, as most
// elementwise ops are: without loops, arrays and messages a node costs 9 ns less
// (bench/node_overhead.py). Whatever is not the plain case goes to ComputeKernel, which handles it
// or says what is wrong.
OrtStatusPtr ComputeUnary(void* data, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(data);
  const Op& op = *kernel.op;
  const OrtApi* api = kernel.api;
  const OrtValue* x;
  OrtValue* y;
  void* x_data;
  void* y_data;
  const std::int64_t* sizes;
  std::size_t rank;
  ONNXTensorElementDataType type;
  auto ok = [api](OrtStatus* status) { return OwnedStatus(api, status).ok(); };
  if (!ok(api->KernelContext_GetInput(context, 0, &x)) ||
      !ok(kernel.type_and_shape(x, &type, &sizes, &rank)) ||
      !ok(api->GetTensorMutableData(const_cast<OrtValue*>(x), &x_data)))
    return ComputeKernel(data, context);

  const std::int64_t numel = Numel(sizes, rank);
  auto view = [&](void* data, DType dtype) {
    Tensor tensor;
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rank = rank;
    tensor.sizes = sizes;
    tensor.numel = numel;
    tensor.present = true;
    return tensor;
  };
  Tensor input = view(x_data, op.input_types[0]);
  if (numel == 0 || rank > kMaxRank ||
      !CheckShapes(*op.record, &input, kernel.attributes.get()).ok() ||
      !ok(api->KernelContext_GetOutput(context, 0, sizes, rank, &y)) ||
      !ok(api->GetTensorMutableData(y, &y_data)))
    return ComputeKernel(data, context);
  Tensor output = view(y_data, op.output_types[0]);
  const bool in_place =
      y_data == x_data && input.dtype == output.dtype && op.record->InPlaceInput(0) == 0;
  if (!in_place && !CheckAliases(*op.record, &input, &output).ok())
    return ComputeKernel(data, context);
  return Guard(api, [&] {
    Status status = Launch(kernel, context, &input, &output, nullptr);
    return status.ok() ? nullptr : ToOrt(api, AtNode(kernel, status));
  });
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
    OwnedStatus(api, api->KernelInfo_GetNodeName(info, nullptr, &size));
    kernel->node.resize(size);
    if (size > 0) OwnedStatus(api, api->KernelInfo_GetNodeName(info, kernel->node.data(), &size));
    if (!kernel->node.empty()) kernel->node.pop_back();  // the NUL
    kernel->attributes = std::make_unique<Attribute[]>(op.record->schema.attribute_count);
    kernel->strings = std::make_unique<std::string[]>(op.record->schema.attribute_count);
    Status status =
        ReadAttributes(*op.record, api, info, kernel->attributes.get(), kernel->strings.get());
    if (!status.ok()) return ToOrt(api, AtNode(*kernel, status), ORT_INVALID_GRAPH);
    if (op.record->scratch_text != "0") {
      if (OrtStatus* error =
              api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &kernel->scratch_allocator))
        return error;
    }
    *result = kernel.release();
    return static_cast<OrtStatusPtr>(nullptr);
  });
}

ComputeFunction FindCompute(const Record& record, const OrtApi* api24) {
  const Schema& schema = record.schema;
  const bool unary = schema.input_count == 1 && !schema.HasOptionalInput() &&
                     schema.output_count == 1 && record.same_shape_inputs[0] == 0 &&
                     record.scratch_text == "0";
  return unary && api24 != nullptr ? ComputeUnary : ComputeKernel;
}

void DestroyKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

}  // namespace twinop::ort
