// embed_layer_norm -> torch.ops.custom_domain.embed_layer_norm, CustomEmbedLayerNorm.
#pragma once

#include <cmath>
#include <string>

#include "twinop/ops/layer_norm/functor.h"
#include "twinop/rowwise.h"

namespace twinop {

// The embeddings of BERT and its relatives: sum = table[ids] + rows, rounded to the tensors' type,
// and y = layer_norm(sum) * weight + bias. ids [B, S] index the rows of table [V, C]; rows [1 or B,
// S, C] is the sum of the other embeddings, such as those of the positions.
//
// ids are -V to V - 1, and negative ones count from the end, as in ONNX's Gather. Of others, y and
// sum are NaN, and the gradient of the table has nothing.
template <class T>
struct EmbedLayerNorm : AddLayerNorm<T> {
  static constexpr auto kRows = rowwise::Names("table", "rows");
  static constexpr bool kGathers = true;
  using AddLayerNorm<T>::AddLayerNorm;
  using typename AddLayerNorm<T>::Row;

  bool has_row = true;  // the id's

  TWINOP_INLINE T FusedSum(const Row& row) const {
    const T sum = AddLayerNorm<T>::FusedSum(row);
    return has_row ? sum : T(NAN);
  }
};

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
