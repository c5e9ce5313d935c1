#include "torch_op/call.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "torch_op/layout.h"
#include "torch_op/tensor.h"
#include "twinop/record/counted.h"

// Only CUDA builds of torch have these. In a CPU build they are null, and no CUDA tensor exists.
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg

namespace twinop::torch_op {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// Owns the arguments of one call.
struct Arguments {
  std::optional<TorchTensor> tensors[kMaxArguments];
  Tensor views[kMaxArguments];
  Attribute attributes[kMaxArguments];
  std::string strings[kMaxArguments];
  std::vector<std::int64_t> lists[kMaxArguments];
};

void ReadAttribute(Kind kind, StableIValue value, std::size_t index, Arguments* arguments) {
  Attribute* attribute = &arguments->attributes[index];
  switch (kind) {
    case Kind::kInt:
      attribute->i = to<std::int64_t>(value);
      break;
    case Kind::kBool:
      attribute->i = to<bool>(value);
      break;
    // Rounded to fp32, which ONNX has: both runtimes see the same number.
    case Kind::kFloat:
      attribute->f = static_cast<float>(to<double>(value));
      break;
    case Kind::kString:
      arguments->strings[index] = to<std::string>(value);
      attribute->set_text(arguments->strings[index]);
      break;
    case Kind::kIntList:
      arguments->lists[index] = to<std::vector<std::int64_t>>(value);
      attribute->ints = arguments->lists[index].data();
      attribute->count = arguments->lists[index].size();
      break;
    default:
      break;
  }
}

// Refuses a tensor whose storage was released or cut after it was made.
void RequireMemory(const TorchTensor& tensor, const Tensor& view, const char* name) {
  if (view.numel == 0) return;
  const std::int64_t* const strides = tensor.strides().data();
  std::int64_t bytes = 0, end = tensor.storage_offset() + 1;
  for (std::size_t i = 0; i < view.rank; ++i) end += (view.sizes[i] - 1) * strides[i];
  end *= static_cast<std::int64_t>(Info(view.dtype).size);
  Check(aoti_torch_get_storage_size(tensor.get(), &bytes), "get_storage_size");
  if (bytes < end)
    throw std::runtime_error(std::string("tensor ") + name +
                             " has lost its memory: its storage has " + std::to_string(bytes) +
                             " bytes, and its elements end at " + std::to_string(end) +
                             ". FSDP releases parameters so: gather them before the call");
}

// Takes over all arguments before anything else, because an exception would leak the others.
void Unbox(const OpSpec& record, const StableIValue* stack, Arguments* arguments) {
  std::optional<TorchTensor>* const tensors = arguments->tensors;
  for (std::size_t i = 0; i < record.input_count + record.attribute_count; ++i) {
    const Kind kind = record.arguments[i].kind;
    if (kind == Kind::kTensor) {
      tensors[i] = to<TorchTensor>(stack[i]);
    } else if (kind == Kind::kOptionalTensor) {
      tensors[i] = to<std::optional<TorchTensor>>(stack[i]);
    } else {
      ReadAttribute(kind, stack[i], i - record.input_count, arguments);
    }
  }
  for (std::size_t i = 0; i < record.input_count; ++i) {
    if (!tensors[i]) continue;
    const char* const name = record.input(i).name;
    if (!tensors[i]->defined())
      throw std::runtime_error(std::string(record.domain) + "::" + record.name + ": " + name +
                               " is None; it must be a tensor");
    arguments->views[i] = ViewOf(*tensors[i], name);
    RequireMemory(*tensors[i], arguments->views[i], name);
  }
}

[[noreturn]] void Refuse(const OpSpec& record, const Arguments& arguments, std::string message) {
  throw std::runtime_error(Failure(record, arguments.views, message).message());
}

// Returns the device of the first tensor. All others must be there, except those in host memory.
Device CheckDevices(const OpSpec& record, const Arguments& arguments, bool on_cuda) {
  std::optional<Device> first;
  for (std::size_t i = 0; i < record.input_count; ++i) {
    if (!arguments.tensors[i]) continue;
    const std::string name = record.input(i).name;
    const Device device = DeviceOf(*arguments.tensors[i]);
    if (record.input(i).on_host) {
      if (device.type == aoti_torch_device_type_cpu()) continue;
      Refuse(record, arguments,
             name + " is on " + DeviceName(device) +
                 "; the op reads it on the host: move it there with .cpu()");
    }
    if (!first) first = device;
    if (!(device == *first))
      Refuse(record, arguments,
             "all tensors must be on one device; " + name + " is on " + DeviceName(device) +
                 ", the first on " + DeviceName(*first));
  }
  if ((on_cuda ? record.cuda : record.cpu) == nullptr)
    Refuse(record, arguments,
           "this library was built without CUDA; rebuild it with nvcc on the PATH, or move the "
           "tensors to the CPU");
  return *first;
}

// Checks that each element of the inputs that the op writes has memory of its own, as mutation.py
// does for ops without a kernel.
void CheckWritten(const OpSpec& record, const Arguments& arguments) {
  Tensor views[kMaxArguments];
  for (std::size_t i = 0; i < record.input_count; ++i) {
    views[i] = arguments.views[i];
    if (!arguments.tensors[i]) continue;
    views[i].strides = arguments.tensors[i]->strides().data();
    views[i].data = const_cast<void*>(arguments.tensors[i]->const_data_ptr());
  }
  for (std::size_t i = 0; i < record.input_count; ++i) {
    if (!record.input(i).is_written) continue;
    const std::string written = std::string(record.input(i).name) + " is written, and ";
    if (OverlapsItself(views[i]))
      Refuse(record, arguments,
             written +
                 "elements of it share their memory, as after expand(); pass a tensor of its "
                 "own: .clone()");
    for (std::size_t k = 0; k < record.input_count; ++k)
      if (k != i && views[k].present && !LieApart(views[i], views[k]))
        Refuse(record, arguments,
               written + "shares its memory with " + record.input(k).name +
                   "; pass a copy of one of them: .clone()");
  }
}

// Lays out the inputs as the launcher takes them: with any strides for an elementwise op, with
// those of its rows for an op with rows, and contiguous for others. Copies tensors that have other
// strides. The strides of contiguous tensors stay null.
void LayOut(const OpSpec& record, Arguments* arguments) {
  const std::size_t rank = arguments->views[0].rank;
  for (std::size_t i = 0; i < record.input_count; ++i) {
    if (!arguments->tensors[i]) continue;
    TorchTensor& tensor = *arguments->tensors[i];
    Tensor& view = arguments->views[i];
    const std::int64_t* strides = tensor.strides().data();
    if (record.is_elementwise) {
      view.strides = strides;
    } else if (record.input(i).is_written) {
      continue;  // AllocateOutputs finds its memory
    } else if (!IsContiguous(view, strides) && view.numel > 0) {
      if (record.rows.given && view.rank == rank &&
          AreRows(record, arguments->attributes, view, strides)) {
        view.strides = strides;
      } else {
        tensor = torch::stable::contiguous(tensor);
        view.sizes = tensor.sizes().data();
      }
    }
    view.data = const_cast<void*>(tensor.const_data_ptr());
  }
}

// The strides of an elementwise op's output: those of the first input that has its shape and is
// dense, else those of torch.empty_like of the first input that has its shape, else contiguous. The
// fake does the same (rules.py).
void ElementwiseStrides(const OpSpec& record, const Arguments& arguments, const std::int64_t* sizes,
                        std::size_t rank, std::int64_t* strides) {
  const TorchTensor* like = nullptr;
  for (std::size_t i = 0; i < record.input_count; ++i) {
    const Tensor& view = arguments.views[i];
    if (!view.present || !view.HasSizes(sizes, rank)) continue;
    if (IsDense(view, view.strides)) {
      for (std::size_t k = 0; k < rank; ++k) strides[k] = view.strides[k];
      return;
    }
    if (like == nullptr) like = &*arguments.tensors[i];
  }
  if (like == nullptr) return ContiguousStrides(sizes, rank, strides);
  const TorchTensor empty = torch::stable::empty_like(*like);
  std::copy_n(empty.strides().data(), rank, strides);
}

// Allocates the outputs. That of a written input is the input itself if the op mutates it and the
// launcher takes its strides, else a copy. The input then has the memory of the output.
std::vector<TorchTensor> AllocateOutputs(const OpSpec& record, bool mutates, Arguments* inputs,
                                         std::size_t combination, const Device& device,
                                         Tensor* views, const std::int64_t* counts = nullptr) {
  const Arguments& arguments = *inputs;
  std::vector<TorchTensor> outputs;
  outputs.reserve(record.output_count);
  for (std::size_t i = 0; i < record.output_count; ++i) {
    std::int64_t sizes[kMaxRank];
    std::int64_t strides[kMaxRank];
    std::size_t rank = 0;
    Check(OutputShape(record, i, arguments.views, arguments.attributes, sizes, &rank, counts));
    const int written = record.WrittenInput(i);
    const TorchTensor* input = written < 0 ? nullptr : &*arguments.tensors[written];
    if (mutates && input != nullptr &&
        (record.is_elementwise ||
         IsContiguous(arguments.views[written], input->strides().data()))) {
      outputs.push_back(*input);
    } else {
      if (record.is_elementwise) {
        ElementwiseStrides(record, arguments, sizes, rank, strides);
      } else {
        ContiguousStrides(sizes, rank, strides);
      }
      outputs.push_back(
          EmptyStrided(sizes, strides, rank, record.output_types[combination][i], device));
      if (input != nullptr) torch::stable::copy_(outputs.back(), *input);
    }
    views[i] = ViewOf(outputs.back(), record.outputs[i].name);
    if (record.is_elementwise) views[i].strides = outputs.back().strides().data();
    views[i].data = outputs.back().mutable_data_ptr();
    if (input != nullptr) inputs->views[written] = views[i];
  }
  return outputs;
}

// Clears the strides of an elementwise call's tensors if all have one shape and one dense order:
// they are then flat sequences.
void Flatten(const OpSpec& record, Tensor* inputs, Tensor* outputs) {
  const Tensor& first = outputs[0];
  bool flat = IsDense(first, first.strides);
  for (std::size_t i = 0; i < record.output_count && flat; ++i)
    flat = outputs[i].HasSizes(first.sizes, first.rank) &&
           SameOrder(first, first.strides, outputs[i].strides);
  for (std::size_t i = 0; i < record.input_count && flat; ++i)
    flat = !inputs[i].present || (inputs[i].HasSizes(first.sizes, first.rank) &&
                                  SameOrder(first, first.strides, inputs[i].strides));
  if (!flat) return;
  for (std::size_t i = 0; i < record.output_count; ++i) outputs[i].strides = nullptr;
  for (std::size_t i = 0; i < record.input_count; ++i) inputs[i].strides = nullptr;
}

void ParallelFor(void*, std::int64_t count, std::int64_t grain, Context::Range range,
                 void* argument) {
  // Nothing may be thrown through the op's code. If torch fails, this thread does all the work.
  if (torch_parallel_for(0, count, grain, range, argument) != AOTI_TORCH_SUCCESS)
    range(0, count, argument);
}

TorchTensor ScratchMemory(std::int64_t bytes, const Device& device) {
  // In fp64 elements. The caching allocator aligns each block to 512 bytes for any type.
  std::int64_t size = (bytes + 7) / 8;
  std::int64_t stride = 1;
  return EmptyStrided(&size, &stride, 1, DType::kFloat64, device);
}

void LaunchOn(LoadedOp* op, bool on_cuda, const Arguments& arguments, const Device& device,
              Tensor* outputs, std::size_t combination, const CountedMemory* memory = nullptr) {
  const OpSpec& record = op->record;
  const twinop_launch launch = on_cuda ? record.cuda : record.cpu;
  Context context;
  context.device_type = on_cuda ? TWINOP_CUDA : TWINOP_CPU;
  context.device_index = on_cuda ? device.index : 0;
  context.parallel_for = ParallelFor;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (on_cuda) {
    guard.emplace(device.index);
    Check(aoti_torch_get_current_cuda_stream(device.index, &context.stream),
          "get_current_cuda_stream");
  }
  Call call;
  call.inputs = arguments.views;
  call.input_count = record.input_count;
  call.outputs = outputs;
  call.attributes = arguments.attributes;
  call.context = &context;
  std::shared_ptr<void> state;
  if (record.create != nullptr) {
    const Status status = op->states.GetOrCreate(record, call, &state);
    if (!status.ok()) Check(Failure(record, call.inputs, status.message()));
    call.state = state.get();
  }
  if (memory != nullptr)
    return Check(RunCounted(record, launch, record.output_types[combination], call, *memory));
  std::int64_t bytes = 0;
  Check(ScratchBytes(record, call, &bytes));
  std::optional<TorchTensor> scratch;
  if (bytes > 0) {
    scratch = ScratchMemory(bytes, device);
    call.scratch = scratch->mutable_data_ptr();
  }
  Check(Launch(record, launch, call));
}

}  // namespace

