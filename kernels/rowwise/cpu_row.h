// Computes the rows that an op's loop over contiguous rows does not accept: fp16, strided and
// interleaved rows. Tiles of interleaved rows of the compute type are used in place; all others
// pass through buffers. A row that fits in the second-level cache is converted once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/rowwise/cpu_call.h"

namespace twinop::rowwise {

template <class T>
class RowWorker {
 public:
  // `sums`: op.sums rows of column sums, or null.
  RowWorker(const RowCall<T>& call, T* sums)
      : call_(call),
        op_(call.kernels.op),
        step_(call.kernels.step.Choose()),
        inner_(call.rows.inner),
        size_(call.row_format.size),
        lanes_are_rows_(call.lanes_are_rows),
        direct_(call.row_format.conversion == nullptr && lanes_are_rows_),
        whole_(lanes_are_rows_ ? call.rows.columns : call.rows.columns / kLanes),
        tail_(lanes_are_rows_ ? 0 : call.rows.columns % kLanes),
        row_tiles_(whole_ + (tail_ > 0 ? 1 : 0)),
        tile_step_(lanes_are_rows_ ? inner_ : kLanes * inner_),
        sums_(sums) {
    const bool fits = op_.early_inputs * row_tiles_ * kTileBytes <= kKeptRowBytes;
    keeps_rows_ = fits && (op_.stores_values || !direct_);
    for (int j = 0; j < op_.columns; ++j) KeepColumns(j);
    std::fill_n(zeros_, kLanes, T(0));
    std::fill_n(&unused_sums_[0][0], kMaxOperands * kLanes, T(0));
    std::fill_n(&tail_sums_[0][0], kMaxOperands * kLanes, T(0));
  }

  // Computes a row, or up to kLanes interleaved rows from `row` on.
  void Run(std::int64_t row, std::int64_t lanes) {
    Begin(row, lanes);
    for (int phase = 0; phase < op_.phases; ++phase) {
      Reduce(phase);
      if (phase == 0) EndFirstPass();
    }
    for (std::int64_t tile = 0; tile < whole_; tile += kChunkTiles)
      WriteResults(tile, std::min(kChunkTiles, whole_ - tile), lanes_);
    if (tail_ > 0) WriteResults(whole_, 1, tail_);
  }

  void FinishSums() const {
    if (sums_ == nullptr) return;
    for (int s = 0; s < op_.sums; ++s)
      std::copy_n(tail_sums_[s], tail_, sums_ + s * call_.rows.columns + whole_ * kLanes);
  }

 private:
  static constexpr std::int64_t kTileBytes = kLanes * sizeof(T);
  static constexpr std::int64_t kChunkTiles = kChunkBytes / kTileBytes;
  static constexpr std::int64_t kChunk = kChunkTiles * kLanes;

  // Converts column input j where there is room for it.
  void KeepColumns(int j) {
    const char* const data = call_.columns[j];
    columns_[j] = nullptr;
    std::fill_n(default_columns_[j], kLanes, call_.defaults[j]);
    std::fill_n(tail_columns_[j], kLanes, call_.defaults[j]);
    if (data == nullptr) return;
    const auto& format = call_.column_format;
    Load<T>(format, data + whole_ * kLanes * format.size, tail_, tail_columns_[j]);
    if (format.conversion == nullptr) {
      columns_[j] = reinterpret_cast<const T*>(data);
    } else if ((j + 1) * whole_ * kTileBytes <= kKeptColumnBytes) {
      T* const kept = kept_columns_ + j * whole_ * kLanes;
      Load<T>(format, data, whole_ * kLanes, kept);
      columns_[j] = kept;
    }
  }

  void Begin(std::int64_t row, std::int64_t lanes) {
    const std::int64_t columns = call_.rows.columns;
    const std::int64_t dense =
        inner_ == 1 ? row * columns : row / inner_ * columns * inner_ + row % inner_;
    for (int j = 0; j < op_.inputs; ++j) {
      in_[j] = call_.inputs[j];
      if (in_[j] != nullptr) in_[j] += (inner_ == 1 ? row * call_.strides[j] : dense) * size_;
    }
    for (int k = 0; k < op_.outputs; ++k) {
      out_[k] = call_.outputs[k];
      if (out_[k] != nullptr) out_[k] += dense * size_;
    }
    lanes_ = lanes;
    is_loaded_ = false;
    is_prepared_ = op_.prepared_output < 0;
    for (std::int64_t i = 0; i < (lanes_are_rows_ ? lanes : 1); ++i)
      std::memcpy(functors_ + static_cast<std::size_t>(i) * op_.functor_size, call_.functor,
                  op_.functor_size);
  }

