#include "ort_customop/cpu_graph.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "ort_customop/kernel.h"

namespace twinop::ort {
namespace {

constexpr char kNoModel[] = "the op has no CPU kernel, and its function body: ";

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

Status InBody(const Status& error) {
  return Status::Error("its function body: " + error.message());
}

// Reads what the model tells of input `i`, which is all of its sizes if true is returned. One that
// is not known is -1. ORT reports an unknown rank as 0, and no type for an absent input.
bool ReadInput(const Op& op, const OrtKernelInfo* info, std::size_t i, std::int64_t* sizes,
               Tensor* input) {
  const OrtApi* api = op.api;
  OrtTypeInfo* type = nullptr;
  if (!Ok(api, api->KernelInfo_GetInputTypeInfo(info, i, &type))) return false;
  const Owned<OrtTypeInfo> owned(type, api->ReleaseTypeInfo);
  input->dtype = op.input_types[i];
  input->present = 1;
  const OrtTensorTypeAndShapeInfo* shape = nullptr;
  std::size_t rank = 0;
  if (!Ok(api, api->CastTypeInfoToTensorInfo(type, &shape)) || shape == nullptr ||
      !Ok(api, api->GetDimensionsCount(shape, &rank)) || rank == 0 || rank > kMaxRank ||
      !Ok(api, api->GetDimensions(shape, sizes, rank)))
    return false;
  input->sizes = sizes;
  input->rank = rank;
  return std::all_of(sizes, sizes + rank, [](std::int64_t size) { return size >= 0; });
}

Message AttributeOf(const Argument& argument, const Attribute& value) {
  const std::string_view name = argument.name;
  if (argument.kind == Kind::kFloat) return FloatAttribute(name, value.f);
  if (argument.kind == Kind::kString) return TextAttribute(name, value.text());
  if (argument.kind == Kind::kIntList)
    return IntsAttribute(name, {value.ints, value.ints + value.count});
  return IntAttribute(name, value.i);  // bool is an int in ONNX
}

// The node that calls a function body. The tensors have the schema's names.
Message NodeOf(const OpSpec& record, const Tensor* inputs, const Attribute* values) {
  std::vector<std::string_view> given, outputs;
  std::vector<Message> attributes;
  for (std::size_t i = 0; i < record.input_count; ++i)
    given.push_back(inputs[i].present ? record.input(i).name : "");
  for (std::size_t i = 0; i < record.output_count; ++i) outputs.push_back(record.outputs[i].name);
  for (std::size_t i = 0; i < record.attribute_count; ++i)
    attributes.push_back(AttributeOf(record.attribute(i), values[i]));
  return NodeProto(record.onnx_name, record.domain, given, outputs, attributes);
}

// Copies an output that the session has made to the node's output `i`.
Status CopyOutput(const Op& op, OrtKernelContext* context, std::size_t i, OrtValue* value) {
  const OrtApi* api = op.api;
  std::int64_t sizes[kMaxRank];
  Tensor from;
  TWINOP_RETURN_IF_ERROR(ReadShape(api, nullptr, value, sizes, &from));
  OrtValue* output = nullptr;
  void* to = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api,
                             api->KernelContext_GetOutput(context, i, sizes, from.rank, &output));
  if (output == nullptr) return {};  // the node omits it
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(value, &from.data));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(output, &to));
  const auto count = static_cast<std::size_t>(Numel(sizes, from.rank));
  if (count > 0) std::memcpy(to, from.data, count * Info(op.output_types[i]).size);
  return {};
}

}  // namespace

// ---------------------------------------------------------------------------------- the node

Status CpuGraph::Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                        std::unique_ptr<CpuGraph>* graph) {
  if (op.runtime_minor < 23)  // a library for older Python packages of ORT cannot make a session
    return Status::Error(
        "the op has no CPU kernel, and its function body runs on the CPU from ONNX Runtime 1.23 "
        "on; this is 1." +
        std::to_string(op.runtime_minor) +
        ". Upgrade with: pip install 'onnxruntime>=1.23', or run the model on CUDA");
  graph->reset(new CpuGraph(op, attributes));
  return (*graph)->ReadNode(info);
}

