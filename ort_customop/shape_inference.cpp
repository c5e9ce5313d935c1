// Infers output shapes at session creation from the record's shape expressions.
#include "ort_customop/api.h"
#include "twinop/record/check.h"

namespace twinop::ort {
namespace {

Status ReadInput(const OrtApi* api, OrtShapeInferContext* context, std::size_t input,
                 ONNXTensorElementDataType* type, Shape* shape) {
  OrtTensorTypeAndShapeInfo* info = nullptr;  // belongs to the context
  TWINOP_RETURN_IF_ORT_ERROR(api, api->ShapeInferContext_GetInputTypeShape(context, input, &info));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetTensorElementType(info, type));
  std::size_t rank = 0;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetDimensionsCount(info, &rank));
  // ORT shows an unknown rank as rank 0, like that of a scalar.
  if (rank == 0 || rank > kMaxRank) {
    shape->known_rank = false;
    return {};
  }
  std::int64_t sizes[kMaxRank];
  const char* symbols[kMaxRank] = {};
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetDimensions(info, sizes, rank));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->GetSymbolicDimensions(info, symbols, rank));
  for (std::size_t i = 0; i < rank; ++i) {
    bool named = sizes[i] < 0 && symbols[i] != nullptr && symbols[i][0] != '\0';
    shape->Push(Dim{sizes[i], named ? symbols[i] : nullptr});
  }
  return {};
}

Status ReadAttribute(const OrtApi* api, OrtShapeInferContext* context, const OpSpec& record,
                     std::size_t index, Attribute* value, AttributeStorage* storage) {
  const Argument& argument = record.attribute(index);
  const OrtOpAttr* attribute = nullptr;
  if (!Ok(api, api->ShapeInferContext_GetAttribute(context, argument.name, &attribute)) ||
      attribute == nullptr) {
    SetDefault(argument, value, storage);
    return {};
  }
  // Shapes depend on ints and strings.
  std::size_t bytes = 0;
  if (argument.kind == Kind::kInt || argument.kind == Kind::kBool) {
    TWINOP_RETURN_IF_ORT_ERROR(
        api, api->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value->i, sizeof(value->i), &bytes));
  } else if (argument.kind == Kind::kIntList) {
    TWINOP_RETURN_IF_ORT_ERROR(api, api->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, storage->ints,
                                                    sizeof(storage->ints), &bytes));
    value->ints = storage->ints;
    value->count = bytes / sizeof(std::int64_t);
  } else if (argument.kind == Kind::kString) {
    storage->text.resize(TWINOP_MAX_NAME);  // longer ones are no choice of the op
    const bool is_read = Ok(api, api->ReadOpAttr(attribute, ORT_OP_ATTR_STRING,
                                                 storage->text.data(), TWINOP_MAX_NAME, &bytes));
    storage->text.resize(is_read ? bytes : 0);
    value->set_text(storage->text.c_str());
  }
  return {};
}

// Sets the output's type and shape if each dimension has a size or a name. With an unknown
// dimension without a name, ORT's buffer planner would fail with a re-use mismatch.
Status SetOutput(const OrtApi* api, OrtShapeInferContext* context, std::size_t output, DType dtype,
                 const Shape& shape) {
  if (dtype == DType::kNone) return {};
  std::int64_t sizes[kMaxRank];
  const char* symbols[kMaxRank];
  for (std::size_t i = 0; i < shape.rank; ++i) {
    const Dim& dim = shape.dims[i];
    if (!dim.known() && dim.symbol == nullptr) return {};
    sizes[i] = dim.known() ? dim.value : -1;
    symbols[i] = dim.known() ? "" : dim.symbol;
  }
  if (!shape.known_rank || shape.rank == 0) return {};
  OrtTensorTypeAndShapeInfo* info = nullptr;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateTensorTypeAndShapeInfo(&info));
  const Owned<OrtTensorTypeAndShapeInfo> owned(info, api->ReleaseTensorTypeAndShapeInfo);
  TWINOP_RETURN_IF_ORT_ERROR(api, api->SetTensorElementType(info, OnnxType(dtype)));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->SetDimensions(info, sizes, shape.rank));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->SetSymbolicDimensions(info, symbols, shape.rank));
  TWINOP_RETURN_IF_ORT_ERROR(api, api->ShapeInferContext_SetOutputTypeShape(context, output, info));
  return {};
}

// The output's type for these input types, some of which may be unknown (UNDEFINED), or kNone.
DType OutputType(const OpSpec& record, const ONNXTensorElementDataType* inputs,
                 std::size_t output) {
  for (std::size_t c = 0; c < record.combination_count; ++c) {
    bool matches = true;
    for (std::size_t i = 0; i < record.input_count; ++i)
      matches = matches && (inputs[i] == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED ||
                            inputs[i] == OnnxType(record.input_types[c][i]));
    if (matches) return record.output_types[c][output];
  }
  return DType::kNone;
}

// ORT keeps one inference function for all ops of a name, that of the first op. So dtypes come from
// the node's inputs and not from `op`.
Status Infer(const Op& op, OrtShapeInferContext* context) {
  const OrtApi* api = op.api;
  const OpSpec& record = *op.record;
  std::size_t given = 0;
  TWINOP_RETURN_IF_ORT_ERROR(api, api->ShapeInferContext_GetInputCount(context, &given));
  Shape shapes[kMaxArguments];
  const Shape* inputs[kMaxArguments] = {};
  ONNXTensorElementDataType types[kMaxArguments] = {};
  // Optional inputs are unknown, because ORT fails when it is asked for an absent one.
  for (std::size_t i = 0; i < record.input_count; ++i) {
    inputs[i] = &shapes[i];
    shapes[i].known_rank = record.input(i).kind != Kind::kOptionalTensor;
  }
  for (std::size_t i = 0; i < given && i < record.input_count; ++i) {
    if (record.input(i).kind == Kind::kOptionalTensor) continue;
    TWINOP_RETURN_IF_ERROR(ReadInput(api, context, i, &types[i], &shapes[i]));
  }
  Attribute attributes[kMaxArguments];
  AttributeStorage storage[kMaxArguments];
  for (std::size_t i = 0; i < record.attribute_count; ++i)
    TWINOP_RETURN_IF_ERROR(ReadAttribute(api, context, record, i, &attributes[i], &storage[i]));
  const ShapeScope scope{record.nodes, inputs, attributes};
  for (std::size_t i = 0; i < record.output_count; ++i) {
    Shape shape = scope.Evaluate(record.outputs[i].shape);
    Status status = SetOutput(api, context, i, OutputType(record, types, i), shape);
    if (!status.ok() && !record.outputs[i].is_optional)
      return status;  // ORT fails for an absent one
  }
  return {};
}

}  // namespace

OrtStatusPtr InferShapes(const OrtCustomOp* ort_op, OrtShapeInferContext* context) {
  const Op& op = *static_cast<const Op*>(ort_op);
  return Guard(op.api, [&] {
    Status status = Infer(op, context);
    if (status.ok()) return static_cast<OrtStatusPtr>(nullptr);
    return ToOrt(
        op.api,
        Status::Error(std::string(op.record->onnx_name) + ": shape inference: " + status.message()),
        ORT_INVALID_GRAPH);
  });
}

}  // namespace twinop::ort
