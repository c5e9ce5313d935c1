// The arguments that a row-wise loop or kernel takes from a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "twinop/rowwise.h"

namespace twinop::rowwise {

// The rows of a functor with kGathers.
struct Gather {
  const void* ids;
  bool ids_are_32_bits;
  std::int64_t ids_columns, ids_stride;  // S, and the elements from one sequence to the next
  std::int64_t input_rows[2];            // of the table and of the second input

  // Negative ids count from the table's end.
  TWINOP_INLINE std::int64_t Id(std::int64_t row) const {
    const std::int64_t place = row / ids_columns * ids_stride + row % ids_columns;
    const std::int64_t id = ids_are_32_bits ? static_cast<const std::int32_t*>(ids)[place]
                                            : static_cast<const std::int64_t*>(ids)[place];
    return id < 0 ? id + input_rows[0] : id;
  }
  TWINOP_INLINE bool HasRow(std::int64_t row) const {
    return static_cast<std::uint64_t>(Id(row)) < static_cast<std::uint64_t>(input_rows[0]);
  }
  // Of an id outside of the table, its first or last row.
  TWINOP_INLINE std::int64_t Row(int j, std::int64_t row) const {
    if (j == 1) return row % input_rows[1];
    const std::int64_t id = Id(row);
    return id < 0 ? 0 : id < input_rows[0] ? id : input_rows[0] - 1;
  }
};

// The column inputs of a functor with kColumnsOfBatch.
template <int kColumns>
struct BatchColumns {
  std::int64_t column_rows;               // that share the values
  std::int64_t column_strides[kColumns];  // elements to the values of the next rows
};

// What a functor with kQuantises also writes.
struct Quantised {
  Float8E4M3* q;
  float* scale;
};

struct NoMore {};
template <class F>
using MoreArguments =
    std::conditional_t<F::kGathers, Gather,
                       std::conditional_t<F::kColumnsOfBatch, BatchColumns<kColumnInputs<F>>,
                                          std::conditional_t<F::kQuantises, Quantised, NoMore>>>;

// The tensors of a call: rows have element type S, column inputs and column sums have W.
template <class F, class S, class W>
struct Arguments : MoreArguments<F> {
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;

  const S* inputs[kInputs];           // null: absent
  std::int64_t strides[kInputs];      // elements from row to row
  const W* columns[kColumns + 1];     // null: absent
  S* outputs[F::kRowOutputs];         // dense; null: not wanted
  W* sums[F::kColumnReductions + 1];  // null: not wanted
  Rows rows;

  // The row of the j-th input that goes into a row of the results. Threads without a row ask, too:
  // they get the last one's, because ids end there.
  TWINOP_INLINE std::int64_t InputRow(int j, std::int64_t row) const {
    if constexpr (F::kGathers) {
      return this->Row(j, row < rows.count ? row : rows.count - 1);
    } else {
      return row;
    }
  }

  // The functor with which a row begins.
  TWINOP_INLINE F FunctorOf(const F& functor, std::int64_t row) const {
    F own = functor;
    if constexpr (F::kGathers) own.has_row = this->HasRow(row < rows.count ? row : rows.count - 1);
    return own;
  }