Status CpuGraph::ReadNode(const OrtKernelInfo* info) {
  const OrtApi* api = op_.api;
  const OpSpec& spec = *op_.record;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetAllocatorWithDefaultOptions(&allocator_));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->AllocatorGetInfo(allocator_, &memory_));
  OrtSessionOptions* options = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateSessionOptions(&options));
  options_.reset(options, api->ReleaseSessionOptions);
  // Without threads of its own: the thread that runs it does the work.
  TWINOP_RETURN_IF_ORT_ERROR(api, api->SetIntraOpNumThreads(options, 1));
  if (cut_ != Cut::kWhole)  // a function body has the name of its op
    TWINOP_RETURN_IF_ORT_ERROR(api, api->AddCustomOpDomain(options, op_.domain));
  Message graph, model;
  bool is_decided = true;  // all calls have the same model
  for (std::size_t i = 0; i < spec.input_count; ++i) {
    Tensor& input = inputs_[i];
    const bool has_known_sizes = ReadInput(op_, info, i, sizes_[i], &input);
    if (!input.present) continue;
    if (cut_ == Cut::kWhole) {
      is_decided = is_decided && input.rank > 0;
      continue;
    }
    has_rows_[i] = i == 0 || spec.BeginsWithRows(i);
    if (cut_ == Cut::kRows && !has_rows_[i]) {
      int is_constant = 0;
      const OrtValue* value = nullptr;
      TWINOP_RETURN_IF_ORT_ERROR(
          api, api->KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
      if (is_constant != 0 && value != nullptr) {
        TWINOP_RETURN_IF_ERROR(AddConstant(i, value, &graph));
        continue;
      }
      is_decided = is_decided && has_known_sizes;
    }
    graph.Add(GraphField::kInput, ValueProto(spec.input(i).name, input.dtype));
  }
  if (cut_ == Cut::kWhole) graph.Add(GraphField::kNode, NodeOf(spec, inputs_, attributes_));
  model.Add(ModelField::kGraph, graph);
  added_ = model.bytes;
  return is_decided ? Find(inputs_, &session_) : Status();
}

// Adds an initializer whose data, those of constant input `i`, come with the session's options.
Status CpuGraph::AddConstant(std::size_t i, const OrtValue* value, Message* graph) {
  enum : unsigned { kDims = 1, kDataType = 2, kName = 8, kExternalData = 13, kLocation = 14 };
  enum : unsigned { kKey = 1, kValue = 2 };
  const OrtApi* api = op_.api;
  const char* name = op_.record->input(i).name;
  Tensor& input = inputs_[i];
  TWINOP_RETURN_IF_ERROR(ReadShape(api, nullptr, value, sizes_[i], &input));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(const_cast<OrtValue*>(value),
                                                            &input.data));  // is only read
  Message initializer, entry;
  for (std::size_t j = 0; j < input.rank; ++j) initializer.AddInt(kDims, input.sizes[j]);
  entry.Add(kKey, "location");
  entry.Add(kValue, "the model");
  initializer.AddInt(kDataType, Info(input.dtype).onnx);
  initializer.Add(kName, name);
  initializer.Add(kExternalData, entry);
  initializer.AddInt(kLocation, 1);
  graph->Add(GraphField::kInitializer, initializer);

  input.numel = Numel(input.sizes, input.rank);
  OrtValue* view = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateTensorWithDataAsOrtValue(
                                      memory_, input.data, static_cast<std::size_t>(input.bytes()),
                                      input.sizes, input.rank, OnnxType(input.dtype), &view));
  const Owned<OrtValue> owned(view, api->ReleaseValue);
  is_constant_[i] = has_constants_ = true;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->AddExternalInitializers(options_.get(), &name, &view, 1));
  return {};
}

// ---------------------------------------------------------------------------------- its sessions

// The op's model decides: it has one for some ranks of a function body, for some sizes of a weight.
Status CpuGraph::Find(const Tensor* inputs, OrtSession** session) {
  Tensor described[kMaxArguments];
  for (std::size_t i = 0; i < op_.record->input_count; ++i) {
    described[i] = inputs_[i];
    if (is_constant_[i]) continue;
    described[i].rank = inputs[i].rank;
    described[i].sizes = cut_ == Cut::kWhole ? nullptr : inputs[i].sizes;
  }
  Call call;
  call.inputs = described;
  call.input_count = op_.record->input_count;
  call.attributes = attributes_;
  const void* model = nullptr;
  std::size_t size = 0;
  ErrorText error;
  if (op_.record->body(&call, &model, &size, &error) != 0)
    return Status::Error((cut_ == Cut::kWhole ? kNoModel : "") + error.text);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<OrtSession>& found = sessions_[model];
  if (found == nullptr) {
    const Status status = Open({static_cast<const char*>(model), size}, &found);
    if (!status.ok()) return InBody(status);
  }
  *session = found.get();
  return {};
}

