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
                    DType dtype, const OrtValue* value, std::int64_t* sizes, Tensor* tensor,
                    std::shared_ptr<OrtValue>* view, Message* message) {
  enum : unsigned { kDims = 1, kDataType = 2, kName = 8, kExternalData = 13, kLocation = 14 };
  enum : unsigned { kKey = 1, kValue = 2 };
  TWINOP_RETURN_IF_ERROR(ReadShape(api, nullptr, value, sizes, tensor));
  std::size_t bytes = Info(dtype).size;
  for (std::size_t i = 0; i < tensor->rank; ++i) {
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
  OrtValue* same = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(const_cast<OrtValue*>(value),
                                                            &tensor->data));  // is only read
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateTensorWithDataAsOrtValue(memory, tensor->data, bytes, sizes, tensor->rank,
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

// Reads the sizes of input `i` from the model, -1 where one is not known. Returns whether all are.
bool ReadSizes(const OrtApi* api, const OrtKernelInfo* info, std::size_t i, std::int64_t* sizes,
               Tensor* tensor) {
  OrtTypeInfo* type = nullptr;
  if (!Ok(api, api->KernelInfo_GetInputTypeInfo(info, i, &type))) return false;
  const Owned<OrtTypeInfo> owned(type, api->ReleaseTypeInfo);
  const OrtTensorTypeAndShapeInfo* shape = nullptr;
  std::size_t rank = 0;  // also where it is not known
  if (!Ok(api, api->CastTypeInfoToTensorInfo(type, &shape)) || shape == nullptr ||
      !Ok(api, api->GetDimensionsCount(shape, &rank)) || rank == 0 || rank > kMaxRank ||
      !Ok(api, api->GetDimensions(shape, sizes, rank)))
    return false;
  tensor->sizes = sizes;
  tensor->rank = rank;
  return std::all_of(sizes, sizes + rank, [](std::int64_t size) { return size >= 0; });
}

}  // namespace

RowBody::RowBody(const Op& op, const Attribute* attributes)
    : Body(op), attributes_(attributes), is_batch_(op.record->body_pieces == 2) {
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
  std::unique_ptr<RowBody> made(new RowBody(op, attributes));
  OrtMemoryInfo* memory = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
  made->memory_.reset(memory, api->ReleaseMemoryInfo);

  bool is_sized = true;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    bool present = false;
    TWINOP_RETURN_IF_ERROR(IsPresent(api, info, i, &present));
    if (!present) continue;
    Tensor& input = made->described_[i];
    input.dtype = op.input_types[i];
    input.present = 1;
    const Name& name = schema.input(i).name;
    int is_constant = 0;
    const OrtValue* value = nullptr;
    if (!made->has_rows_[i])
      TWINOP_RETURN_IF_ORT_ERROR(
          api, api->KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
    made->is_constant_[i] = is_constant != 0 && value != nullptr;
    if (!made->is_constant_[i]) {
      made->graph_.Add(kGraphInput, ValueProto(name.view(), op.input_types[i]));
      const bool is_known = ReadSizes(api, info, i, made->sizes_[i], &input);
      is_sized = is_sized && (is_known || made->has_rows_[i]);
      continue;
    }
    Message initializer;
    TWINOP_RETURN_IF_ERROR(ViewConstant(api, memory, name.view(), op.input_types[i], value,
                                        made->sizes_[i], &input, &made->constants_.emplace_back(),
                                        &initializer));
    made->graph_.Add(kGraphInitializer, initializer);
    made->names_.push_back(name.text);
  }
  if (is_sized || made->is_batch_)
    TWINOP_RETURN_IF_ERROR(made->Open(made->described_, &made->session_));
  *body = std::move(made);
  return {};
}

Status RowBody::Open(const Tensor* inputs, OrtSession** session) {
  const OrtApi* api = op_.api;
  Call call;
  call.inputs = inputs;
  call.input_count = op_.record->schema.input_count;
  call.attributes = attributes_;
  const void* nodes = nullptr;
  std::size_t size = 0;
  ErrorText error;
  if (op_.record->body_model(&call, &nodes, &size, &error) != 0) return Status::Error(error.text);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<OrtSession>& found = sessions_[nodes];
  if (found == nullptr) {
    Message model{std::string(static_cast<const char*>(nodes), size)};
    model.Add(kModelGraph, graph_);
    OrtSessionOptions* options = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateSessionOptions(&options));
    const Owned<OrtSessionOptions> owned(options, api->ReleaseSessionOptions);
    TWINOP_RETURN_IF_ORT_ERROR(api, api->AddCustomOpDomain(options, op_.domain));
    std::vector<const OrtValue*> constants;
    for (const auto& each : constants_) constants.push_back(each.get());
    if (!constants.empty())
      TWINOP_RETURN_IF_ORT_ERROR(api, api->AddExternalInitializers(
                                          options, names_.data(), constants.data(), names_.size()));
    const Status status = OpenSession(api, model.bytes, options, &found);
    if (!status.ok()) return InBody(status);
  }
  *session = found.get();
  return {};
}

Status RowBody::Sized(const Tensor* inputs, OrtSession** session) {
  if ((*session = session_) != nullptr) return {};
  Tensor described[kMaxArguments];
  for (std::size_t i = 0; i < op_.record->schema.input_count; ++i) {
    described[i] = described_[i];
    if (is_constant_[i]) continue;
    described[i].sizes = inputs[i].sizes;
    described[i].rank = inputs[i].rank;
  }
  return Open(described, session);
}

Status RowBody::Run(OrtKernelContext*, const Call& call) {
  OrtSession* session = nullptr;
  TWINOP_RETURN_IF_ERROR(Sized(call.inputs, &session));
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
    return RunRows(session, call, rows, 0, rows);
  }
  const std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  Status result;
  bool is_alone = true;
  call.context->ParallelFor(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Status status = RunRows(session, call, rows, rows * i / pieces, rows * (i + 1) / pieces);
      const std::lock_guard<std::mutex> lock(mutex);
      is_alone = is_alone && std::this_thread::get_id() == caller;
      if (result.ok()) result = std::move(status);
    }
  });
  runs_alone_.store(is_alone ? alone + 1 : 0, std::memory_order_relaxed);
  return result;
}

Status RowBody::RunRows(OrtSession* session, const Call& call, std::int64_t rows,
                        std::int64_t begin, std::int64_t end) const {
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
  return RunSession(session, values, values + schema.input_count);
}

}  // namespace twinop::ort
