#include "ort_customop/body.h"

#include <cstring>
#include <map>
#include <utility>

#include "ort_customop/node_proto.h"

namespace twinop::ort {
namespace {

constexpr int kFirstMinor = 23;  // older Python packages of ORT let no library make a session

Status InBody(const Status& error) {
  return Status::Error("its function body: " + error.message());
}

// Reads the ranks of the node's inputs from the model. Returns false where some are not known: ORT
// shows an unknown rank as 0, and has no type of an absent input.
bool ReadRanks(const Op& op, const OrtKernelInfo* info, Tensor* inputs) {
  const OrtApi* api = op.api;
  const Schema& schema = op.record->schema;
  if (schema.HasOptionalInput()) return false;
  const auto ok = [api](OrtStatus* status) { return OwnedStatus(api, status).ok(); };
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    OrtTypeInfo* type = nullptr;
    if (!ok(api->KernelInfo_GetInputTypeInfo(info, i, &type))) return false;
    const std::unique_ptr<OrtTypeInfo, decltype(api->ReleaseTypeInfo)> owned(type,
                                                                             api->ReleaseTypeInfo);
    const OrtTensorTypeAndShapeInfo* shape = nullptr;
    if (!ok(api->CastTypeInfoToTensorInfo(type, &shape)) || shape == nullptr ||
        !ok(api->GetDimensionsCount(shape, &inputs[i].rank)) || inputs[i].rank == 0)
      return false;
    inputs[i].dtype = op.input_types[i];
    inputs[i].present = 1;
  }
  return true;
}

// Makes a session. One thread runs the body, because ORT's pool for the nodes of a model belongs to
// the session of the model.
Status Open(const OrtApi* api, const std::string& model, std::shared_ptr<OrtSession>* session) {
  OrtEnv* env = nullptr;  // the process has one, which each session keeps
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "twinop", &env));
  const std::shared_ptr<OrtEnv> owned_env(env, api->ReleaseEnv);
  OrtSessionOptions* options = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateSessionOptions(&options));
  const std::unique_ptr<OrtSessionOptions, decltype(api->ReleaseSessionOptions)> owned_options(
      options, api->ReleaseSessionOptions);
  TWINOP_RETURN_IF_ORT_ERROR(api, api->SetIntraOpNumThreads(options, 1));
  OrtSession* made = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateSessionFromArray(env, model.data(), model.size(), options, &made));
  session->reset(made, [api, owned_env](OrtSession* each) { api->ReleaseSession(each); });
  return {};
}

// Nodes with equal bodies share a session, which takes time and memory: the layers of a model, and
// the sessions of a pool.
Status FindOrOpen(const OrtApi* api, std::string_view body, const std::string& node,
                  std::shared_ptr<OrtSession>* session) {
  using Sessions = std::map<std::pair<const void*, std::string>, std::weak_ptr<OrtSession>>;
  static std::mutex mutex;
  static auto& sessions = *new Sessions;  // never deleted, as in register.cpp
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<OrtSession>& shared = sessions[{body.data(), node}];
  *session = shared.lock();
  if (*session == nullptr) {
    TWINOP_RETURN_IF_ERROR(Open(api, std::string(body) + node, session));
    shared = *session;
  }
  return {};
}

}  // namespace

Status Body::Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                    std::unique_ptr<Body>* body) {
  if (op.runtime_minor < kFirstMinor)
    return Status::Error(
        "the op has no CPU kernel, and its function body runs on the CPU from ONNX Runtime 1." +
        std::to_string(kFirstMinor) + " on; this is 1." + std::to_string(op.runtime_minor) +
        ". Upgrade with: pip install 'onnxruntime>=1." + std::to_string(kFirstMinor) +
        "', or run the model on CUDA");
  body->reset(new Body(op, attributes));
  Tensor inputs[kMaxArguments];
  OrtSession* session = nullptr;
  return ReadRanks(op, info, inputs) ? (*body)->Find(inputs, &session) : Status();
}

Body::~Body() {
  for (const Case* each = first_; each != nullptr;) delete std::exchange(each, each->next);
}

Status Body::Run(OrtKernelContext* context, const Tensor* inputs, const Tensor* outputs) {
  const OrtApi* api = op_.api;
  const Schema& schema = op_.record->schema;
  OrtSession* session = nullptr;
  TWINOP_RETURN_IF_ERROR(Find(inputs, &session));
  const char* input_names[kMaxArguments];
  const OrtValue* input_values[kMaxArguments];
  std::size_t count = 0;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    if (!inputs[i].present) continue;
    input_names[count] = schema.input(i).name.text;
    TWINOP_RETURN_IF_ORT_ERROR(api,
                               api->KernelContext_GetInput(context, i, &input_values[count++]));
  }
  const char* output_names[kMaxOutputs];
  OrtValue* output_values[kMaxOutputs];
  for (std::size_t i = 0; i < schema.output_count; ++i) {
    output_names[i] = schema.outputs[i].text;
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->KernelContext_GetOutput(context, i, outputs[i].sizes, outputs[i].rank,
                                          &output_values[i]));
  }
  OrtStatus* status = api->Run(session, nullptr, input_names, input_values, count, output_names,
                               schema.output_count, output_values);
  return status == nullptr ? Status() : InBody(TakeError(api, status));
}

Status Body::Find(const Tensor* inputs, OrtSession** session) {
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

const Body::Case* Body::FindCase(const std::int8_t* ranks) const {
  const Case* each = first_;
  while (each != nullptr && std::memcmp(each->ranks, ranks, sizeof(each->ranks)) != 0)
    each = each->next;
  return each;
}

Status Body::AddCase(const Tensor* inputs, Case* added) const {
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
  if (record.body_model(ToC(call), &model, &size, &error) != 0)
    return Status::Error("the op has no CPU kernel, and its function body: " + error.text);
  added->next = first_;
  const Status status = FindOrOpen(op_.api, {static_cast<const char*>(model), size},
                                   ModelOfNode(record, inputs, attributes_), &added->session);
  return status.ok() ? Status() : InBody(status);
}

}  // namespace twinop::ort
