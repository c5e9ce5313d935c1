// The body of an op whose rows, or the parts of a batch, do not depend on each other.
#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ort_customop/kernel.h"
#include "twinop/record/node_proto.h"

namespace twinop::ort {
namespace {

// A piece has at least so many rows and multiply-adds, and there are at most as many pieces as the
// machine has cores. Results do not depend on the pieces: none has a single row, for which ONNX
// Runtime has another product.
constexpr std::int64_t kPieceRows = 16;
constexpr std::int64_t kPieceMultiplyAdds = 1 << 23;

// ONNX Runtime does not tell how many threads a session has. After so many runs in which one thread
// computed all pieces, there is one piece, and the thread reads the weight once. Every so often
// there are several again: the other threads may just have been late.
constexpr int kRunsAlone = 4;
constexpr int kRunsBetween = 32;

std::shared_ptr<OrtValue> Share(const OrtApi* api, OrtValue* value) {
  return {value, api->ReleaseValue};
}

// Makes a view of a constant input, and describes it in `message` as an initializer whose data
// comes with the session's options.
Status ViewConstant(const OrtApi* api, const OrtMemoryInfo* memory, std::string_view name,
                    DType dtype, const OrtValue* value, std::shared_ptr<OrtValue>* view,
                    Message* message) {
  enum : unsigned { kDims = 1, kDataType = 2, kName = 8, kExternalData = 13, kLocation = 14 };
  enum : unsigned { kKey = 1, kValue = 2 };
  std::int64_t sizes[kMaxRank];
  Tensor tensor;
  TWINOP_RETURN_IF_ERROR(ReadShape(api, nullptr, value, sizes, &tensor));
  std::size_t bytes = Info(dtype).size;
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    message->AddInt(kDims, sizes[i]);
    bytes *= static_cast<std::size_t>(sizes[i]);
  }
  Message entry;
  entry.Add(kKey, "location");
  entry.Add(kValue, "the model");
  message->AddInt(kDataType, Info(dtype).onnx);
  message->Add(kName, name);
  message->Add(kExternalData, entry);
  message->AddInt(kLocation, 1);
  void* data = nullptr;
  OrtValue* same = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));  // is only read
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateTensorWithDataAsOrtValue(memory, data, bytes, sizes, tensor.rank,
                                               OnnxType(dtype), &same));
  *view = Share(api, same);
  return {};
}

// Sets `*present` to whether the node has its input `i`.
Status IsPresent(const OrtApi* api, const OrtKernelInfo* info, std::size_t i, bool* present) {
  std::size_t count = 0, size = 0;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->KernelInfo_GetInputCount(info, &count));
  if (i < count) OwnedStatus(api, api->KernelInfo_GetInputName(info, i, nullptr, &size));
  *present = size > 1;  // with the NUL
  return {};
}

}  // namespace

RowBody::RowBody(const Op& op) : Body(op), is_batch_(op.record->body_pieces == 2) {
  const Schema& schema = op.record->schema;
  const std::string rows = std::string(schema.input(0).name.view()) + "[:-1]";
  for (std::size_t i = 0; i < schema.input_count; ++i)
    has_rows_[i] =
        i == 0 || is_batch_ || op.record->input_shape_texts[i].substr(0, rows.size()) == rows;
}

