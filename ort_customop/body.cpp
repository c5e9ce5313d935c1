#include "ort_customop/body.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "ort_customop/kernel.h"
#include "twinop/record/node_proto.h"

namespace twinop::ort {
namespace {

constexpr int kFirstMinor = 23;  // in older Python packages of ORT a library cannot make a session

// Elements of a piece of an elementwise op. Pieces run on the threads of the model's session, and
// do not depend on their number. The intermediate tensors of a piece fit in a cache.
constexpr std::int64_t kPiece = 1 << 16;

// Reads the ranks of the node's inputs from the model. Returns false if one is not known: ORT
// reports an unknown rank as 0, and no type for an absent input.
bool ReadRanks(const Op& op, const OrtKernelInfo* info, Tensor* inputs) {
  const OrtApi* api = op.api;
  const Schema& schema = op.record->schema;
  if (schema.HasOptionalInput()) return false;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    OrtTypeInfo* type = nullptr;
    if (!Ok(api, api->KernelInfo_GetInputTypeInfo(info, i, &type))) return false;
    const Owned<OrtTypeInfo> owned(type, api->ReleaseTypeInfo);
    const OrtTensorTypeAndShapeInfo* shape = nullptr;
    if (!Ok(api, api->CastTypeInfoToTensorInfo(type, &shape)) || shape == nullptr ||
        !Ok(api, api->GetDimensionsCount(shape, &inputs[i].rank)) || inputs[i].rank == 0)
      return false;
    inputs[i].dtype = op.input_types[i];
    inputs[i].present = 1;
  }
  return true;
}

// Nodes with equal bodies, as in the layers of a model or in a pool of sessions, share a session:
// each one costs time and memory.
Status FindOrOpen(const OrtApi* api, std::string_view body, const std::string& node,
                  std::shared_ptr<OrtSession>* session) {
  using Sessions = std::map<std::pair<const void*, std::string>, std::weak_ptr<OrtSession>>;
  static std::mutex mutex;
  static auto& sessions = *new Sessions;  // never deleted, as in register.cpp
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<OrtSession>& shared = sessions[{body.data(), node}];
  *session = shared.lock();
  if (*session == nullptr) {
    OrtSessionOptions* options = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateSessionOptions(&options));
    const Owned<OrtSessionOptions> owned(options, api->ReleaseSessionOptions);
    TWINOP_RETURN_IF_ERROR(OpenSession(api, std::string(body) + node, options, session));
    shared = *session;
  }
  return {};
}

}  // namespace

Status InBody(const Status& error) {
  return Status::Error("its function body: " + error.message());
}

Status OpenSession(const OrtApi* api, const std::string& model, OrtSessionOptions* options,
                   std::shared_ptr<OrtSession>* session) {
  OrtEnv* env = nullptr;  // the only one of the process; each session keeps it
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "twinop", &env));
  const std::shared_ptr<OrtEnv> owned_env(env, api->ReleaseEnv);
  TWINOP_RETURN_IF_ORT_ERROR(api, api->SetIntraOpNumThreads(options, 1));
  OrtSession* made = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateSessionFromArray(env, model.data(), model.size(), options, &made));
  session->reset(made, [api, owned_env](OrtSession* each) { api->ReleaseSession(each); });
  return {};
}

Status Body::Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                    std::unique_ptr<Body>* body) {
  if (op.runtime_minor < kFirstMinor)
    return Status::Error(
        "the op has no CPU kernel, and its function body runs on the CPU from ONNX Runtime 1." +
        std::to_string(kFirstMinor) + " on; this is 1." + std::to_string(op.runtime_minor) +
        ". Upgrade with: pip install 'onnxruntime>=1." + std::to_string(kFirstMinor) +
        "', or run the model on CUDA");
  return op.record->body_pieces != 0 ? RowBody::Create(op, attributes, info, body)
                                     : FunctionBody::Create(op, attributes, info, body);
}

Status FunctionBody::Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                            std::unique_ptr<Body>* body) {
  std::unique_ptr<FunctionBody> made(new FunctionBody(op, attributes));
  Tensor inputs[kMaxArguments];
  OrtSession* session = nullptr;
  if (ReadRanks(op, info, inputs)) TWINOP_RETURN_IF_ERROR(made->Find(inputs, &session));
  *body = std::move(made);
  return {};
}