// The attributes of a call and its device as bytes.
std::string States::KeyOf(const OpSpec& record, const Call& call) {
  std::string key;
  const auto add = [&](const auto& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  add(call.context->device_type);
  add(call.context->device_index);
  for (std::size_t i = 0; i < record.attribute_count; ++i) {
    const Attribute& value = call.attributes[i];
    add(value.i);
    add(value.f);
    add(value.count);
    key.append(value.text()).push_back('\0');
    for (std::size_t k = 0; k < value.count; ++k) add(value.ints[k]);
  }
  return key;
}

Status States::GetOrCreate(const OpSpec& record, const Call& call, std::shared_ptr<void>* state) {
  std::shared_ptr<void> oldest;  // is destroyed without the mutex
  const std::string key = KeyOf(record, call);
  const bool is_captured = IsCaptured(*call.context);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& entry) { return entry.key == key; });
  if (found == entries_.end()) {
    Call creation = call;
    const Tensor none[kMaxArguments];  // torch has no constant inputs
    Context context = *call.context;
    context.stream = nullptr;
    creation.inputs = none;
    creation.outputs = nullptr;
    creation.context = &context;
    void* made = nullptr;
    TWINOP_RETURN_IF_ERROR(CreateState(record, creation, &made));
    const std::shared_ptr<void> owned(made, [destroy = record.destroy](void* each) {
      if (each != nullptr) destroy(each);
    });
    found = entries_.insert(entries_.end(), Entry{key, owned});
    const auto last = std::find_if(entries_.rbegin(), entries_.rend(), [&](const Entry& entry) {
      return !entry.is_captured && &entry != &*found;
    });
    if (entries_.size() > kMost && last != entries_.rend()) {
      oldest = last->state;
      entries_.erase(std::next(last).base());
    }
  }
  found->is_captured = found->is_captured || is_captured;
  entries_.splice(entries_.begin(), entries_, found);
  *state = found->state;
  return {};
}

