#include "twinop/record/counted.h"

#include <algorithm>
#include <cstring>

#include "twinop/aot_kernels/driver.h"

namespace twinop {
namespace {

constexpr std::int64_t kAlignment = 256;

void CopyOnHost(void* to, const void* from, std::size_t bytes, void*) {
  std::memcpy(to, from, bytes);
}

Status CheckCount(const OpSpec& record, const Call& call, std::size_t i, std::int64_t count,
                  std::int64_t bound) {
  if (count >= 0 && count <= bound) return {};
  const std::string text(View(record.sizes[i].bound_text));
  return Failure(record, call.inputs,
                 "its kernel counted " + std::string(record.sizes[i].name) + " = " +
                     std::to_string(count) + ", expected 0 " +
                     (text.empty() ? "or more" : "to " + text + " = " + std::to_string(bound)) +
                     ": a defect of the kernel");
}

// The outputs with these sizes, without data.
Status DescribeOutputs(const OpSpec& record, const DType* types, const Call& call,
                       const std::int64_t* counts, Tensor* outputs,
                       std::int64_t (*sizes)[kMaxRank]) {
  for (std::size_t i = 0; i < record.output_count; ++i) {
    std::size_t rank = 0;
    TWINOP_RETURN_IF_ERROR(
        OutputShape(record, i, call.inputs, call.attributes, sizes[i], &rank, counts));
    outputs[i] = Tensor(nullptr, sizes[i], rank, Numel(sizes[i], rank), types[i]);
  }
  return {};
}

}  // namespace

bool IsCaptured(const Context& context) {
  if (context.device_type != TWINOP_CUDA) return false;
  int status = 0;
  return aot_kernels::GetDriver().StreamIsCapturing(context.stream, &status) != 0 || status != 0;
}

Status RunCounted(const OpSpec& record, twinop_launch launch, const DType* types, Call call,
                  const CountedMemory& memory) {
  const Context& context = *call.context;
  const bool on_cuda = context.device_type == TWINOP_CUDA;
  const std::size_t size_count = record.size_count;
  const std::size_t output_count = record.output_count;
  if (IsCaptured(context))
    return Failure(
        record, call.inputs,
        "the sizes of its outputs come from the data, so the call waits for the GPU, which "
        "a CUDA graph cannot. Run it outside the graph, or without CUDA graphs");
  std::int64_t bounds[TWINOP_MAX_SIZES], counts[TWINOP_MAX_SIZES] = {};
  bool is_empty = true;
  for (std::size_t i = 0; i < size_count; ++i) {
    TWINOP_RETURN_IF_ERROR(SizeBound(record, i, call.inputs, call.attributes, &bounds[i]));
    is_empty = is_empty && bounds[i] == 0;
  }

  Tensor largest[kMaxOutputs];
  std::int64_t sizes[kMaxOutputs][kMaxRank];
  call.outputs = largest;
  if (is_empty || !record.two_pass) {
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
    for (std::size_t i = 0; i < output_count && !record.two_pass; ++i)
      begins[i] = reserve(largest[i].bytes());
    void* data = nullptr;
    TWINOP_RETURN_IF_ERROR(memory.temporary(bytes, &data));
    call.scratch = scratch > 0 ? data : nullptr;
    call.counts = reinterpret_cast<std::int64_t*>(static_cast<char*>(data) + counts_begin);
    for (std::size_t i = 0; i < output_count && !record.two_pass; ++i)
      largest[i].data = static_cast<char*>(data) + begins[i];
    TWINOP_RETURN_IF_ERROR(Launch(record, launch, call));
    (on_cuda ? aot_kernels::CopyToHost : CopyOnHost)(
        counts, call.counts, size_count * sizeof(std::int64_t), context.stream);
    for (std::size_t i = 0; i < size_count; ++i)
      TWINOP_RETURN_IF_ERROR(CheckCount(record, call, i, counts[i], bounds[i]));
  }

  Tensor outputs[kMaxOutputs];
  TWINOP_RETURN_IF_ERROR(memory.outputs(counts, outputs));
  call.outputs = outputs;
  TWINOP_RETURN_IF_ERROR(CheckAliases(record, call));
  if (AllEmpty(record, outputs)) return {};
  call.counts = nullptr;
  if (record.two_pass) return Launch(record, launch, call);
  const auto copy = on_cuda ? aot_kernels::CopyOnDevice : CopyOnHost;
  for (std::size_t i = 0; i < output_count; ++i)
    if (outputs[i].data != nullptr && outputs[i].numel > 0)
      copy(outputs[i].data, largest[i].data, static_cast<std::size_t>(outputs[i].bytes()),
           context.stream);
  return {};
}

}  // namespace twinop