FunctionBody::~FunctionBody() {
  for (const Case* each = first_; each != nullptr;) delete std::exchange(each, each->next);
}

Status FunctionBody::Run(OrtKernelContext* context, const Call& call) {
  const OrtApi* api = op_.api;
  const Record& record = *op_.record;
  OrtSession* session = nullptr;
  TWINOP_RETURN_IF_ERROR(Find(call.inputs, &session));
  const std::int64_t numel = call.outputs[0].numel;
  if (record.is_elementwise && !record.broadcasts && numel > kPiece) {
    OrtMemoryInfo* memory = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
    const Owned<OrtMemoryInfo> owned(memory, api->ReleaseMemoryInfo);
    std::mutex mutex;
    Status result;
    call.context->ParallelFor(numel, kPiece, [&](std::int64_t begin, std::int64_t end) {
      Status status = RunPiece(session, call, memory, begin, end);
      const std::lock_guard<std::mutex> lock(mutex);
      if (result.ok()) result = std::move(status);
    });
    return result;
  }
  const OrtValue* inputs[kMaxArguments] = {};
  OrtValue* outputs[kMaxOutputs];
  std::shared_ptr<OrtValue> copies[kMaxArguments];
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    const Tensor& input = call.inputs[i];
    if (!input.present) continue;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->KernelContext_GetInput(context, i, &inputs[i]));
    const auto is_here = [&](const Tensor& output) { return output.data == input.data; };
    if (input.numel == 0 ||
        std::none_of(call.outputs, call.outputs + record.schema.output_count, is_here))
      continue;
    // A body may read an input after it has written an output.
    OrtAllocator* allocator = nullptr;
    OrtValue* copy = nullptr;
    void* data = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetAllocatorWithDefaultOptions(&allocator));
    TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateTensorAsOrtValue(allocator, input.sizes, input.rank,
                                                                OnnxType(input.dtype), &copy));
    copies[i].reset(copy, api->ReleaseValue);
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(copy, &data));
    std::memcpy(data, input.data, static_cast<std::size_t>(input.bytes()));
    inputs[i] = copy;
  }
  if (record.sizes_counted.count > 0) return RunCounted(session, context, inputs);
  for (std::size_t i = 0; i < record.schema.output_count; ++i)
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->KernelContext_GetOutput(context, i, call.outputs[i].sizes, call.outputs[i].rank,
                                          &outputs[i]));
  Status status = RunSession(session, inputs, outputs);
  for (std::size_t i = 0; i < record.schema.output_count; ++i)
    if (!call.outputs[i].present) api->ReleaseValue(outputs[i]);  // the node omits it
  return status;
}

// Runs the body, which makes outputs of the sizes that come from the data, and copies them.
Status FunctionBody::RunCounted(OrtSession* session, OrtKernelContext* context,
                                const OrtValue* const* inputs) const {
  const OrtApi* api = op_.api;
  OrtValue* made[kMaxOutputs] = {};
  TWINOP_RETURN_IF_ERROR(RunSession(session, inputs, made));
  std::shared_ptr<OrtValue> owned[kMaxOutputs];
  for (std::size_t i = 0; i < op_.record->schema.output_count; ++i)
    owned[i].reset(made[i], api->ReleaseValue);
  for (std::size_t i = 0; i < op_.record->schema.output_count; ++i) {
    std::int64_t sizes[kMaxRank];
    Tensor from;
    TWINOP_RETURN_IF_ERROR(ReadShape(api, nullptr, made[i], sizes, &from));
    OrtValue* output = nullptr;
    void* to = nullptr;
    TWINOP_RETURN_IF_ORT_ERROR(api,
                               api->KernelContext_GetOutput(context, i, sizes, from.rank, &output));
    if (output == nullptr) continue;  // the node omits it
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(made[i], &from.data));
    TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(output, &to));
    const auto count = static_cast<std::size_t>(Numel(sizes, from.rank));
    if (count > 0) std::memcpy(to, from.data, count * Info(op_.output_types[i]).size);
  }
  return {};
}