LoadedOp::LoadedOp(const OpSpec& record, bool mutates, std::string_view space)
    : record(record), mutates(mutates), space(space), states(*new States()) {}

void CallBoxed(LoadedOp* op, bool on_cuda, StableIValue* stack) {
  const OpSpec& record = op->record;
  Arguments arguments;
  Unbox(record, stack, &arguments);
  const Device device = CheckDevices(record, arguments, on_cuda);
  const Tensor* const inputs = arguments.views;
  std::size_t combination = 0;
  Check(FindCombination(record, inputs, &combination));
  for (std::size_t i = 0; i < record.attribute_count; ++i)
    Check(CheckAttribute(record, i, arguments.attributes[i]));
  Check(CheckShapes(record, inputs, arguments.attributes));
  if (op->mutates) CheckWritten(record, arguments);

  LayOut(record, &arguments);
  std::vector<TorchTensor> outputs;
  if (record.size_count > 0) {
    std::optional<TorchTensor> temporary;
    const CountedMemory memory{[&](std::int64_t bytes, void** data) {
                                 temporary = ScratchMemory(bytes, device);
                                 *data = temporary->mutable_data_ptr();
                                 return Status();
                               },
                               [&](const std::int64_t* counts, Tensor* views) {
                                 outputs = AllocateOutputs(record, false, &arguments, combination,
                                                           device, views, counts);
                                 return Status();
                               }};
    LaunchOn(op, on_cuda, arguments, device, nullptr, combination, &memory);
  } else {
    Tensor views[kMaxOutputs];
    outputs = AllocateOutputs(record, op->mutates, &arguments, combination, device, views);
    if (record.is_elementwise) Flatten(record, arguments.views, views);
    if (!AllEmpty(record, views)) LaunchOn(op, on_cuda, arguments, device, views, combination);
  }
  const std::size_t count = op->mutates ? record.returned_count : record.output_count;
  for (std::size_t i = count; i < record.output_count; ++i) {
    TorchTensor& input = *arguments.tensors[record.WrittenInput(i)];
    if (input.get() != outputs[i].get()) torch::stable::copy_(input, outputs[i]);
  }
  for (std::size_t i = 0; i < count; ++i) stack[i] = from(outputs[i]);
}

}  // namespace twinop::torch_op
