// Row-wise ops on the CPU. One thread reduces each row. A row of float32 or float64 is read and
// written where it lies; others, and those whose elements lie apart, pass through buffers of the
// compute type. So an op adds two loops to a library, and the code around them is shared. The
// result has the same bits for every instruction set (chosen at run time) and every number of
// threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "twinop/rowwise/cpu_loop.h"
#include "twinop/rowwise/cpu_rows.h"

namespace twinop::rowwise {

// Below this number of elements, a second thread costs more than it saves (elementwise/cpu.h).
inline constexpr std::int64_t kGrainElements = 1 << 15;

// ---------------------------------------------------------------------------------- tensors

// The tensors of a call. `arguments` counts their elements, which have the dtypes beside it.
template <class F, class T>
struct Operands {
  Arguments<F, T, T> arguments;
  DType dtype;  // of the rows
  DType columns[kColumnInputs<F> + 1], sums[F::kColumnReductions + 1];
};

template <class F, class T, class Op>
Operands<F, T> MakeOperands(const CallOf<Op>& call, const Rows& rows) {
  Operands<F, T> operands{MakeArguments<F, T, T>(call, rows), call.outputs[0].dtype, {}, {}};
  for (int j = 0; j < kColumnInputs<F>; ++j)
    operands.columns[j] = call.inputs[kColumnIndices<F, Op>[j]].dtype;
  for (int s = 0; s < F::kColumnReductions; ++s)
    operands.sums[s] = call.outputs[F::kRowOutputs + s].dtype;
  return operands;
}

template <class T>
T* ElementAt(T* data, std::int64_t element, DType dtype) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(data) +
                              element * static_cast<std::int64_t>(Info(dtype).size));
}

// Rows that are neighbours in memory make a block.
inline std::int64_t BlockRows(const Rows& rows) { return std::min(kMaxBlockRows, rows.inner); }
inline std::int64_t BlockCount(const Rows& rows) {
  const std::int64_t each = BlockRows(rows);
  return rows.count / rows.inner * ((rows.inner + each - 1) / each);
}

// ---------------------------------------------------------------------------------- a thread

// Runs the loop over blocks of rows.
template <class F, class T>
class RowRunner {
 public:
  // sums: kColumnReductions rows of column sums, or null.
  RowRunner(const F& functor, const Operands<F, T>& operands, T* sums)
      : initial_(functor),
        operands_(operands),
        arguments_(operands.arguments),
        sums_(sums),
        columns_(arguments_.rows.columns),
        tail_(columns_ % kLanes),
        is_direct_(arguments_.rows.inner == 1 && operands.dtype == DTypeOf<T>()) {
    row_.full = columns_ - tail_;
    row_.mask = tail_ > 0 ? mask_ : nullptr;
    row_.dtype = operands.dtype;
    pitch_ = row_.full + (tail_ > 0 ? kLanes : 0);
    if (arguments_.rows.inner > 1)
      pitch_ += kLine;  // or all rows would lie at one place of a cache
    for (std::int64_t i = 0; i < kLanes; ++i) mask_[i] = i < tail_ ? T(1) : T(0);
    const std::int64_t count = BlockRows(arguments_.rows);
    C &body = row_.body, &tail = row_.tail;
    for (int j = 0; j < kRowInputs<F>; ++j) {
      if (arguments_.inputs[j] == nullptr) {
        Place(Zeros(&buffers_[j]), &body.in[j], &tail.in[j]);
      } else if (!is_direct_) {
        Reserve(&buffers_[j], count);
      }
    }
    for (int k = 0; k < F::kRowOutputs; ++k) {
      tail.out[k] = tails_[kRowInputs<F> + k];
      if (!IsWritten(k) || !is_direct_) Reserve(&OutBuffer(k), count);
    }
    if constexpr (F::kReplacesValues) {
      for (int j = 1; j < kEarlyInputs<F>; ++j)
        Place(Reserve(&kept_[j], 1), &body.kept[j], &tail.kept[j]);
    }
    if constexpr (F::kFusedSumOutput >= 0) row_.fused = Reserve(&fused_, 1);
    for (int s = 0; s < F::kColumnReductions; ++s) {
      body.sums[s] = sums == nullptr ? Zeros(&unused_[s]) : sums + s * columns_;
      tail.sums[s] = tails_[kSums + s];
    }
  }

