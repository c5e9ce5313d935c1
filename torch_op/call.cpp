#include "torch_op/call.h"

#include <optional>
#include <string>
#include <vector>

#include "kernels/check.h"
#include "torch_op/layout.h"
#include "torch_op/tensor.h"

// CUDA builds of torch have these; on a CPU build they stay null and no CUDA tensor exists.
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg

namespace twinop::torch_op {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// The arguments of one call, owned.
struct Arguments {
  std::optional<TorchTensor> tensors[kMaxArguments];
  Tensor views[kMaxArguments];
  Attribute attributes[kMaxArguments];
  std::string strings[kMaxArguments];
};

void ReadAttribute(Kind kind, StableIValue value, Attribute* attribute, std::string* text) {
  switch (kind) {
    case Kind::kInt:
      attribute->i = to<std::int64_t>(value);
      break;
    case Kind::kBool:
      attribute->i = to<bool>(value);
      break;
    // fp32, as in ONNX: what the two runtimes see is then the same number.
    case Kind::kFloat:
      attribute->f = static_cast<float>(to<double>(value));
      break;
    case Kind::kString:
      *text = to<std::string>(value);
      attribute->s = *text;
      break;
    case Kind::kIntList: {
      auto list = to<std::vector<std::int64_t>>(value);
      attribute->count = list.size();
      for (std::size_t i = 0; i < list.size() && i < kMaxList; ++i) attribute->ints[i] = list[i];
      break;
    }
    default:
      break;
  }
}

// Takes over every argument first: an exception on the way must not leak the ones behind it.
void Unbox(const Schema& schema, const StableIValue* stack, Arguments* arguments) {
  std::size_t input = 0;
  std::size_t attribute = 0;
  for (std::size_t i = 0; i < schema.argument_count; ++i) {
    Kind kind = schema.arguments[i].kind;
    if (kind == Kind::kTensor) {
      arguments->tensors[input++] = to<TorchTensor>(stack[i]);
    } else if (kind == Kind::kOptionalTensor) {
      arguments->tensors[input++] = to<std::optional<TorchTensor>>(stack[i]);
    } else {
      ReadAttribute(kind, stack[i], &arguments->attributes[attribute],
                    &arguments->strings[attribute]);
      ++attribute;
    }
  }
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    if (!arguments->tensors[i]) continue;
    if (!arguments->tensors[i]->defined())
      throw std::runtime_error(std::string(kDomain) + "::" + schema.name.text + ": " +
                               schema.input(i).name.text + " is None; it must be a tensor");
    arguments->views[i] = ViewOf(*arguments->tensors[i], schema.input(i).name.text);
  }
}

void CheckDevices(const Record& record, const Arguments& arguments, bool on_cuda) {
  const Schema& schema = record.schema;
  std::optional<Device> first;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    if (!arguments.tensors[i]) continue;
    Device device = DeviceOf(*arguments.tensors[i]);
    if (!first) first = device;
    if (device == *first) continue;
    Check(Failure(record, arguments.views,
                  "all tensors must be on one device; " + std::string(schema.input(i).name.view()) +
                      " is on " + DeviceName(device) + ", the first on " + DeviceName(*first)));
  }
  if ((on_cuda ? record.cuda_launcher : record.cpu_launcher) == nullptr)
    Check(Failure(record, arguments.views,
                  "this library was built without CUDA; rebuild it with nvcc on the PATH, or move "
                  "the tensors to "
                  "the CPU"));
}

// The inputs as the launcher takes them: an elementwise op takes any strides, an op with rows those
// of its rows, and all others are contiguous; whatever is not, is copied. Strides are left out
// where they are contiguous.
void LayOut(const Record& record, Arguments* arguments) {
  const std::size_t rank = arguments->views[0].rank;
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    if (!arguments->tensors[i]) continue;
    TorchTensor& tensor = *arguments->tensors[i];
    Tensor& view = arguments->views[i];
    const std::int64_t* strides = StridesOf(tensor);
    if (record.is_elementwise) {
      view.strides = strides;
    } else if (!IsContiguous(view, strides) && view.numel > 0) {
      if (record.row_dimension.given && view.rank == rank &&
          AreRows(record.row_dimension, arguments->attributes, view, strides)) {
        view.strides = strides;
      } else {
        std::int64_t contiguous[kMaxRank];
        ContiguousStrides(view.sizes, view.rank, contiguous);
        TorchTensor copy =
            EmptyStrided(view.sizes, contiguous, view.rank, view.dtype, DeviceOf(tensor));
        Check(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy_");
        tensor = copy;
        view.sizes = ViewOf(tensor, record.schema.input(i).name.text).sizes;
      }
    }
    const void* data = nullptr;
    Check(torch_get_const_data_ptr(tensor.get(), &data), "get_const_data_ptr");
    view.data = const_cast<void*>(data);
  }
}

// The strides of an elementwise op's output: those of the first input that has its shape and is
// dense, else torch.empty_like of the first one that has its shape, else contiguous. The fake says
// the same (rules.py).
void ElementwiseStrides(const Record& record, const Arguments& arguments, const std::int64_t* sizes,
                        std::size_t rank, std::int64_t* strides) {
  const Tensor* like = nullptr;
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    const Tensor& view = arguments.views[i];
    if (!view.present || !SameShape(view, sizes, rank)) continue;
    if (IsDense(view, view.strides)) {
      for (std::size_t k = 0; k < rank; ++k) strides[k] = view.strides[k];
      return;
    }
    if (like == nullptr) like = &view;
  }
  if (like == nullptr) return ContiguousStrides(sizes, rank, strides);
  DenseStrides(*like, like->strides, strides);
}

