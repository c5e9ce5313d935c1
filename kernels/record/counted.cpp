#include "twinop/record/counted.h"

#include <algorithm>
#include <cstring>

#include "twinop/aot_kernels/driver.h"

namespace twinop {
namespace {

namespace cuda = aot_kernels;

constexpr std::int64_t kAlignment = 256;

cuda::DevicePointer Address(const void* data) {
  return static_cast<cuda::DevicePointer>(reinterpret_cast<std::uintptr_t>(data));
}

// Copies the sizes to the host, and waits for them.
void ReadCounts(const Context& context, const void* data, std::size_t bytes, std::int64_t* counts) {
  if (context.device_type != TWINOP_CUDA) {
    std::memcpy(counts, data, bytes);
    return;
  }
  const cuda::Driver& driver = cuda::GetDriver();
  cuda::Check(driver.MemcpyDtoHAsync(counts, Address(data), bytes, context.stream),
              "reading the sizes of outputs");
  cuda::Check(driver.StreamSynchronize(context.stream), "waiting for the sizes of outputs");
}

Status CheckCount(const Record& record, const Call& call, std::size_t i, std::int64_t count,
                  std::int64_t bound) {
  if (count >= 0 && count <= bound) return {};
  const std::string text(record.bound_texts[i]);
  return Failure(record, call.inputs,
                 "its kernel counted " + std::string(record.sizes_counted.names[i]) + " = " +
                     std::to_string(count) + ", expected 0 " +
                     (text.empty() ? "or more" : "to " + text + " = " + std::to_string(bound)) +
                     ": a defect of the kernel");
}

// The outputs with these sizes, without data.
Status DescribeOutputs(const Record& record, const DType* types, const Call& call,
                       const std::int64_t* counts, Tensor* outputs,
                       std::int64_t (*sizes)[kMaxRank]) {
  for (std::size_t i = 0; i < record.schema.output_count; ++i) {
    TWINOP_RETURN_IF_ERROR(
        OutputShape(record, i, call.inputs, call.attributes, sizes[i], &outputs[i].rank, counts));
    outputs[i].sizes = sizes[i];
    outputs[i].numel = 1;
    for (std::size_t k = 0; k < outputs[i].rank; ++k)
      outputs[i].numel = Times(outputs[i].numel, sizes[i][k]);
    outputs[i].dtype = types[i];
    outputs[i].present = 1;
  }
  return {};
}

void CopyBeginning(const Context& context, const Tensor& from, const Tensor& to) {
  if (to.data == nullptr || to.numel == 0) return;
  const auto bytes = static_cast<std::size_t>(to.bytes());
  if (context.device_type != TWINOP_CUDA) {
    std::memcpy(to.data, from.data, bytes);
    return;
  }
  cuda::Check(cuda::GetDriver().MemcpyDtoDAsync(Address(to.data), Address(from.data), bytes,
                                                context.stream),
              "copying an output");
}

}  // namespace

bool IsCaptured(const Context& context) {
  if (context.device_type != TWINOP_CUDA) return false;
  int status = 0;
  return cuda::GetDriver().StreamIsCapturing(context.stream, &status) != 0 || status != 0;
}

Status RunCounted(const Record& record, twinop_launch launch, const DType* types, Call call,
                  CountedMemory* memory) {
  const Context& context = *call.context;
  const std::size_t size_count = record.sizes_counted.count;
  const std::size_t output_count = record.schema.output_count;
  if (IsCaptured(context))
    return Failure(
        record, call.inputs,
        "the sizes of its outputs come from the data, so the call waits for the GPU, which "
        "a CUDA graph cannot. Run it outside the graph, or without CUDA graphs");
  std::int64_t bounds[kMaxSizes], counts[kMaxSizes] = {};
  bool is_empty = true;
  for (std::size_t i = 0; i < size_count; ++i) {
    TWINOP_RETURN_IF_ERROR(SizeBound(record, i, call.inputs, call.attributes, &bounds[i]));
    is_empty = is_empty && bounds[i] == 0;
  }

  Tensor largest[kMaxOutputs];
  std::int64_t sizes[kMaxOutputs][kMaxRank];
  call.outputs = largest;
  if (is_empty || !record.counts_first) {
    TWINOP_RETURN_IF_ERROR(DescribeOutputs(record, types, call, bounds, largest, sizes));
    is_empty = is_empty && AllEmpty(record, largest);
  }
  if (!is_empty) {
    std::int64_t begins[kMaxOutputs] = {}, bytes = 0;
    const auto reserve = [&bytes](std::int64_t more) {
      const std::int64_t begin = bytes;
      more = std::min(more, INT64_MAX / 16);  // no device has as much: the sum is refused
      bytes = (begin + more + kAlignment - 1) / kAlignment * kAlignment;
      return begin;
    };
    std::int64_t scratch = 0;
    TWINOP_RETURN_IF_ERROR(ScratchBytes(record, call, &scratch));
    reserve(scratch);
    const std::int64_t counts_begin = reserve(sizeof(counts));
    for (std::size_t i = 0; i < output_count && !record.counts_first; ++i)
      begins[i] = reserve(largest[i].bytes());
    void* data = nullptr;
    TWINOP_RETURN_IF_ERROR(memory->Temporary(bytes, &data));
    call.scratch = scratch > 0 ? data : nullptr;
    call.counts = reinterpret_cast<std::int64_t*>(static_cast<char*>(data) + counts_begin);
    for (std::size_t i = 0; i < output_count && !record.counts_first; ++i)
      largest[i].data = static_cast<char*>(data) + begins[i];
    TWINOP_RETURN_IF_ERROR(Launch(record, launch, call));
    ReadCounts(context, call.counts, size_count * sizeof(std::int64_t), counts);
    for (std::size_t i = 0; i < size_count; ++i)
      TWINOP_RETURN_IF_ERROR(CheckCount(record, call, i, counts[i], bounds[i]));
  }

  Tensor outputs[kMaxOutputs];
  TWINOP_RETURN_IF_ERROR(memory->Outputs(counts, outputs));
  if (AllEmpty(record, outputs)) return {};
  call.outputs = outputs;
  call.counts = nullptr;
  if (record.counts_first) return Launch(record, launch, call);
  for (std::size_t i = 0; i < output_count; ++i) CopyBeginning(context, largest[i], outputs[i]);
  return {};
}

}  // namespace twinop