// Nodes with equal graphs, as in the layers of a model or in a pool of sessions, share a session:
// each one costs time and memory. One with constants belongs to its node.
Status CpuGraph::Open(std::string_view model, std::shared_ptr<OrtSession>* session) const {
  using Sessions = std::map<std::pair<const void*, std::string>, std::weak_ptr<OrtSession>>;
  static std::recursive_mutex mutex;      // a node of a graph may have a graph
  static auto& sessions = *new Sessions;  // never deleted, as in register.cpp
  if (has_constants_) return OpenOwn(model, session);
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  std::weak_ptr<OrtSession>& shared = sessions[{model.data(), added_}];
  *session = shared.lock();
  if (*session == nullptr) {
    TWINOP_RETURN_IF_ERROR(OpenOwn(model, session));
    shared = *session;
  }
  return {};
}

Status CpuGraph::OpenOwn(std::string_view model, std::shared_ptr<OrtSession>* session) const {
  const OrtApi* api = op_.api;
  OrtEnv* env = nullptr;  // the only one of the process; each session keeps it
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "twinop", &env));
  const std::shared_ptr<OrtEnv> owned_env(env, api->ReleaseEnv);
  const std::string bytes = std::string(model) + added_;
  OrtSession* made = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(
      api, api->CreateSessionFromArray(env, bytes.data(), bytes.size(), options_.get(), &made));
  session->reset(made, [api, owned_env](OrtSession* each) { api->ReleaseSession(each); });
  return {};
}

// ---------------------------------------------------------------------------------- a call

Status CpuGraph::Run(OrtKernelContext* context, const Call& call) {
  Work work = Divide(context, call);
  for (std::size_t i = 0; i < op_.record->input_count && cut_ == Cut::kWhole; ++i)
    if (call.inputs[i].rank != inputs_[i].rank) work.session = nullptr;  // not what the model says
  if (work.session == nullptr) TWINOP_RETURN_IF_ERROR(Find(call.inputs, &work.session));
  const int alone = runs_alone_.load(std::memory_order_relaxed);
  const bool may_join = work.pieces > 1 && work.cut != Cut::kElements;
  if (may_join && alone >= kRunsAlone) {
    runs_alone_.store(alone + 1 < kRunsBetween ? alone + 1 : 0, std::memory_order_relaxed);
    work.pieces = 1;
  }
  const std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  Status result;
  bool is_alone = true;
  call.context->ParallelFor(work.pieces, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      Status status = RunPiece(work, work.Begin(i), work.Begin(i + 1));
      const std::lock_guard<std::mutex> lock(mutex);
      is_alone = is_alone && std::this_thread::get_id() == caller;
      if (result.ok()) result = std::move(status);
    }
  });
  if (may_join && work.pieces > 1)
    runs_alone_.store(is_alone ? alone + 1 : 0, std::memory_order_relaxed);
  return result;
}

// The pieces run on the threads of the model's session.
CpuGraph::Work CpuGraph::Divide(OrtKernelContext* context, const Call& call) const {
  static const std::int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  Work work{context, call, session_, cut_, 1, 1};
  const Tensor &x = call.inputs[0], &y = call.outputs[0];
  if (cut_ == Cut::kWhole) {
    const OpSpec& record = *op_.record;
    if (!record.is_elementwise || record.Broadcasts() || y.numel <= kPieceElements) return work;
    work.cut = Cut::kElements;
    work.units = y.numel;
    work.pieces = (y.numel + kPieceElements - 1) / kPieceElements;
    return work;
  }
  const bool is_batch = cut_ == Cut::kBatch;
  const std::int64_t width = y.sizes[y.rank - 1];  // y has elements
  const std::int64_t multiply_adds = Times(x.numel, is_batch ? x.sizes[1] : width);
  work.units = is_batch ? y.sizes[0] : y.numel / width;
  const std::int64_t most = work.units / (is_batch ? 1 : kPieceRows);
  work.pieces =
      std::max(std::min({cores, most, multiply_adds / kPieceMultiplyAdds}), std::int64_t{1});
  return work;
}