std::vector<TorchTensor> AllocateOutputs(const Record& record, const Arguments& arguments,
                                         std::size_t combination, const Device& device,
                                         Tensor* views) {
  std::vector<TorchTensor> outputs;
  outputs.reserve(record.schema.output_count);
  for (std::size_t i = 0; i < record.schema.output_count; ++i) {
    std::int64_t sizes[kMaxRank];
    std::int64_t strides[kMaxRank];
    std::size_t rank = 0;
    Check(OutputShape(record, i, arguments.views, arguments.attributes, sizes, &rank));
    if (record.is_elementwise) {
      ElementwiseStrides(record, arguments, sizes, rank, strides);
    } else {
      ContiguousStrides(sizes, rank, strides);
    }
    outputs.push_back(
        EmptyStrided(sizes, strides, rank, record.output_types[combination][i], device));
    views[i] = ViewOf(outputs.back(), record.schema.outputs[i].text);
    if (record.is_elementwise) views[i].strides = StridesOf(outputs.back());
    Check(aoti_torch_get_data_ptr(outputs.back().get(), &views[i].data), "get_data_ptr");
  }
  return outputs;
}

// One shape and one dense order for all tensors of an elementwise call: one flat sequence, without
// strides.
void Flatten(const Schema& schema, Tensor* inputs, Tensor* outputs) {
  const Tensor& first = outputs[0];
  bool flat = IsDense(first, first.strides);
  for (std::size_t i = 0; i < schema.output_count && flat; ++i)
    flat = SameShape(outputs[i], first.sizes, first.rank) &&
           SameOrder(first, first.strides, outputs[i].strides);
  for (std::size_t i = 0; i < schema.input_count && flat; ++i)
    flat = !inputs[i].present || (SameShape(inputs[i], first.sizes, first.rank) &&
                                  SameOrder(first, first.strides, inputs[i].strides));
  if (!flat) return;
  for (std::size_t i = 0; i < schema.output_count; ++i) outputs[i].strides = nullptr;
  for (std::size_t i = 0; i < schema.input_count; ++i) inputs[i].strides = nullptr;
}

class DeviceGuard {
 public:
  explicit DeviceGuard(std::int32_t index) {
    Check(aoti_torch_create_device_guard(index, &guard_), "create_device_guard");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_device_guard(guard_); }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

void ParallelFor(void*, std::int64_t count, std::int64_t grain, Context::Range range,
                 void* argument) {
  Check(torch_parallel_for(0, count, grain, range, argument), "parallel_for");
}

void Launch(const Record& record, bool on_cuda, const Arguments& arguments, const Device& device,
            Tensor* outputs) {
  Context context;
  context.parallel_for = ParallelFor;
  std::optional<DeviceGuard> guard;
  if (on_cuda) {
    guard.emplace(device.index);
    Check(aoti_torch_get_current_cuda_stream(device.index, &context.stream),
          "get_current_cuda_stream");
  }
  Call call;
  call.inputs = arguments.views;
  call.outputs = outputs;
  call.attributes = arguments.attributes;
  call.context = &context;
  std::int64_t bytes = 0;
  Check(ScratchBytes(record, arguments.views, arguments.attributes, &bytes));
  std::optional<TorchTensor> scratch;
  if (bytes > 0) {
    // As fp64 elements: the caching allocator aligns every block to 512 bytes whatever the type.
    std::int64_t size = (bytes + 7) / 8;
    std::int64_t stride = 1;
    scratch = EmptyStrided(&size, &stride, 1, DType::kFloat64, device);
    Check(aoti_torch_get_data_ptr(scratch->get(), &call.scratch), "get_data_ptr");
  }
  Status status = (on_cuda ? record.cuda_launcher : record.cpu_launcher)(call);
  if (!status.ok()) Check(Failure(record, arguments.views, status.message()));
}

}  // namespace

void CallBoxed(const Record& record, bool on_cuda, StableIValue* stack) {
  const Schema& schema = record.schema;
  Arguments arguments;
  Unbox(schema, stack, &arguments);
  CheckDevices(record, arguments, on_cuda);
  std::size_t combination = 0;
  Check(FindCombination(record, arguments.views, &combination));
  for (std::size_t i = 0; i < schema.attribute_count; ++i)
    Check(CheckAttribute(record, i, arguments.attributes[i]));
  Check(CheckShapes(record, arguments.views, arguments.attributes));
  Device device = DeviceOf(*arguments.tensors[0]);

  LayOut(record, &arguments);
  Tensor views[kMaxOutputs];
  std::vector<TorchTensor> outputs = AllocateOutputs(record, arguments, combination, device, views);
  bool empty = true;
  for (std::size_t i = 0; i < schema.output_count; ++i) empty = empty && views[i].numel == 0;
  if (record.is_elementwise) Flatten(schema, arguments.views, views);
  if (!empty) Launch(record, on_cuda, arguments, device, views);
  for (std::size_t i = 0; i < schema.output_count; ++i) stack[i] = from(outputs[i]);
}

}  // namespace twinop::torch_op
