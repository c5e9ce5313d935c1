#include "ort_customop/op.h"

#include <cstring>
#include <mutex>
#include <utility>

namespace twinop::ort {
namespace {

const Op& Self(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }

// The pairs of inputs and outputs that may be one memory. GetMayInplace gets no op pointer, so each
// place in a table has a function, which several ops share. What it gives stays in the table.
struct Pairs {
  int count;
  int inputs[kMaxOutputs];
  int outputs[kMaxOutputs];
};
constexpr std::size_t kMostPairs = 32;
Pairs known_pairs[kMostPairs];

template <std::size_t kIndex>
std::size_t MayInplace(int** inputs, int** outputs) {
  Pairs& pairs = known_pairs[kIndex];
  *inputs = pairs.inputs;
  *outputs = pairs.outputs;
  return static_cast<std::size_t>(pairs.count);
}

using MayInplaceFunction = std::size_t (*)(int**, int**);

template <std::size_t... kIndices>
MayInplaceFunction MayInplaceAt(std::size_t index, std::index_sequence<kIndices...>) {
  static constexpr MayInplaceFunction kTable[] = {MayInplace<kIndices>...};
  return kTable[index];
}

// Returns the function for the pairs that the record allows, or null.
MayInplaceFunction FindMayInplace(const OpSpec& record) {
  Pairs pairs{};
  for (std::size_t output = 0; output < record.output_count; ++output) {
    if (record.InPlaceInput(output) < 0) continue;
    pairs.inputs[pairs.count] = record.InPlaceInput(output);
    pairs.outputs[pairs.count++] = static_cast<int>(output);
  }
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  for (std::size_t i = 0; i < kMostPairs && pairs.count > 0; ++i) {
    if (known_pairs[i].count == 0) known_pairs[i] = pairs;
    if (std::memcmp(&known_pairs[i], &pairs, sizeof(pairs)) == 0)
      return MayInplaceAt(i, std::make_index_sequence<kMostPairs>{});
  }
  return nullptr;  // then the output has memory of its own
}

}  // namespace

Op MakeOp(const OpSpec& record, std::int32_t domain_version, std::size_t combination, bool on_cuda,
          const OrtApi* api, const OrtApi* api24, int runtime_minor) {
  Op op{};
  op.record = &record;
  op.domain_version = domain_version;
  op.on_cuda = on_cuda;
  op.launch = on_cuda ? record.cuda : record.cpu;
  op.api = api;
  op.api24 = api24;
  op.runtime_minor = runtime_minor;
  for (std::size_t i = 0; i < record.input_count; ++i)
    op.input_types[i] = record.input_types[combination][i];
  for (std::size_t i = 0; i < record.output_count; ++i)
    op.output_types[i] = record.output_types[combination][i];

  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp* op) { return Self(op).record->onnx_name; };
  op.GetExecutionProviderType = [](const OrtCustomOp* op) {
    return Self(op).on_cuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
  op.GetInputType = [](const OrtCustomOp* op, std::size_t i) {
    return OnnxType(Self(op).input_types[i]);
  };
  op.GetInputTypeCount = [](const OrtCustomOp* op) { return Self(op).record->input_count; };
  op.GetOutputType = [](const OrtCustomOp* op, std::size_t i) {
    return OnnxType(Self(op).output_types[i]);
  };
  op.GetOutputTypeCount = [](const OrtCustomOp* op) { return Self(op).record->output_count; };
  op.GetInputCharacteristic = [](const OrtCustomOp* op, std::size_t i) {
    const bool is_optional = Self(op).record->input(i).kind == Kind::kOptionalTensor;
    return is_optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp* op, std::size_t i) {
    return Self(op).record->outputs[i].is_optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op.GetInputMemoryType = [](const OrtCustomOp* op, std::size_t i) {
    return Self(op).record->input(i).on_host ? OrtMemTypeCPUInput : OrtMemTypeDefault;
  };
  op.GetStartVersion = [](const OrtCustomOp* op) { return Self(op).domain_version; };
  op.GetEndVersion = [](const OrtCustomOp* op) { return Self(op).domain_version; };
  op.CreateKernelV2 = CreateKernel;
  op.KernelComputeV2 = FindCompute(op);
  op.KernelDestroy = DestroyKernel;
  // Before 1.24, ORT crashes if a node omits an input in the middle and this callback exists.
  if (!record.HasOptionalInput() || runtime_minor >= 24) op.InferOutputShapeFn = InferShapes;
  // A function body may read an input after it has written an output.
  op.GetMayInplace = op.launch != nullptr ? FindMayInplace(record) : nullptr;
  if (op.GetMayInplace != nullptr) op.ReleaseMayInplace = [](int*, int*) {};
  return op;
}

}  // namespace twinop::ort
