#include "torch_op/call.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/check.h"

// CUDA builds of torch have these; on a CPU build they stay null and no CUDA tensor exists.
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg

namespace twinop::torch_op {
namespace {

using TorchTensor = torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

void Check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string("twinop: torch failed in ") + what);
}
void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// torch's number of a dtype differs between versions, so it is asked for.
std::int32_t TorchType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kFloat64:
      return aoti_torch_dtype_float64();
    case DType::kInt8:
      return aoti_torch_dtype_int8();
    case DType::kInt16:
      return aoti_torch_dtype_int16();
    case DType::kInt32:
      return aoti_torch_dtype_int32();
    case DType::kInt64:
      return aoti_torch_dtype_int64();
    case DType::kUInt8:
      return aoti_torch_dtype_uint8();
    case DType::kBool:
      return aoti_torch_dtype_bool();
    case DType::kComplex64:
      return aoti_torch_dtype_complex64();
    case DType::kComplex128:
      return aoti_torch_dtype_complex128();
    case DType::kNone:
      break;
  }
  throw std::runtime_error("twinop: a tensor has no dtype");
}

DType TypeOf(const TorchTensor& tensor) {
  std::int32_t number = 0;
  Check(aoti_torch_get_dtype(tensor.get(), &number), "get_dtype");
  for (const DTypeInfo& info : kDTypes)
    if (info.dtype != DType::kNone && TorchType(info.dtype) == number) return info.dtype;
  return DType::kNone;
}

struct Device {
  std::int32_t type = 0;
  std::int32_t index = 0;
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

Device DeviceOf(const TorchTensor& tensor) {
  Device device;
  Check(aoti_torch_get_device_type(tensor.get(), &device.type), "get_device_type");
  Check(aoti_torch_get_device_index(tensor.get(), &device.index), "get_device_index");
  return device;
}

std::string DeviceName(const Device& device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_meta()) return "meta";
  return (device.type == aoti_torch_device_type_cuda() ? "cuda:" : "device:") +
         std::to_string(device.index);
}

TorchTensor EmptyStrided(const std::int64_t* sizes, const std::int64_t* strides, std::size_t rank,
                         DType dtype, const Device& device) {
  AtenTensorHandle handle = nullptr;
  Check(aoti_torch_empty_strided(static_cast<std::int64_t>(rank), sizes, strides, TorchType(dtype),
                                 device.type, device.index, &handle),
        "empty_strided");
  return TorchTensor(handle);
}

std::vector<std::int64_t> ContiguousStrides(const std::int64_t* sizes, std::size_t rank) {
  std::vector<std::int64_t> strides(rank, 1);
  for (std::size_t i = rank; i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 0 ? sizes[i] : 1);
  return strides;
}

const std::int64_t* Strides(const TorchTensor& tensor) {
  std::int64_t* strides = nullptr;
  Check(aoti_torch_get_strides(tensor.get(), &strides), "get_strides");
  return strides;
}

// No gaps and no overlap: torch.empty_like gives such a tensor's strides again.
bool IsDense(const Tensor& view, const std::int64_t* strides) {
  bool used[kMaxRank] = {};
  std::int64_t expected = 1;
  for (std::size_t step = 0; step < view.rank; ++step) {
    std::size_t next = view.rank;
    for (std::size_t i = 0; i < view.rank; ++i)
      if (!used[i] && (view.sizes[i] <= 1 || strides[i] == expected)) next = i;
    if (next == view.rank) return false;
    used[next] = true;
    if (view.sizes[next] > 1) expected *= view.sizes[next];
  }
  return true;
}