Status RowBody::Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                       std::unique_ptr<Body>* body) {
  const OrtApi* api = op.api;
  const Schema& schema = op.record->schema;
  std::unique_ptr<RowBody> made(new RowBody(op));
  OrtMemoryInfo* memory = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
  made->memory_.reset(memory, api->ReleaseMemoryInfo);

  Message graph;
  Tensor described[kMaxArguments];  // without data and sizes
  std::vector<const char*> names;
  std::vector<const OrtValue*> constants;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    bool present = false;
    TWINOP_RETURN_IF_ERROR(IsPresent(api, info, i, &present));
    if (!present) continue;
    described[i].dtype = op.input_types[i];
    described[i].present = 1;
    const Name& name = schema.input(i).name;
    int is_constant = 0;
    const OrtValue* value = nullptr;
    if (!made->has_rows_[i])
      TWINOP_RETURN_IF_ORT_ERROR(
          api, api->KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
    made->is_constant_[i] = is_constant != 0 && value != nullptr;
    if (!made->is_constant_[i]) {
      graph.Add(kGraphInput, ValueProto(name.view(), op.input_types[i]));
      continue;
    }
    Message initializer;
    TWINOP_RETURN_IF_ERROR(ViewConstant(api, memory, name.view(), op.input_types[i], value,
                                        &made->constants_.emplace_back(), &initializer));
    graph.Add(kGraphInitializer, initializer);
    names.push_back(name.text);
    constants.push_back(made->constants_.back().get());
  }

  Call call;
  call.inputs = described;
  call.input_count = schema.input_count;
  call.attributes = attributes;
  const void* nodes = nullptr;
  std::size_t size = 0;
  ErrorText error;
  if (op.record->body_model(&call, &nodes, &size, &error) != 0) return Status::Error(error.text);
  Message model{std::string(static_cast<const char*>(nodes), size)};
  model.Add(kModelGraph, graph);

  OrtSessionOptions* options = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateSessionOptions(&options));
  const Owned<OrtSessionOptions> owned(options, api->ReleaseSessionOptions);
  TWINOP_RETURN_IF_ORT_ERROR(api, api->AddCustomOpDomain(options, op.domain));
  if (!names.empty())
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->AddExternalInitializers(options, names.data(), constants.data(), names.size()));
  const Status status = OpenSession(api, model.bytes, options, &made->session_);
  if (!status.ok()) return InBody(status);
  *body = std::move(made);
  return {};
}

Status RowBody::Run(OrtKernelContext*, const Call& call) {
  static const std::int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  const Tensor &x = call.inputs[0], &y = call.outputs[0];  // y has elements
  const std::int64_t width = y.sizes[y.rank - 1];
  const std::int64_t rows = is_batch_ ? y.sizes[0] : y.numel / width;
  const std::int64_t multiply_adds = Times(x.numel, is_batch_ ? x.sizes[1] : width);
  const std::int64_t pieces = std::max<std::int64_t>(
      std::min({cores, rows / (is_batch_ ? 1 : kPieceRows), multiply_adds / kPieceMultiplyAdds}),
      1);
  const int alone = runs_alone_.load(std::memory_order_relaxed);
  if (pieces == 1 || alone >= kRunsAlone) {
    if (pieces > 1)
      runs_alone_.store(alone + 1 < kRunsBetween ? alone + 1 : 0, std::memory_order_relaxed);
    return RunRows(call, rows, 0, rows);
  }
  const std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  Status result;
  bool is_alone = true;
  call.context->ParallelFor(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Status status = RunRows(call, rows, rows * i / pieces, rows * (i + 1) / pieces);
      const std::lock_guard<std::mutex> lock(mutex);
      is_alone = is_alone && std::this_thread::get_id() == caller;
      if (result.ok()) result = std::move(status);
    }
  });
  runs_alone_.store(is_alone ? alone + 1 : 0, std::memory_order_relaxed);
  return result;
}

Status RowBody::RunRows(const Call& call, std::int64_t rows, std::int64_t begin,
                        std::int64_t end) const {
  const OrtApi* api = op_.api;
  const Schema& schema = op_.record->schema;
  std::shared_ptr<OrtValue> owned[kMaxArguments + kMaxOutputs];
  OrtValue* values[kMaxArguments + kMaxOutputs] = {};
  for (std::size_t i = 0; i < schema.input_count + schema.output_count; ++i) {
    const bool is_input = i < schema.input_count;
    const Tensor& tensor = is_input ? call.inputs[i] : call.outputs[i - schema.input_count];
    if (!tensor.present || (is_input && is_constant_[i])) continue;
    const bool has_rows = is_batch_ ? tensor.sizes[0] == rows : !is_input || has_rows_[i];
    const std::size_t kept = !has_rows ? tensor.rank : is_batch_ ? tensor.rank - 1 : 1;
    std::int64_t sizes[kMaxRank] = {end - begin};
    std::copy_n(tensor.sizes + tensor.rank - kept, kept, sizes + (has_rows ? 1 : 0));
    const std::int64_t row_bytes = has_rows ? tensor.bytes() / rows : 0;
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->CreateTensorWithDataAsOrtValue(
                 memory_.get(), tensor.as<char>() + begin * row_bytes,
                 static_cast<std::size_t>(has_rows ? (end - begin) * row_bytes : tensor.bytes()),
                 sizes, kept + (has_rows ? 1 : 0), OnnxType(tensor.dtype), &values[i]));
    owned[i] = Share(api, values[i]);
  }
  return RunSession(session_.get(), values, values + schema.input_count);
}

}  // namespace twinop::ort