  // The column input of a row, or of the last one; null: absent.
  TWINOP_INLINE const W* Column(int c, std::int64_t row) const {
    if constexpr (F::kColumnsOfBatch) {
      row = row < rows.count ? row : rows.count - 1;
      return columns[c] + row / this->column_rows * this->column_strides[c];
    } else {
      return columns[c];
    }
  }
};

template <class F, class S, class W, class Op>
Arguments<F, S, W> MakeArguments(const CallOf<Op>& call, const Rows& rows) {
  Arguments<F, S, W> arguments{};
  arguments.rows = rows;
  for (int i = 0; i < kRowInputs<F>; ++i) {
    const Tensor& input = call.inputs[kRowIndices<F, Op>[i]];
    const Rows whole{rows.count, F::kHalves ? 2 * rows.columns : rows.columns, rows.inner};
    arguments.inputs[i] = input.template as<const S>();
    if (F::kHalves && i == 1) arguments.inputs[i] += rows.columns;
    arguments.strides[i] = input.data == nullptr ? 0 : RowStride(input, whole);
  }
  for (int i = 0; i < kColumnInputs<F>; ++i) {
    const Tensor& input = call.inputs[kColumnIndices<F, Op>[i]];
    arguments.columns[i] = input.template as<const W>();
    if constexpr (F::kColumnsOfBatch) {
      arguments.column_rows = rows.count / std::max<std::int64_t>(input.sizes[0], 1);
      arguments.column_strides[i] = RowStride(input, rows);
    }
  }
  if constexpr (F::kGathers) {
    const Tensor& ids = InputOf(call, "ids"_name);
    arguments.ids = ids.data;
    arguments.ids_are_32_bits = ids.dtype == DType::kInt32;
    arguments.ids_columns = ids.sizes[1];
    arguments.ids_stride = ids.strides == nullptr ? ids.sizes[1] : ids.strides[0];
    for (int i = 0; i < 2; ++i) {
      const Tensor& input = call.inputs[kRowIndices<F, Op>[i]];
      arguments.input_rows[i] = input.numel / std::max<std::int64_t>(rows.columns, 1);
    }
  }
  for (int i = 0; i < F::kRowOutputs; ++i) arguments.outputs[i] = call.outputs[i].template as<S>();
  for (int i = 0; i < F::kColumnReductions; ++i) {
    const Tensor& sum = call.outputs[F::kRowOutputs + i];
    arguments.sums[i] = sum.numel == 0 ? nullptr : sum.template as<W>();
  }
  return arguments;
}

// Whether the record has 16-bit rows with column inputs of float32.
template <class F, class Op>
constexpr bool HasFloatColumns() {
  for (std::size_t i = 0; i < Op::kRecord.combination_count; ++i) {
    const auto& types = Op::kRecord.input_types[i];
    if (kColumnInputs<F> > 0 && Info(types[kRowIndices<F, Op>[0]]).size == 2 &&
        types[kColumnIndices<F, Op>[0]] == DType::kFloat32)
      return true;
  }
  return false;
}

// Calls body(functor, Arguments) for the call's types. Column inputs have the type of the rows or,
// if the rows have 16-bit types, float32.
template <template <class> class F, class Op, class Body>
[[gnu::always_inline]] inline Status DispatchRows(const CallOf<Op>& call, Body&& body) {
  const auto run = [&](auto tag) {
    using S = typename decltype(tag)::Type;
    using Functor = F<ElementCompute<S>>;
    const Rows rows = RowsOf<Functor>(call);
    const auto functor = MakeFunctor<Functor>(call, rows);
    if constexpr (sizeof(S) == 2 && HasFloatColumns<Functor, Op>()) {
      for (int i = 0; i < kColumnInputs<Functor>; ++i) {
        const Tensor& column = call.inputs[kColumnIndices<Functor, Op>[i]];
        if (column.present && column.dtype == DType::kFloat32)
          return body(functor, MakeArguments<Functor, S, float>(call, rows));
      }
      // If the weight of a backward op is absent, the gradient of its bias has the type.
      for (int i = 0; i < Functor::kColumnReductions; ++i)
        if (call.outputs[Functor::kRowOutputs + i].dtype == DType::kFloat32)
          return body(functor, MakeArguments<Functor, S, float>(call, rows));
    }
    return body(functor, MakeArguments<Functor, S, S>(call, rows));
  };
  const DType dtype = call.outputs[0].dtype;
  if constexpr (F<float>::kQuantises) {
    return Dispatch<Half, BFloat16>(dtype, run);
  } else {
    return DispatchFloat(dtype, run);
  }
}

}  // namespace twinop::rowwise