// The tensor itself where its memory already has these strides, else a copy that has them.
TorchTensor WithStrides(const TorchTensor& tensor, const std::int64_t* strides,
                        const Tensor& view) {
  const std::int64_t* own = Strides(tensor);
  bool same = true;
  for (std::size_t i = 0; i < view.rank; ++i)
    same = same && (view.sizes[i] <= 1 || own[i] == strides[i]);
  if (same || view.numel == 0) return tensor;
  TorchTensor copy = EmptyStrided(view.sizes, strides, view.rank, view.dtype, DeviceOf(tensor));
  Check(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy_");
  return copy;
}

Tensor ViewOf(const TorchTensor& tensor, const char* name) {
  Tensor view;
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  Check(aoti_torch_get_dim(tensor.get(), &rank), "get_dim");
  if (rank > static_cast<std::int64_t>(kMaxRank))
    throw std::runtime_error(std::string("tensor ") + name + " has " + std::to_string(rank) +
                             " dimensions, at most " + std::to_string(kMaxRank) + " are supported");
  Check(aoti_torch_get_sizes(tensor.get(), &sizes), "get_sizes");
  Check(aoti_torch_get_numel(tensor.get(), &view.numel), "get_numel");
  view.rank = static_cast<std::size_t>(rank);
  view.sizes = sizes;
  view.dtype = TypeOf(tensor);
  view.present = true;
  return view;
}

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
  for (std::size_t i = 0; i < schema.input_count; ++i)
    if (arguments->tensors[i])
      arguments->views[i] = ViewOf(*arguments->tensors[i], schema.input(i).name.text);
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

// Elementwise ops keep the order of the first input's memory (as torch.empty_like), others are
// contiguous.
void MakeDense(const Record& record, Arguments* arguments) {
  std::optional<TorchTensor> pattern;
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    if (!arguments->tensors[i]) continue;
    TorchTensor& tensor = *arguments->tensors[i];
    Tensor& view = arguments->views[i];
    std::vector<std::int64_t> contiguous;
    const std::int64_t* strides = nullptr;
    if (record.is_elementwise) {
      if (!pattern)
        pattern = IsDense(view, Strides(tensor)) ? tensor : torch::stable::empty_like(tensor);
      strides = Strides(*pattern);
    } else {
      contiguous = ContiguousStrides(view.sizes, view.rank);
      strides = contiguous.data();
    }
    tensor = WithStrides(tensor, strides, view);
    std::int64_t* sizes = nullptr;
    Check(aoti_torch_get_sizes(tensor.get(), &sizes), "get_sizes");
    view.sizes = sizes;
    const void* data = nullptr;
    Check(torch_get_const_data_ptr(tensor.get(), &data), "get_const_data_ptr");
    view.data = const_cast<void*>(data);
  }
}

std::vector<TorchTensor> AllocateOutputs(const Record& record, const Arguments& arguments,
                                         std::size_t combination, const Device& device,
                                         Tensor* views) {
  std::vector<TorchTensor> outputs;
  for (std::size_t i = 0; i < record.schema.output_count; ++i) {
    std::int64_t sizes[kMaxRank];
    std::size_t rank = 0;
    Check(OutputShape(record, i, arguments.views, arguments.attributes, sizes, &rank));
    DType dtype = record.TypeOf(combination, record.schema.outputs[i].view());
    std::vector<std::int64_t> strides = ContiguousStrides(sizes, rank);
    if (record.is_elementwise) {
      const std::int64_t* dense = Strides(*arguments.tensors[0]);
      for (std::size_t k = 0; k < rank; ++k) strides[k] = dense[k];
    }
    outputs.push_back(EmptyStrided(sizes, strides.data(), rank, dtype, device));
    views[i] = ViewOf(outputs.back(), record.schema.outputs[i].text);
    Check(aoti_torch_get_data_ptr(outputs.back().get(), &views[i].data), "get_data_ptr");
  }
  return outputs;
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
  Check(CheckShapes(record, arguments.views));
  Device device = DeviceOf(*arguments.tensors[0]);

  MakeDense(record, &arguments);
  Tensor views[kMaxOutputs];
  std::vector<TorchTensor> outputs = AllocateOutputs(record, arguments, combination, device, views);
  bool empty = true;
  for (std::size_t i = 0; i < schema.output_count; ++i) empty = empty && views[i].numel == 0;
  if (!empty) Launch(record, on_cuda, arguments, device, views);
  for (std::size_t i = 0; i < schema.output_count; ++i) stack[i] = from(outputs[i]);
}

}  // namespace twinop::torch_op
