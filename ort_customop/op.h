// One OrtCustomOp for each record, dtype combination and execution provider. It is the raw C
// struct, which works with the widest range of runtimes and has the lowest cost per call.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_c_api.h>

#include <string>

#include "twinop/record/check.h"

namespace twinop::ort {

// The oldest API that has all functions used here except TypeAndShapeReference (api.h).
inline constexpr std::uint32_t kApiVersion = 18;

struct Op : OrtCustomOp {
  const OpSpec* record;
  std::int32_t domain_version;
  bool on_cuda;
  twinop_launch launch;  // null: a graph runs instead (cpu_graph.h)
  DType input_types[kMaxArguments];
  DType output_types[kMaxOutputs];
  const OrtApi* api;
  const OrtApi* api24;        // null on runtimes before 1.24
  int runtime_minor;          // 23 for ORT 1.23.2
  OrtCustomOpDomain* domain;  // the op is in
};

Op MakeOp(const OpSpec& record, std::int32_t domain_version, std::size_t combination, bool on_cuda,
          const OrtApi* api, const OrtApi* api24, int runtime_minor);

// Callbacks in files of their own.
OrtStatusPtr CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                          void** kernel);
using ComputeFunction = OrtStatusPtr(ORT_API_CALL*)(void* kernel, OrtKernelContext* context);
ComputeFunction FindCompute(const Op& op);
void DestroyKernel(void* kernel);
OrtStatusPtr InferShapes(const OrtCustomOp* op, OrtShapeInferContext* context);

// ONNX Runtime numbers its element types as ONNX does.
inline ONNXTensorElementDataType OnnxType(DType dtype) {
  return static_cast<ONNXTensorElementDataType>(Info(dtype).onnx);
}

// Reads the node's attributes (attributes.cpp).
Status ReadAttributes(const OpSpec& record, const OrtApi* api, const OrtKernelInfo* info,
                      Attribute* values, AttributeStorage* storage);

}  // namespace twinop::ort