  void Run(std::int64_t begin, std::int64_t end) {
    const Rows& rows = arguments_.rows;
    const std::int64_t each = BlockRows(rows), blocks = (rows.inner + each - 1) / each;
    for (int j = 0; j < kRowInputs<F>; ++j)
      if (is_direct_ && !F::kGathers && arguments_.inputs[j] != nullptr)
        limits_[j] = arguments_.inputs[j] + (end - 1) * arguments_.strides[j] + columns_;
    SetColumns(begin);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t from = i % blocks * each;
      RunBlock(i / blocks * rows.inner + from,
               {columns_, std::min(each, rows.inner - from), rows.inner});
    }
    for (int s = 0; sums_ != nullptr && s < F::kColumnReductions; ++s)
      std::copy_n(row_.tail.sums[s], tail_, sums_ + s * columns_ + row_.full);
  }

 private:
  using C = Chunk<F, T>;
  static constexpr int kColumns = kRowInputs<F> + F::kRowOutputs,
                       kSums = kColumns + kColumnInputs<F>;

  static constexpr std::int64_t kLine = 64 / sizeof(T);

  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  using Buffer = std::unique_ptr<T[], Free>;

  // Reserves memory for rows, aligned as registers are. What their last chunk has behind them is 0.
  T* Reserve(Buffer* buffer, std::int64_t rows) const {
    const auto bytes = static_cast<std::size_t>(std::max(pitch_ * rows, kLanes)) * sizeof(T);
    buffer->reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (*buffer == nullptr) throw std::bad_alloc();
    for (std::int64_t r = 0; tail_ > 0 && r < rows; ++r)
      std::fill_n(buffer->get() + r * pitch_ + row_.full, kLanes, T(0));
    return buffer->get();
  }
  T* Zeros(Buffer* buffer) const {
    T* const row = Reserve(buffer, 1);
    std::fill_n(row, pitch_, T(0));
    return row;
  }

  Buffer& OutBuffer(int k) { return buffers_[kRowInputs<F> + k]; }
  bool IsWritten(int k) const { return arguments_.outputs[k] != nullptr; }

  template <class Pointer>
  void Place(T* row, Pointer* body, Pointer* tail) const {
    *body = row;
    *tail = row + row_.full;
  }

  // Copies the elements behind the whole chunks. std::copy_n would compile to a call, which costs
  // more than the copy.
  void CopyTail(const T* from, T* to) const {
    constexpr std::int64_t kVector = 64 / sizeof(T);
    std::int64_t i = 0;
    for (; i + kVector <= tail_; i += kVector) std::memcpy(to + i, from + i, 64);
    for (; i < tail_; ++i) {
      to[i] = from[i];
      asm volatile("");
    }
  }

  // The column inputs of a row.
  void SetColumns(std::int64_t row) {
    for (int j = 0; j < kColumnInputs<F>; ++j) {
      const DType dtype = operands_.columns[j];
      const T* const first = arguments_.columns[j];
      Buffer& buffer = column_buffers_[j];
      if (first != nullptr && dtype == DTypeOf<T>()) {
        row_.body.columns[j] = arguments_.Column(j, row);
        std::fill_n(tails_[kColumns + j], kLanes, T(0));
        CopyTail(row_.body.columns[j] + row_.full, tails_[kColumns + j]);
        row_.tail.columns[j] = tails_[kColumns + j];
        continue;
      }
      if (buffer.get() == nullptr) Reserve(&buffer, 1);
      Place(buffer.get(), &row_.body.columns[j], &row_.tail.columns[j]);
      if (first == nullptr) {
        std::fill_n(buffer.get(), pitch_, T(initial_.ColumnDefault(j)));
      } else {
        ReadRows(dtype, ElementAt(first, arguments_.Column(j, row) - first, dtype),
                 {columns_, 1, 1}, buffer.get(), pitch_);
      }
    }
  }

  // Where the block of a tensor begins that begins with this row.
  template <class Pointer>
  Pointer* BlockAt(Pointer* data, std::int64_t row, std::int64_t stride) const {
    const std::int64_t inner = arguments_.rows.inner;
    const std::int64_t element =
        inner == 1 ? row * stride : row / inner * columns_ * inner + row % inner;
    return ElementAt(data, element, operands_.dtype);
  }

  void RunBlock(std::int64_t first, const RowBlock& block) {
    if constexpr (F::kColumnsOfBatch)
      if (first % arguments_.column_rows == 0) SetColumns(first);
    C &body = row_.body, &tail = row_.tail;
    for (int j = 0; j < kRowInputs<F>; ++j) {
      if (arguments_.inputs[j] == nullptr) continue;
      const T* const data =
          BlockAt(arguments_.inputs[j], arguments_.InputRow(j, first), arguments_.strides[j]);
      if (is_direct_) {
        // A load of what was just copied would wait for the copy: the tail is read in place if a
        // whole chunk is within this thread's rows.
        body.in[j] = data;
        tail.in[j] = tails_[j];
        if (data + row_.full + kLanes <= limits_[j]) {
          tail.in[j] = data + row_.full;
        } else {
          CopyTail(data + row_.full, tails_[j]);
        }
      } else {
        ReadRows(operands_.dtype, data, block, buffers_[j].get(), pitch_);
      }
    }
    for (std::int64_t r = 0; r < block.count; ++r) {
      for (int j = 0; j < kRowInputs<F>; ++j)
        if (!is_direct_ && arguments_.inputs[j] != nullptr)
          Place(buffers_[j].get() + r * pitch_, &body.in[j], &tail.in[j]);
      for (int k = 0; k < F::kRowOutputs; ++k) {
        if (is_direct_ && IsWritten(k)) {
          body.out[k] = BlockAt(arguments_.outputs[k], first, columns_);
        } else {
          Place(OutBuffer(k).get() + r * pitch_, &body.out[k], &tail.out[k]);
        }
      }
      body.kept[0] = body.out[0];
      tail.kept[0] = tail.out[0];
      loop_(arguments_.FunctorOf(initial_, first + r), row_);
    }
    for (int k = 0; k < F::kRowOutputs; ++k) {
      if (!IsWritten(k)) continue;
      if (is_direct_) {
        CopyTail(tail.out[k], body.out[k] + row_.full);
      } else {
        WriteRows(operands_.dtype, OutBuffer(k).get(), pitch_, block,
                  BlockAt(arguments_.outputs[k], first, columns_));
      }
    }
  }

  const F& initial_;
  const Operands<F, T>& operands_;
  const Arguments<F, T, T>& arguments_;
  T* const sums_;
  const std::int64_t columns_, tail_;
  const bool is_direct_;
  std::int64_t pitch_;  // elements from one row of a buffer to the next
  Row<F, T> row_{};
  void (*const loop_)(const F&, const Row<F, T>&) =
      ByLevel<RowLoop<F, T>, void(const F&, const Row<F, T>&)>::Choose();
  const T* limits_[kRowInputs<F>] = {};  // the ends of this thread's rows
  alignas(64) T mask_[kLanes];
  alignas(64) T tails_[kSums + F::kColumnReductions + 1][kLanes] = {};
  Buffer buffers_[kRowInputs<F> + F::kRowOutputs], column_buffers_[kColumnInputs<F> + 1];
  Buffer kept_[kRowInputs<F>], fused_, unused_[F::kColumnReductions + 1];
};

