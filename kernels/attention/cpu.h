// attention_packed on the CPU: blocks of queries against blocks of keys, with a running softmax.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "twinop/attention/problem.h"
#include "twinop/math/math.h"
#include "twinop/primitives/cpu_features.h"

namespace twinop::attention {

inline constexpr std::int64_t kQueries = 16, kKeys = 32;  // the sizes of a block
// Sums of kGroup queries and kColumns elements stay in registers.
inline constexpr std::int64_t kGroup = 4, kColumns = 32;
inline constexpr std::int64_t kGrainProducts = 1 << 18;  // below it a second thread costs more

// The memory of a thread.
template <class Number>
struct Workspace {
  std::vector<Number> q, k, v, sums;  // [kQueries, D], [D, kKeys], [kKeys, D], [kQueries, D]

  explicit Workspace(std::int64_t size)
      : q(static_cast<std::size_t>(kQueries * size)),
        k(static_cast<std::size_t>(kKeys * size)),
        v(k.size()),
        sums(q.size()) {}
};

template <class T>
struct QueryBlocks {
  using Number = Compute<T>;
  using Scores = Number[kGroup][kKeys];

  // scores = q k^T of `rows` queries and a block of keys; of kGroup queries, in registers.
  template <bool kWhole>
  TWINOP_INLINE static void Multiply(const Problem& p, std::int64_t rows, const Number* q,
                                     const Number* k, Scores& scores) {
    if (kWhole) rows = kGroup;
    Scores sums = {};
    for (std::int64_t d = 0; d < p.size; ++d)
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < kKeys; ++j) sums[i][j] += q[i * p.size + d] * k[d * kKeys + j];
    for (std::int64_t i = 0; i < rows; ++i) std::copy_n(sums[i], kKeys, scores[i]);
  }

