// The body of an op whose rows do not depend on each other: a session of two-dimensional tensors.
#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ort_customop/body.h"
#include "twinop/record/node_proto.h"

namespace twinop::ort {
namespace {

// A piece has at least so many rows and multiply-adds, and there are at most as many pieces as the
// machine has cores. Results do not depend on the pieces: none has a single row, for which ONNX
// Runtime has another product.
constexpr std::int64_t kPieceRows = 16;
constexpr std::int64_t kPieceMultiplyAdds = 1 << 23;

std::int64_t Pieces(std::int64_t rows, std::int64_t multiply_adds_of_row) {
  static const std::int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  return std::max<std::int64_t>(
      std::min({cores, rows / kPieceRows, Times(rows, multiply_adds_of_row) / kPieceMultiplyAdds}),
      1);
}

// ONNX Runtime does not tell how many threads a session has. After so many runs in which one thread
// computed all pieces, there is one piece, and the thread reads the weight once. Every so often
// there are several again: the other threads may just have been late.
constexpr int kRunsAlone = 4;
constexpr int kRunsBetween = 32;

std::int64_t Rows(const Tensor& tensor) {
  std::int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < tensor.rank; ++i) rows = Times(rows, tensor.sizes[i]);
  return rows;
}

std::int64_t Width(const Tensor& tensor) { return tensor.sizes[tensor.rank - 1]; }

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
  OrtTensorTypeAndShapeInfo* made = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorTypeAndShape(value, &made));
  const Owned<OrtTensorTypeAndShapeInfo> shape(made, api->ReleaseTensorTypeAndShapeInfo);
  std::size_t rank = 0;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetDimensionsCount(shape.get(), &rank));
  std::vector<std::int64_t> sizes(rank);
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetDimensions(shape.get(), sizes.data(), rank));
  std::size_t bytes = Info(dtype).size;
  for (std::int64_t size : sizes) {
    message->AddInt(kDims, size);
    bytes *= static_cast<std::size_t>(size);
  }
  Message entry;
  entry.Add(kKey, "location");
  entry.Add(kValue, "the model");
  message->AddInt(kDataType, OnnxCode(dtype));
  message->Add(kName, name);
  message->Add(kExternalData, entry);
  message->AddInt(kLocation, 1);
  void* data = nullptr;
  OrtValue* same = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));  // is only read
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateTensorWithDataAsOrtValue(memory, data, bytes, sizes.data(), rank,
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

RowBody::RowBody(const Op& op) : Body(op) {
  const Schema& schema = op.record->schema;
  const std::string rows = std::string(schema.input(0).name.view()) + "[:-1]";
  for (std::size_t i = 0; i < schema.input_count; ++i)
    has_rows_[i] = i == 0 || op.record->input_shape_texts[i].substr(0, rows.size()) == rows;
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
  if (op.record->body_model(ToC(call), &nodes, &size, &error) != 0)
    return Status::Error(error.text);
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
  const std::int64_t rows = Rows(call.inputs[0]);
  const std::int64_t pieces = Pieces(rows, Times(Width(call.inputs[0]), Width(call.outputs[0])));
  const int alone = runs_alone_.load(std::memory_order_relaxed);
  if (pieces == 1 || alone >= kRunsAlone) {
    if (pieces > 1)
      runs_alone_.store(alone + 1 < kRunsBetween ? alone + 1 : 0, std::memory_order_relaxed);
    return RunRows(call, 0, rows);
  }
  const std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  Status result;
  bool is_alone = true;
  call.context->ParallelFor(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Status status = RunRows(call, rows * i / pieces, rows * (i + 1) / pieces);
      const std::lock_guard<std::mutex> lock(mutex);
      is_alone = is_alone && std::this_thread::get_id() == caller;
      if (result.ok()) result = std::move(status);
    }
  });
  runs_alone_.store(is_alone ? alone + 1 : 0, std::memory_order_relaxed);
  return result;
}

Status RowBody::RunRows(const Call& call, std::int64_t begin, std::int64_t end) const {
  const OrtApi* api = op_.api;
  const Schema& schema = op_.record->schema;
  std::shared_ptr<OrtValue> owned[kMaxArguments + kMaxOutputs];
  OrtValue* values[kMaxArguments + kMaxOutputs] = {};
  for (std::size_t i = 0; i < schema.input_count + schema.output_count; ++i) {
    const bool is_input = i < schema.input_count;
    const Tensor& tensor = is_input ? call.inputs[i] : call.outputs[i - schema.input_count];
    if (!tensor.present || (is_input && is_constant_[i])) continue;
    const bool has_rows = !is_input || has_rows_[i];
    const std::int64_t sizes[] = {end - begin, Width(tensor)};
    const std::int64_t row_bytes = sizes[1] * static_cast<std::int64_t>(Info(tensor.dtype).size);
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->CreateTensorWithDataAsOrtValue(
                 memory_.get(), tensor.as<char>() + (has_rows ? begin * row_bytes : 0),
                 static_cast<std::size_t>(has_rows ? (end - begin) * row_bytes : tensor.bytes()),
                 has_rows ? sizes : tensor.sizes, has_rows ? 2 : tensor.rank,
                 OnnxType(tensor.dtype), &values[i]));
    owned[i] = Share(api, values[i]);
  }
  return RunSession(session_.get(), values, values + schema.input_count);
}

}  // namespace twinop::ort