  // Records that converted and prepared values are in memory after the first pass over the row.
  void EndFirstPass() {
    is_loaded_ = keeps_rows_ && !direct_;
    if (is_prepared_) return;
    char* const prepared = out_[op_.prepared_output];
    is_prepared_ = is_loaded_ || prepared != nullptr;
    if (is_loaded_ || prepared == nullptr) return;
    for (int j = 0; j < op_.early_inputs; ++j) in_[j] = nullptr;
    in_[0] = prepared;
  }

  // ------------------------------------------------------------------------------ tiles

  bool IsTail(std::int64_t lanes) const { return !lanes_are_rows_ && lanes < kLanes; }
  T* Kept(int j, std::int64_t tile) { return kept_rows_ + (j * row_tiles_ + tile) * kLanes; }

  // Returns `count` tiles of a tensor; `copy` holds them where they are not in memory as T. Missing
  // lanes of a tail are zeros.
  Operand<const T> Read(const char* base, std::int64_t tile, std::int64_t count, std::int64_t lanes,
                        T* copy) const {
    if (base == nullptr) return {zeros_, 0};
    const char* const from = base + tile * tile_step_ * size_;
    if (direct_) return {reinterpret_cast<const T*>(from), tile_step_};
    const std::int64_t elements = (count - 1) * kLanes + lanes;
    if (lanes_are_rows_) {
      for (std::int64_t k = 0; k < count; ++k)
        Load<T>(call_.row_format, from + k * tile_step_ * size_, lanes, copy + k * kLanes);
    } else if (inner_ == 1) {
      Load<T>(call_.row_format, from, elements, copy);
    } else {
      for (std::int64_t k = 0; k < elements; k += kLanes)
        LoadStrided(from + k * inner_ * size_, std::min(kLanes, elements - k), copy + k);
    }
    if (IsTail(lanes)) std::fill_n(copy + elements, kLanes - lanes, T(0));
    return {copy, kLanes};
  }
  void Write(const T* from, char* base, std::int64_t tile, std::int64_t count,
             std::int64_t lanes) const {
    char* const to = base + tile * tile_step_ * size_;
    const std::int64_t elements = (count - 1) * kLanes + lanes;
    if (lanes_are_rows_) {
      for (std::int64_t k = 0; k < count; ++k)
        Store<T>(call_.row_format, from + k * kLanes, lanes, to + k * tile_step_ * size_);
    } else if (inner_ == 1) {
      Store<T>(call_.row_format, from, elements, to);
    } else {
      for (std::int64_t k = 0; k < elements; k += kLanes)
        StoreStrided(from + k, std::min(kLanes, elements - k), to + k * inner_ * size_);
    }
  }

  // Copies up to kLanes elements whose distance is inner_.
  void LoadStrided(const char* from, std::int64_t count, T* to) const {
    alignas(64) char elements[kTileBytes];
    for (std::int64_t i = 0; i < count; ++i)
      CopyElement(from + i * inner_ * size_, elements + i * size_);
    Load<T>(call_.row_format, elements, count, to);
  }
  void StoreStrided(const T* from, std::int64_t count, char* to) const {
    alignas(64) char elements[kTileBytes];
    Store<T>(call_.row_format, from, count, elements);
    for (std::int64_t i = 0; i < count; ++i)
      CopyElement(elements + i * size_, to + i * inner_ * size_);
  }
  void CopyElement(const char* from, char* to) const {
    if (size_ == sizeof(T)) {
      std::memcpy(to, from, sizeof(T));
    } else {
      std::memcpy(to, from, sizeof(std::uint16_t));
    }
  }

