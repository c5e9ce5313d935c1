#include <vector>

#include "twinop/tvm_ffi.h"

namespace twinop::tvm_ffi {
namespace {

struct Shape : Object {
  const std::int64_t* data = nullptr;
  std::size_t size = 0;

  Shape() { type = kShape; }
};

// The arguments of one call, which refer to it and to each other.
struct Arguments {
  Any values[kMaxArguments + kMaxOutputs];
  std::int32_t count = 0;

  Arguments(const OpSpec& record, const twinop_call& call) : context_(*call.context) {
    for (std::size_t i = 0; i < record.input_count; ++i)
      Add(call.inputs[i], record.input(i).on_host);
    for (std::size_t i = 0; i < record.attribute_count; ++i)
      Add(call.attributes[i], record.attribute(i).kind);
    for (std::size_t i = 0; i < record.returned_count; ++i) Add(call.outputs[i], false);
  }

 private:
  void Add(const Tensor& tensor, bool on_host) {
    const std::int32_t i = count++;
    if (!tensor.present) return;  // None
    const std::int64_t* strides = tensor.strides;
    if (strides == nullptr) {
      strides_[i].resize(tensor.rank);
      std::int64_t step = 1;
      for (std::size_t d = tensor.rank; d-- > 0; step *= tensor.sizes[d]) strides_[i][d] = step;
      strides = strides_[i].data();
    }
    const bool cuda = context_.device_type == TWINOP_CUDA && !on_host;
    const Device device = {cuda ? kCudaDevice : kCpuDevice, cuda ? context_.device_index : 0};
    const auto rank = static_cast<std::int32_t>(tensor.rank);
    const DTypeInfo& info = Info(tensor.dtype);
    const DataType dtype = {static_cast<std::uint8_t>(info.dlpack),
                            static_cast<std::uint8_t>(8 * info.size), 1};
    views_[i] = {tensor.data, device, rank, dtype, tensor.sizes, strides, 0};
    values[i].type = kDLTensor;
    values[i].pointer = &views_[i];
  }

  void Add(const Attribute& attribute, Kind kind) {
    Any& value = values[count];
    if (kind == Kind::kFloat) {
      value.number = attribute.f;
    } else if (kind == Kind::kString) {
      value.text = attribute.s;
    } else if (kind == Kind::kIntList) {
      shapes_[count].data = attribute.ints;
      shapes_[count].size = attribute.count;
      value.object = &shapes_[count];
    } else {
      value.integer = attribute.i;
    }
    constexpr std::int32_t kTypes[] = {kNone,  kNone, kNone,      kInt,
                                       kFloat, kBool, kRawString, kShape};
    values[count++].type = kTypes[static_cast<std::size_t>(kind)];
  }

  const Context& context_;
  DLTensor views_[kMaxArguments + kMaxOutputs];
  Shape shapes_[kMaxArguments];  // on the stack: nobody deletes them
  std::vector<std::int64_t> strides_[kMaxArguments + kMaxOutputs];
};

}  // namespace

Status Run(Function function, const OpSpec& record, const twinop_call& call) {
  const Arguments arguments(record, call);
  Any result;
  void* const before = SetStream(call.context->stream);
  const std::int32_t code = function(nullptr, arguments.values, arguments.count, &result);
  SetStream(before);
  if (code != 0) return Status::Error(TakeError());
  if (result.type >= kObject) Release(result.object);
  return {};
}

}  // namespace twinop::tvm_ffi