// Runs the session on the units [begin, end).
Status CpuGraph::RunPiece(const Work& work, std::int64_t begin, std::int64_t end) const {
  const OrtApi* api = op_.api;
  const OpSpec& spec = *op_.record;
  std::shared_ptr<OrtValue> owned[kMaxArguments], owned_outputs[kMaxOutputs];
  const char *input_names[kMaxArguments], *output_names[kMaxOutputs];
  OrtValue *inputs[kMaxArguments], *outputs[kMaxOutputs] = {};
  std::size_t count = 0;
  for (std::size_t i = 0; i < spec.input_count; ++i) {
    if (!work.call.inputs[i].present || is_constant_[i]) continue;
    input_names[count] = spec.input(i).name;
    TWINOP_RETURN_IF_ERROR(FindValue(work, i, begin, end, &inputs[count++], &owned[i]));
  }
  for (std::size_t i = 0; i < spec.output_count; ++i) {
    output_names[i] = spec.outputs[i].name;
    if (work.call.outputs[i].present)
      TWINOP_RETURN_IF_ERROR(
          FindValue(work, spec.input_count + i, begin, end, &outputs[i], &owned_outputs[i]));
  }
  OrtStatus* status = api->Run(work.session, nullptr, input_names, inputs, count, output_names,
                               spec.output_count, outputs);
  for (std::size_t i = 0; i < spec.output_count; ++i)  // the session makes those without memory
    if (!work.call.outputs[i].present) owned_outputs[i].reset(outputs[i], api->ReleaseValue);
  if (status != nullptr) return InBody(TakeError(api, status));
  if (spec.size_count > 0)
    for (std::size_t i = 0; i < spec.output_count; ++i)
      TWINOP_RETURN_IF_ERROR(CopyOutput(op_, work.context, i, outputs[i]));
  return {};
}

// Finds the value of the units [begin, end) of an input or, behind the inputs, an output. A whole
// one is the context's, a piece is a view. An input in an output's memory is copied, because a
// graph may read an input after it has written an output.
Status CpuGraph::FindValue(const Work& work, std::size_t i, std::int64_t begin, std::int64_t end,
                           OrtValue** value, std::shared_ptr<OrtValue>* owned) const {
  const OrtApi* api = op_.api;
  const OpSpec& spec = *op_.record;
  const Tensor* const outputs = work.call.outputs;
  const bool is_input = i < spec.input_count;
  const Tensor& tensor = is_input ? work.call.inputs[i] : outputs[i - spec.input_count];
  const bool is_overwritten =
      is_input && tensor.numel > 0 &&
      std::any_of(outputs, outputs + spec.output_count,
                  [&](const Tensor& output) { return output.data == tensor.data; });
  if (work.cut == Cut::kWhole && !is_overwritten) {
    TWINOP_RETURN_IF_ORT_ERROR(
        api, is_input
                 ? api->KernelContext_GetInput(work.context, i, const_cast<const OrtValue**>(value))
                 : api->KernelContext_GetOutput(work.context, i - spec.input_count, tensor.sizes,
                                                tensor.rank, value));
    return {};
  }
  const bool is_cut = work.cut == Cut::kElements ||
                      (work.cut == Cut::kRows && (!is_input || has_rows_[i])) ||
                      (work.cut == Cut::kBatch && tensor.sizes[0] == work.units);
  std::int64_t sizes[kMaxRank];
  std::copy_n(tensor.sizes, tensor.rank, sizes);
  std::size_t rank = tensor.rank;
  std::int64_t bytes = tensor.bytes();
  char* data = tensor.as<char>();
  if (is_cut) {
    const std::int64_t count = end - begin, bytes_of_unit = bytes / work.units;
    data += begin * bytes_of_unit;
    bytes = count * bytes_of_unit;
    if (work.cut == Cut::kRows) {  // of two dimensions
      sizes[1] = tensor.numel / work.units;
      rank = 2;
    }
    if (work.cut == Cut::kElements) std::fill_n(sizes, rank, 1);
    sizes[work.cut == Cut::kElements ? rank - 1 : 0] = count;
  }
  const auto size = static_cast<std::size_t>(bytes);
  const ONNXTensorElementDataType type = OnnxType(tensor.dtype);
  TWINOP_RETURN_IF_ORT_ERROR(
      api, is_overwritten ? api->CreateTensorAsOrtValue(allocator_, sizes, rank, type, value)
                          : api->CreateTensorWithDataAsOrtValue(memory_, data, size, sizes, rank,
                                                                type, value));
  owned->reset(*value, api->ReleaseValue);
  if (!is_overwritten) return {};
  void* copy = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorMutableData(*value, &copy));
  std::memcpy(copy, data, size);
  return {};
}

}  // namespace twinop::ort
