// Runs a row-wise op's steps over the tensors of a call (cpu.h).
#include "kernels/rowwise.h"

#include <algorithm>
#include <iterator>

#include "kernels/rowwise/cpu_row.h"

namespace twinop::rowwise {
namespace {

// The fewest interleaved rows that are computed side by side, a lane each.
constexpr std::int64_t kMinInterleaved = 16;

// Elements below which a second thread costs more than it saves (elementwise/cpu.cpp).
constexpr std::int64_t kGrainElements = 1 << 15;

std::int64_t Grain(std::int64_t elements) {
  return std::max(std::int64_t{1}, kGrainElements / std::max(std::int64_t{1}, elements));
}

// Units of work are rows, or groups of up to kLanes interleaved rows. Returns the number of groups
// that lie side by side.
template <class T>
std::int64_t UnitsAcross(const RowCall<T>& call) {
  return (call.rows.inner + kLanes - 1) / kLanes;
}

// Runs the units with the op's loop over contiguous rows. Returns false where the loop does not
// accept them.
template <class T>
bool RunContiguous(const RowCall<T>& call, std::int64_t begin, std::int64_t end, T* sums) {
  const RowOp& op = call.kernels.op;
  const bool converts = call.row_format.conversion != nullptr;
  const auto* const loop = converts ? call.kernels.bfloat16_rows : &call.kernels.rows;
  if (call.rows.inner != 1 ||
      (converts && call.row_format.conversion != ConversionOf(DType::kBFloat16)))
    return false;
  const std::int64_t columns = call.rows.columns;
  const bool converts_columns = call.column_format.conversion != nullptr;
  const bool stores_in_output = !converts && op.early_inputs == 1 && call.outputs[0] != nullptr;
  // The column inputs as T, then the values of a row.
  alignas(64) T buffer[kKeptRowBytes / sizeof(T)];
  const std::int64_t converted = converts_columns ? op.columns * columns : 0;
  const std::int64_t stored = op.stores_values && !stores_in_output ? op.early_inputs * columns : 0;
  if (converted + stored > static_cast<std::int64_t>(std::size(buffer))) return false;

  ContiguousRows<T> rows{end - begin, columns,           {}, {}, {}, call.defaults, {},
                         sums,        buffer + converted};
  for (int j = 0; j < op.inputs; ++j) {
    rows.strides[j] = call.strides[j];
    if (call.inputs[j] != nullptr)
      rows.inputs[j] = call.inputs[j] + begin * call.strides[j] * call.row_format.size;
  }
  for (int k = 0; k < op.outputs; ++k)
    if (call.outputs[k] != nullptr)
      rows.outputs[k] = call.outputs[k] + begin * columns * call.row_format.size;
  for (int j = 0; j < op.columns; ++j) {
    if (call.columns[j] == nullptr) continue;
    rows.column_inputs[j] = reinterpret_cast<const T*>(call.columns[j]);
    if (!converts_columns) continue;
    Load<T>(call.column_format, call.columns[j], columns, buffer + j * columns);
    rows.column_inputs[j] = buffer + j * columns;
  }
  (*loop)(call.functor, &rows);
  return true;
}

template <class T>
void RunUnits(const RowCall<T>& call, std::int64_t begin, std::int64_t end, T* sums) {
  if (RunContiguous(call, begin, end, sums)) return;
  RowWorker<T> worker(call, sums);
  const std::int64_t inner = call.rows.inner;
  for (std::int64_t unit = begin; unit < end; ++unit) {
    if (call.lanes_are_rows) {
      const std::int64_t across = UnitsAcross(call), first = unit % across * kLanes;
      worker.Run(unit / across * inner + first, std::min(kLanes, inner - first));
    } else {
      worker.Run(unit, kLanes);
    }
  }
  worker.FinishSums();
}

// Adds the rows to `groups` partial sums, each of neighbouring rows, and then these one by one to
// the result: the shape alone determines the order.
template <class T>
void SumColumns(const Call& call, const RowCall<T>& rows_call) {
  constexpr std::int64_t kRowsEach = 16;  // at least: each group costs one more write and read
  constexpr std::int64_t kGroups = 128;
  static_assert(kGroups <= kPartials);
  const Rows& rows = rows_call.rows;
  const std::int64_t groups = std::clamp(rows.count / kRowsEach, std::int64_t{1}, kGroups);
  const std::int64_t size = rows_call.kernels.op.sums * rows.columns;
  T* const partials = static_cast<T*>(call.scratch);
  if (rows.count > 0) {
    call.context->ParallelFor(groups, Grain(rows.columns * (rows.count / groups)),
                              [&](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t g = begin; g < end; ++g) {
                                  std::fill_n(partials + g * size, size, T(0));
                                  RunUnits<T>(rows_call, rows.count * g / groups,
                                              rows.count * (g + 1) / groups, partials + g * size);
                                }
                              });
  }
  const auto sum = [&](int s, std::int64_t first) {
    const std::int64_t count = std::min(kLanes, rows.columns - first);
    T totals[kLanes] = {};
    for (std::int64_t g = 0; g < (rows.count > 0 ? groups : 0); ++g)
      for (std::int64_t i = 0; i < count; ++i)
        totals[i] += partials[g * size + s * rows.columns + first + i];
    Store<T>(rows_call.column_format, totals, count,
             rows_call.sums[s] + first * rows_call.column_format.size);
  };
  call.context->ParallelFor((rows.columns + kLanes - 1) / kLanes, Grain(kLanes * groups),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t i = begin; i < end; ++i)
                                for (int s = 0; s < rows_call.kernels.op.sums; ++s)
                                  if (rows_call.sums[s] != nullptr) sum(s, i * kLanes);
                            });
}