  // Sets the tiles of the early inputs, prepared.
  void ReadEarly(std::int64_t tile, std::int64_t count, std::int64_t lanes, Tiles<T>* tiles) {
    for (int j = 0; j < op_.early_inputs; ++j) {
      if (is_loaded_ && in_[j] != nullptr) {
        tiles->inputs[j] = {Kept(j, tile), kLanes};
      } else {
        T* const copy = keeps_rows_ ? Kept(j, tile) : chunks_[j];
        tiles->inputs[j] = Read(in_[j], tile, count, lanes, copy);
      }
    }
    if (!is_prepared_) Prepare(tile, count, lanes, tiles);
  }

  // Replaces the early inputs by the prepared value, rounded as the output that it also is.
  void Prepare(std::int64_t tile, std::int64_t count, std::int64_t lanes, Tiles<T>* tiles) {
    char* const out = out_[op_.prepared_output];
    const bool in_output = direct_ && out != nullptr;
    Operand<T> prepared{keeps_rows_ ? Kept(0, tile) : chunks_[0], kLanes};
    if (in_output) prepared = {reinterpret_cast<T*>(out + tile * tile_step_ * size_), tile_step_};
    tiles->stored[0] = prepared;
    RunStep(Step::kPrepare, 0, tiles, nullptr);
    if (!in_output) {
      if (out != nullptr) Write(prepared.data, out, tile, count, lanes);
      if (call_.row_format.conversion != nullptr) {
        alignas(64) char rounded[kChunk * sizeof(std::uint16_t)];
        Store<T>(call_.row_format, prepared.data, count * kLanes, rounded);
        Load<T>(call_.row_format, rounded, count * kLanes, prepared.data);
      }
    }
    tiles->inputs[0] = {prepared.data, prepared.step};
  }

  // Sets where the last phase stores the row's values.
  void SetStored(std::int64_t tile, Tiles<T>* tiles) {
    for (int j = 0; j < op_.early_inputs; ++j)
      tiles->stored[j] = {keeps_rows_ ? Kept(j, tile) : chunks_[j], kLanes};
  }

  void SetColumns(std::int64_t tile, std::int64_t count, std::int64_t lanes, Tiles<T>* tiles) {
    for (int j = 0; j < op_.columns; ++j) {
      const char* const data = call_.columns[j];
      if (data == nullptr) {
        tiles->columns[j] = {default_columns_[j], 0};
      } else if (IsTail(lanes)) {
        tiles->columns[j] = {tail_columns_[j], 0};
      } else if (columns_[j] != nullptr) {
        tiles->columns[j] = {columns_[j] + tile * kLanes, kLanes};
      } else {
        T* const copy = column_chunks_[j];
        Load<T>(call_.column_format, data + tile * kLanes * call_.column_format.size,
                count * kLanes, copy);
        tiles->columns[j] = {copy, kLanes};
      }
    }
  }

  void RunStep(Step step, int phase, const Tiles<T>* tiles, T* totals) {
    step_(step, phase, lanes_are_rows_, functors_, tiles, totals);
  }

  // ------------------------------------------------------------------------------ passes

  void AddTerms(int phase, std::int64_t tile, std::int64_t count, std::int64_t lanes, T* totals) {
    Tiles<T> tiles;
    tiles.count = count;
    tiles.lanes = lanes;
    ReadEarly(tile, count, lanes, &tiles);
    SetColumns(tile, count, lanes, &tiles);
    if (op_.stores_values && phase == op_.phases - 1) SetStored(tile, &tiles);
    RunStep(Step::kReduce, phase, &tiles, totals);
  }
  void AddTiles(int phase, std::int64_t begin, std::int64_t end, T* totals) {
    while (begin < end) {
      const std::int64_t count = std::min(kChunkTiles, end - begin);
      AddTerms(phase, begin, count, lanes_, totals);
      begin += count;
    }
  }