// Runs the body on some elements of an elementwise call, as tensors of the same ranks.
Status FunctionBody::RunPiece(OrtSession* session, const Call& call, const OrtMemoryInfo* memory,
                              std::int64_t begin, std::int64_t end) const {
  const OrtApi* api = op_.api;
  const Schema& schema = op_.record->schema;
  std::shared_ptr<OrtValue> owned[kMaxArguments + kMaxOutputs];
  OrtValue* values[kMaxArguments + kMaxOutputs] = {};
  for (std::size_t i = 0; i < schema.input_count + schema.output_count; ++i) {
    const Tensor& tensor =
        i < schema.input_count ? call.inputs[i] : call.outputs[i - schema.input_count];
    if (!tensor.present) continue;
    std::int64_t sizes[kMaxRank];
    std::fill_n(sizes, tensor.rank, 1);
    sizes[tensor.rank - 1] = end - begin;
    const auto size = static_cast<std::int64_t>(Info(tensor.dtype).size);
    TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateTensorWithDataAsOrtValue(
                                        memory, tensor.as<char>() + begin * size,
                                        static_cast<std::size_t>((end - begin) * size), sizes,
                                        tensor.rank, OnnxType(tensor.dtype), &values[i]));
    owned[i].reset(values[i], api->ReleaseValue);
  }
  return RunSession(session, values, values + schema.input_count);
}

Status Body::RunSession(OrtSession* session, const OrtValue* const* inputs,
                        OrtValue** outputs) const {
  const Schema& schema = op_.record->schema;
  const char* input_names[kMaxArguments];
  const OrtValue* present[kMaxArguments];
  std::size_t count = 0;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    if (inputs[i] == nullptr) continue;
    input_names[count] = schema.input(i).name.text;
    present[count++] = inputs[i];
  }
  const char* output_names[kMaxOutputs];
  for (std::size_t i = 0; i < schema.output_count; ++i) output_names[i] = schema.outputs[i].text;
  OrtStatus* status = op_.api->Run(session, nullptr, input_names, present, count, output_names,
                                   schema.output_count, outputs);
  return status == nullptr ? Status() : InBody(TakeError(op_.api, status));
}

Status FunctionBody::Find(const Tensor* inputs, OrtSession** session) {
  std::int8_t ranks[kMaxArguments] = {};
  for (std::size_t i = 0; i < op_.record->schema.input_count; ++i)
    ranks[i] = static_cast<std::int8_t>(inputs[i].present ? inputs[i].rank : -1);
  const Case* found = FindCase(ranks);
  if (found == nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    found = FindCase(ranks);
    if (found == nullptr) {
      auto added = std::make_unique<Case>();
      std::memcpy(added->ranks, ranks, sizeof(ranks));
      TWINOP_RETURN_IF_ERROR(AddCase(inputs, added.get()));
      first_ = found = added.release();
    }
  }
  *session = found->session.get();
  return {};
}

const FunctionBody::Case* FunctionBody::FindCase(const std::int8_t* ranks) const {
  const Case* each = first_;
  while (each != nullptr && std::memcmp(each->ranks, ranks, sizeof(each->ranks)) != 0)
    each = each->next;
  return each;
}

Status FunctionBody::AddCase(const Tensor* inputs, Case* added) const {
  const Record& record = *op_.record;
  Tensor described[kMaxArguments];  // without data and sizes
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    described[i].dtype = inputs[i].dtype;
    described[i].rank = inputs[i].rank;
    described[i].present = inputs[i].present;
  }
  Call call;
  call.inputs = described;
  call.input_count = record.schema.input_count;
  call.attributes = attributes_;
  const void* model = nullptr;
  std::size_t size = 0;
  ErrorText error;
  if (record.body_model(&call, &model, &size, &error) != 0)
    return Status::Error("the op has no CPU kernel, and its function body: " + error.text);
  added->next = first_;
  const Status status = FindOrOpen(op_.api, {static_cast<const char*>(model), size},
                                   ModelOfNode(record, inputs, attributes_), &added->session);
  return status.ok() ? Status() : InBody(status);
}

}  // namespace twinop::ort