// ---------------------------------------------------------------------------------- a call

inline std::int64_t Grain(std::int64_t elements) {
  return std::max(std::int64_t{1}, kGrainElements / std::max(std::int64_t{1}, elements));
}

// Each group of consecutive rows has its own partial sums. The partial sums are then added in the
// order of the groups. Only the shape determines this order.
template <class F, class T>
void SumColumns(const Call& call, const F& functor, const Operands<F, T>& operands) {
  // A group's sums are written and read once more, so a group has at least this many rows.
  constexpr std::int64_t kMinRowsPerGroup = 16;
  constexpr std::int64_t kGroups = 128;
  static_assert(kGroups <= kPartials && sizeof(T) * F::kColumnReductions <= 16);
  const Rows& rows = operands.arguments.rows;
  const std::int64_t groups = std::clamp(rows.count / kMinRowsPerGroup, std::int64_t{1}, kGroups);
  const std::int64_t size = F::kColumnReductions * rows.columns;
  T* const partials = static_cast<T*>(call.scratch);
  if (rows.count > 0) {
    call.context->ParallelFor(groups, Grain(rows.columns * (rows.count / groups)),
                              [&](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t g = begin; g < end; ++g) {
                                  std::fill_n(partials + g * size, size, T(0));
                                  RowRunner<F, T>(functor, operands, partials + g * size)
                                      .Run(rows.count * g / groups, rows.count * (g + 1) / groups);
                                }
                              });
  }
  const std::int64_t chunks = (rows.columns + kLanes - 1) / kLanes;
  const std::int64_t terms = rows.count > 0 ? groups : 0;
  call.context->ParallelFor(
      chunks, Grain(kLanes * groups), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t c = begin * kLanes; c < std::min(end * kLanes, rows.columns);
             c += kLanes) {
          const std::int64_t count = std::min(kLanes, rows.columns - c);
          for (int s = 0; s < F::kColumnReductions; ++s) {
            if (operands.arguments.sums[s] == nullptr) continue;
            T totals[kLanes] = {};
            for (std::int64_t g = 0; g < terms; ++g)
              for (std::int64_t i = 0; i < count; ++i)
                totals[i] += partials[g * size + s * rows.columns + c + i];
            WriteRows(operands.sums[s], totals, kLanes, {count, 1, 1},
                      ElementAt(operands.arguments.sums[s], c, operands.sums[s]));
          }
        }
      });
}

template <class F, class T, class Op>
Status RunOnPool(const CallOf<Op>& call) {
  const Rows rows = RowsOf<F>(call);
  const F functor = MakeFunctor<F>(call, rows);
  const Operands<F, T> operands = MakeOperands<F, T>(call, rows);
  if constexpr (F::kColumnReductions > 0) {
    const auto& sums = operands.arguments.sums;
    if (std::any_of(sums, sums + F::kColumnReductions, [](T* sum) { return sum != nullptr; })) {
      SumColumns(call, functor, operands);
      return {};
    }
  }
  if (rows.count == 0 || rows.columns == 0) return {};
  const std::int64_t blocks = BlockCount(rows);
  call.context->ParallelFor(blocks, Grain(rows.columns * (rows.count / blocks)),
                            [&](std::int64_t begin, std::int64_t end) {
                              RowRunner<F, T>(functor, operands, nullptr).Run(begin, end);
                            });
  return {};
}

template <template <class> class F, class Op>
Status Run(const CallOf<Op>& call) {
  if (call.outputs[0].dtype == DType::kFloat64) return RunOnPool<F<double>, double>(call);
  return RunOnPool<F<float>, float>(call);
}

}  // namespace twinop::rowwise