  // sums += weights v, for `rows` queries and `count` columns from `d` on; kColumns stay in
  // registers.
  template <bool kWhole>
  TWINOP_INLINE static void Add(const Problem& p, std::int64_t rows, std::int64_t keys,
                                std::int64_t count, const Scores& weights, std::int64_t first_row,
                                const Number* v, Number* sums) {
    if (kWhole) {
      rows = kGroup;
      count = kColumns;
    }
    Number added[kGroup][kColumns];
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t d = 0; d < count; ++d) added[i][d] = sums[i * p.size + d];
    for (std::int64_t j = 0; j < keys; ++j)
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t d = 0; d < count; ++d)
          added[i][d] += weights[first_row + i][j] * v[j * p.size + d];
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t d = 0; d < count; ++d) sums[i * p.size + d] = added[i][d];
  }

  TWINOP_INLINE static void AddColumns(const Problem& p, std::int64_t rows, std::int64_t keys,
                                       const Scores& weights, std::int64_t first_row,
                                       const Number* v, Number* sums) {
    for (std::int64_t d = 0; d < p.size; d += kColumns) {
      const std::int64_t count = std::min(kColumns, p.size - d);
      if (rows == kGroup && count == kColumns) {
        Add<true>(p, rows, keys, count, weights, first_row, v + d, sums + d);
      } else {
        Add<false>(p, rows, keys, count, weights, first_row, v + d, sums + d);
      }
    }
  }

  // Replaces the scores of a query by exp(score - highest), and scales what was added up before.
  TWINOP_INLINE static void Weigh(const Problem& p, const T* bias, std::int64_t keys,
                                  Number (&scores)[kKeys], Number* highest, Number* total,
                                  Number* sums) {
    for (std::int64_t j = 0; j < keys; ++j) {
      scores[j] *= static_cast<Number>(p.scale);
      if (bias != nullptr) scores[j] += ToCompute(bias[j]);
    }
    Number most = *highest;
    for (std::int64_t j = 0; j < keys; ++j) most = scores[j] > most ? scores[j] : most;
    // After only -inf the difference would be NaN. A later key may be finite.
    const Number base = most == -kInfinity<Number> ? Number(0) : most;
    const Number kept = Exp(*highest - base);
    for (Number& score : scores) score = Exp(score - base);
    *highest = most;
    *total *= kept;
    for (std::int64_t j = 0; j < keys; ++j) *total += scores[j];
    for (std::int64_t d = 0; d < p.size; ++d) sums[d] *= kept;
  }

  // Converts a block of keys and values.
  TWINOP_INLINE static void Load(const Problem& p, const T* k, std::int64_t keys,
                                 Workspace<Number>& at) {
    const std::int64_t width = p.heads * p.size;
    for (std::int64_t j = 0; j < keys; ++j, k += 3 * width) {
      for (std::int64_t d = 0; d < p.size; ++d) {
        at.k[static_cast<std::size_t>(d * kKeys + j)] = ToCompute(k[d]);
        at.v[static_cast<std::size_t>(j * p.size + d)] = ToCompute(k[width + d]);
      }
    }
  }

  // The block of queries from `first` on, of one head.
  TWINOP_INLINE static void Block(const Problem& p, const T* head, const T* bias,
                                  std::int64_t first, T* y, Workspace<Number>& at) {
    const std::int64_t width = p.heads * p.size, row = 3 * width;
    const std::int64_t queries = std::min(kQueries, p.tokens - first);
    Number highest[kQueries], totals[kQueries] = {};
    std::fill(std::begin(highest), std::end(highest), -kInfinity<Number>);
    std::fill(at.sums.begin(), at.sums.end(), Number(0));
    for (std::int64_t i = 0; i < queries; ++i)
      for (std::int64_t d = 0; d < p.size; ++d)
        at.q[static_cast<std::size_t>(i * p.size + d)] = ToCompute(head[(first + i) * row + d]);
    const std::int64_t last = p.is_causal ? first + queries : p.tokens;
    for (std::int64_t key = 0; key < last; key += kKeys) {
      const std::int64_t keys = std::min(kKeys, last - key);
      Load(p, head + key * row + width, keys, at);
      for (std::int64_t i = 0; i < queries; i += kGroup) {
        const std::int64_t rows = std::min(kGroup, queries - i);
        const Number* const q = &at.q[static_cast<std::size_t>(i * p.size)];
        Number* const sums = &at.sums[static_cast<std::size_t>(i * p.size)];
        Scores scores;
        if (rows == kGroup) {
          Multiply<true>(p, rows, q, at.k.data(), scores);
        } else {
          Multiply<false>(p, rows, q, at.k.data(), scores);
        }
        const auto seen = [&](std::int64_t r) {
          return p.is_causal ? std::clamp(first + i + r + 1 - key, std::int64_t{0}, keys) : keys;
        };
        for (std::int64_t r = 0; r < rows; ++r) {
          const T* const own_bias =
              bias == nullptr ? nullptr : bias + (first + i + r) * p.bias_stride[2] + key;
          if (seen(r) > 0)
            Weigh(p, own_bias, seen(r), scores[r], &highest[i + r], &totals[i + r],
                  sums + r * p.size);
        }
        if (seen(0) == keys) {
          AddColumns(p, rows, keys, scores, 0, at.v.data(), sums);
        } else {
          for (std::int64_t r = 0; r < rows; ++r)
            AddColumns(p, 1, seen(r), scores, r, at.v.data(), sums + r * p.size);
        }
      }
    }
    for (std::int64_t i = 0; i < queries; ++i)
      for (std::int64_t d = 0; d < p.size; ++d)
        Round(at.sums[static_cast<std::size_t>(i * p.size + d)] / totals[i],
              &y[(first + i) * width + d]);
  }

  template <Level kLevel>
  TWINOP_INLINE static void Run(const Problem& p, const T* qkv, const T* bias, T* y,
                                std::int64_t begin, std::int64_t end) {
    Workspace<Number> workspace(p.size);
    const std::int64_t blocks = (p.tokens + kQueries - 1) / kQueries;  // of a head
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t batch = i / blocks / p.heads, head = i / blocks % p.heads;
      const std::int64_t at = batch * p.tokens * p.heads * p.size;
      const T* const own_bias =
          bias == nullptr ? nullptr : bias + batch * p.bias_stride[0] + head * p.bias_stride[1];
      Block(p, qkv + 3 * at + head * p.size, own_bias, i % blocks * kQueries,
            y + at + head * p.size, workspace);
    }
  }
};

template <class Op>
Status Cpu(const CallOf<Op>& call) {
  Problem p;
  TWINOP_RETURN_IF_ERROR(ProblemOf(call, &p));
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using Function = void(const Problem&, const T*, const T*, T*, std::int64_t, std::int64_t);
    Function* const function = kByLevel<QueryBlocks<T>, Function>.Choose();
    const T* const qkv = InputData<T>(call, "qkv"_name);
    const T* const bias = p.has_bias ? InputData<T>(call, "bias"_name) : nullptr;
    T* const y = OutputData<T>(call, "y"_name);
    const std::int64_t products = kQueries * p.tokens * p.size;
    call.context->ParallelFor(
        p.batches * p.heads * ((p.tokens + kQueries - 1) / kQueries), kGrainProducts / products + 1,
        [&](std::int64_t begin, std::int64_t end) { function(p, qkv, bias, y, begin, end); });
    return Status();
  });
}

}  // namespace twinop::attention