  void Reduce(int phase) {
    const Reduction reduction = op_.reductions[phase];
    const int terms = op_.terms[phase];
    alignas(64) T totals[kMaxTerms * kLanes];
    alignas(64) T part[kMaxTerms * kLanes];
    Clear(reduction, totals, terms);
    std::int64_t tile = 0;
    if (lanes_are_rows_ || whole_ >= 2 * kRun) {
      while (tile + kRun <= whole_ || (lanes_are_rows_ && tile < whole_)) {
        const std::int64_t end = std::min(tile + kRun, whole_);
        Clear(reduction, part, terms);
        AddTiles(phase, tile, end, part);
        Add(reduction, totals, part, terms);
        tile = end;
      }
    }
    AddTiles(phase, tile, whole_, totals);
    if (tail_ > 0) {
      std::memcpy(part, totals, static_cast<std::size_t>(terms) * kTileBytes);
      AddTerms(phase, whole_, 1, tail_, part);
      for (int t = 0; t < terms; ++t) std::copy_n(part + t * kLanes, tail_, totals + t * kLanes);
    }
    Tiles<T> tiles;
    tiles.lanes = lanes_;
    RunStep(Step::kFinish, phase, &tiles, totals);
  }

  void WriteResults(std::int64_t tile, std::int64_t count, std::int64_t lanes) {
    Tiles<T> tiles;
    tiles.count = count;
    tiles.lanes = lanes;
    if (!op_.stores_values) {
      ReadEarly(tile, count, lanes, &tiles);
    } else {
      if (!keeps_rows_) {  // computes the values again
        alignas(64) T unused[kMaxTerms * kLanes];
        AddTerms(op_.phases - 1, tile, count, lanes, unused);
      }
      SetStored(tile, &tiles);
      for (int j = 0; j < op_.early_inputs; ++j) tiles.inputs[j] = {zeros_, 0};
    }
    for (int j = op_.early_inputs; j < op_.inputs; ++j)
      tiles.inputs[j] = Read(in_[j], tile, count, lanes, chunks_[j]);
    SetColumns(tile, count, lanes, &tiles);
    for (int s = 0; s < op_.sums; ++s) {
      T* const sums = sums_ + s * call_.rows.columns + tile * kLanes;
      tiles.sums[s] = {sums, kLanes};
      if (IsTail(lanes)) tiles.sums[s] = {tail_sums_[s], 0};
      if (sums_ == nullptr) tiles.sums[s] = {unused_sums_[s], 0};
    }
    for (int k = 0; k < op_.outputs; ++k) {
      if (!IsWanted(k)) {
        tiles.outputs[k] = {output_chunks_[k], 0};
      } else if (direct_) {
        tiles.outputs[k] = {reinterpret_cast<T*>(out_[k] + tile * tile_step_ * size_), tile_step_};
      } else {
        tiles.outputs[k] = {output_chunks_[k], kLanes};
      }
    }
    RunStep(Step::kResult, 0, &tiles, nullptr);
    if (direct_) return;
    for (int k = 0; k < op_.outputs; ++k)
      if (IsWanted(k)) Write(output_chunks_[k], out_[k], tile, count, lanes);
  }
  // Prepare has already written the prepared output.
  bool IsWanted(int k) const { return out_[k] != nullptr && k != op_.prepared_output; }

  const RowCall<T>& call_;
  const RowOp& op_;
  StepFunction<T>* const step_;
  const std::int64_t inner_, size_;
  const bool lanes_are_rows_;
  const bool direct_;                // tiles are the tensors' memory
  const std::int64_t whole_, tail_;  // tiles of a row, and the elements behind them
  const std::int64_t row_tiles_, tile_step_;
  T* const sums_;
  bool keeps_rows_;

  // The current rows.
  const char* in_[kMaxOperands];
  char* out_[kMaxOperands];
  const T* columns_[kMaxOperands];
  std::int64_t lanes_;
  bool is_loaded_, is_prepared_;

  alignas(64) char functors_[kLanes * kMaxFunctorBytes];
  alignas(64) T zeros_[kLanes];
  alignas(64) T default_columns_[kMaxOperands][kLanes];
  alignas(64) T tail_columns_[kMaxOperands][kLanes];
  alignas(64) T tail_sums_[kMaxOperands][kLanes];
  alignas(64) T unused_sums_[kMaxOperands][kLanes];
  alignas(64) T chunks_[kMaxOperands][kChunk];
  alignas(64) T output_chunks_[kMaxOperands][kChunk];
  alignas(64) T column_chunks_[kMaxOperands][kChunk];
  alignas(64) T kept_rows_[kKeptRowBytes / sizeof(T)];
  alignas(64) T kept_columns_[kKeptColumnBytes / sizeof(T)];
};

}  // namespace twinop::rowwise