template <class T>
RowCall<T> MakeRowCall(const Call& call, const RowKernels<T>& kernels, const Rows& rows,
                       const void* functor, const T* defaults) {
  const RowOp& op = kernels.op;
  // Weights and their gradients may be of float32 where the rows are of a 16-bit type.
  DType columns_dtype = call.outputs[0].dtype;
  for (int j = 0; j < op.columns; ++j) {
    const Tensor& column = call.inputs[op.column_inputs[j]];
    if (column.present) columns_dtype = column.dtype;
  }
  for (int s = 0; s < op.sums; ++s) columns_dtype = call.outputs[op.outputs + s].dtype;

  const auto format = [](DType dtype) {
    return typename RowCall<T>::Format{ConversionOf(dtype),
                                       static_cast<std::int64_t>(Info(dtype).size)};
  };
  const bool may_interleave = op.columns == 0 && op.sums == 0;
  RowCall<T> result{kernels,
                    functor,
                    defaults,
                    rows,
                    may_interleave && rows.inner >= kMinInterleaved,
                    format(call.outputs[0].dtype),
                    format(columns_dtype),
                    {},
                    {},
                    {},
                    {},
                    {}};
  for (int j = 0; j < op.inputs; ++j) {
    const Tensor& input = call.inputs[op.row_inputs[j]];
    result.inputs[j] = input.as<const char>();
    result.strides[j] = input.data == nullptr ? 0 : RowStride(input, rows);
  }
  for (int j = 0; j < op.columns; ++j)
    result.columns[j] = call.inputs[op.column_inputs[j]].as<const char>();
  for (int k = 0; k < op.outputs; ++k) result.outputs[k] = call.outputs[k].as<char>();
  for (int s = 0; s < op.sums; ++s) {
    const Tensor& sum = call.outputs[op.outputs + s];
    result.sums[s] = sum.numel == 0 ? nullptr : sum.as<char>();
  }
  return result;
}

}  // namespace

template <class T>
Status RunRows(const Call& call, const RowKernels<T>& kernels, const Rows& rows,
               const void* functor, const T* defaults) {
  const RowCall<T> rows_call = MakeRowCall(call, kernels, rows, functor, defaults);
  for (int s = 0; s < kernels.op.sums; ++s) {
    if (rows_call.sums[s] == nullptr) continue;
    SumColumns(call, rows_call);
    return {};
  }
  if (rows.count == 0 || rows.columns == 0) return {};
  const std::int64_t units =
      rows_call.lanes_are_rows ? rows.count / rows.inner * UnitsAcross(rows_call) : rows.count;
  call.context->ParallelFor(
      units, Grain(rows.columns * (rows.count / units)),
      [&](std::int64_t begin, std::int64_t end) { RunUnits<T>(rows_call, begin, end, nullptr); });
  return {};
}

template Status RunRows(const Call&, const RowKernels<float>&, const Rows&, const void*,
                        const float*);
template Status RunRows(const Call&, const RowKernels<double>&, const Rows&, const void*,
                        const double*);

}  // namespace twinop::rowwise
