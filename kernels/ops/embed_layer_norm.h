// embed_layer_norm -> torch.ops.custom_domain.embed_layer_norm, CustomEmbedLayerNorm.
#pragma once

#include <string>

#include "twinop/rowwise.h"
#include "twinop/rowwise/layer_norm.h"

namespace twinop {

// The embeddings of BERT and its relatives: sum = table[ids] + rows, rounded to the tensors' type,
// and y = layer_norm(sum) * weight + bias. ids [B, S] index the rows of table [V, C]; rows [1 or B,
// S, C] is the sum of the other embeddings, such as those of the positions.
//
// The rule for ids: -V to V - 1, and negative ones count from the end, as in ONNX's Gather. Others
// are an error on the CPU, in the function body as well. A CUDA kernel cannot report one without
// waiting for the GPU: it reads the first or the last row instead, never other memory.
template <class T>
struct EmbedLayerNorm : AddLayerNorm<T> {
  static constexpr auto kRows = rowwise::Names("table", "rows");
  static constexpr bool kGathers = true;
  using AddLayerNorm<T>::AddLayerNorm;
};

#if !defined(__CUDACC__)
inline Status CheckIds(const Tensor& ids, std::int64_t entries) {
  const std::int64_t stride = ids.strides == nullptr ? ids.sizes[1] : ids.strides[0];
  for (std::int64_t b = 0; b < ids.sizes[0]; ++b) {
    for (std::int64_t s = 0; s < ids.sizes[1]; ++s) {
      const std::int64_t at = b * stride + s;
      const std::int64_t id = ids.dtype == DType::kInt32 ? ids.as<const std::int32_t>()[at]
                                                         : ids.as<const std::int64_t>()[at];
      if (id < -entries || id >= entries)
        return Status::Error("ids[" + std::to_string(b) + ", " + std::to_string(s) + "] is " +
                             std::to_string(id) + "; the table has " + std::to_string(entries) +
                             " rows");
    }
  }
  return {};
}
#endif

template <class Op>
Status LaunchEmbedLayerNorm(const CallOf<Op>& call) {
  const Tensor& ids = InputOf(call, "ids"_name);
  const std::int64_t batch = InputOf(call, "rows"_name).sizes[0];
  const std::int64_t entries = InputOf(call, "table"_name).sizes[0];
  if (batch != 1 && batch != ids.sizes[0])
    return Status::Error("rows is for " + std::to_string(batch) +
                         " sequences; expected 1, for all, or " + std::to_string(ids.sizes[0]) +
                         ", as ids has");
  if (entries == 0) return Status::Error("the table has no rows to choose from");
#if !defined(__CUDACC__)  // on CUDA the host cannot read the ids
  TWINOP_RETURN_IF_ERROR(CheckIds(ids, entries));
#endif
  return rowwise::Launcher<EmbedLayerNorm>(call);
}

// clang-format off
TWINOP_OP(embed_layer_norm,
          Record("embed_layer_norm(Tensor table, Tensor ids, Tensor rows, Tensor weight, Tensor? bias=None, "
                 "float eps=1e-5) -> (Tensor y, Tensor sum)")
              .dtypes("float32 ids=int64; float16 ids=int64; bfloat16 ids=int64; float64 ids=int64; "
                      "float32 ids=int32; float16 ids=int32; bfloat16 ids=int32; float64 ids=int32")
              .rows("-1")
              .shapes("y = ids + table[1:]; sum = ids + table[1:]")
              .input_shapes("ids = [ids[0], ids[1]]; table = [table[0], table[1]]; "
                            "rows = [rows[0], ids[1], table[1]]; weight = table[1:]; bias = table[1:]")
              .limits("eps >= 0")
              .memory("sum = optional"),
          LaunchEmbedLayerNorm)
// clang-format on

}  // namespace twinop
