// y = activation(x W^T + bias + residual) for few rows of x, normed if asked, in 16-bit types. What
// it costs is to read the weight once, so a thread reads what it multiplies itself: 16 rows of the
// weight, 8 and 8, are those of an m16n8k16 product, 8 rows of x its columns. A thread holds
// neighbours of a row, because both operands are permuted alike. Integers wait in registers, where
// the first ones are made dense before x is there, and values of 16 bits in shared memory, where
// more of them can be under way (docs/tuning.md).
//
// The columns are divided into `split_k` parts: part v sums the chunks v, v + split_k, ..., and the
// parts' sums are added up in order, in 16 bits four by four where the weight has few rows. split_k
// depends on n, k, the kind of weight and the device, so a row of y has the same bits whatever else
// is in x. Each part is a warp's, so that all processors read, but for many rows a warp may take
// two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "twinop/math/gelu.h"
#include "twinop/ops/linear/buffers.h"
#include "twinop/ops/linear/few_rows_weights.cuh"
#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/pdl.cuh"
#include "twinop/primitives/tensor_core.cuh"

namespace twinop::linear::few_rows {

// ------------------------------------------------------------------- the kernel

enum class Active : int { kNone, kRelu, kGelu, kTanhGelu, kSilu };

inline Active ActiveOf(std::string_view name) {
  constexpr std::string_view kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  return static_cast<Active>(std::find(kNames, kNames + 5, name) - kNames);
}

// Whether the sums of four parts are added up first: blocks of few_rows_hopper.cuh share those out.
__device__ __host__ constexpr bool InFours(int n) { return n < 8192; }

template <class T>
struct Task {
  const T* x;
  const T* bias;
  const T* residual;
  T* y;
  int m, n, k;
  int chunks;  // of k
  Active active;
  bool is_gated;     // y = activation(the first half of the columns) * the others
  bool is_constant;  // nobody writes the weight: it is read before the kernel before this one ends
  float rms_eps;     // 0: x is multiplied as it is; else divided by its root mean square
  float inverse_k;   // 1 / k
};

// A function of its own: where its code lies between, all others take longer to begin.
static __device__ __noinline__ float RarelyActivated(float x, Active active) {
  if (active == Active::kRelu) return x < 0 ? 0 : x;
  return active == Active::kGelu ? Gelu<ApproxFloat>{}(ApproxFloat(x)).value
                                 : TanhGelu<ApproxFloat>{}(ApproxFloat(x)).value;
}

__device__ __forceinline__ float Activated(float x, Active active) {
  if (active == Active::kNone) return x;
  if (active == Active::kSilu) return Sigmoid(ApproxFloat(x), ApproxFloat(x)).value;
  return RarelyActivated(x, active);
}

// y in a column, given its sum and, if `p.is_gated`, that of its partner.
template <class T>
__device__ __forceinline__ float ResultAt(const Task<T>& p, const T* residual, int column,
                                          float sum, float other) {
  if (p.bias != nullptr) sum += ToCompute(p.bias[column]);
  if (p.residual != nullptr) sum += ToCompute(*residual);
  const float y = Activated(sum, p.active);
  if (!p.is_gated) return y;
  return y * (p.bias == nullptr ? other : other + ToCompute(p.bias[column + p.n / 2]));
}

// Divides by the root mean square. The product is rounded: all kernels have the same bits.
template <class T>
__device__ __forceinline__ float Normed(const Task<T>& p, float sum, float squares) {
  return __fmul_rn(sum, rsqrtf(__fmaf_rn(squares, p.inverse_k, p.rms_eps)));
}

// sums[m] += 16 rows of the weight times 8 rows of x, along a slice.
template <class T, int kTiles>
__device__ __forceinline__ void MultiplySlice(const uint4& upper, const uint4& lower,
                                              const uint4 (&x)[kTiles], float (&sums)[kTiles][4]) {
  const std::uint32_t first[] = {upper.x, lower.x, upper.y, lower.y};
  const std::uint32_t second[] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) MultiplyAdd<T>(first, x[m].x, x[m].y, sums[m]);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) MultiplyAdd<T>(second, x[m].z, x[m].w, sums[m]);
}

// sums += the products of 8 rows of x with each other, along a slice.
template <class T>
__device__ __forceinline__ void AddSquares(const uint4& x, float (&sums)[4]) {
  const std::uint32_t first[] = {x.x, 0, x.y, 0}, second[] = {x.z, 0, x.w, 0};
  MultiplyAdd<T>(first, x.x, x.y, sums);
  MultiplyAdd<T>(second, x.z, x.w, sums);
}

// Shared memory of a part's sums, whose rows begin in other banks.
template <int kGroups, int kTiles>
inline constexpr int kSumsBytes = 8 * kTiles * (8 * kGroups + 4) * 4;

// Shared memory of a warp: what its lanes copy, and then its sums.
template <class Weight, int kGroups, int kTiles, int kStages>
inline constexpr int kWarpBytes =
    std::max(kStages * kGroups * Weight::kCopies * 512, kSumsBytes<kGroups, kTiles>);

// A block has 8 kGroups rows of the weight and 8 kTiles rows of x. A warp has kPasses parts, one
// after the other: part, part + kWarps. kStages: chunks that a warp has under way. kIsEager: it has
// another one, which it makes dense before the kernel before this one ends. Lanes without a row of
// x have the last one.
template <class Weight, int kGroups, int kTiles, int kWarps, int kStages, int kBlocks, int kPasses,
          bool kIsEager, bool kIsNormed>
static __global__ void __launch_bounds__(kWarps * 32, kBlocks)
    NarrowKernel(const Weight weight, const Task<typename Weight::Type> p) {
  using T = typename Weight::Type;
  constexpr int kSlices = Weight::kSlices, kRows = kTiles * 8;
  constexpr int kWidth = 8 * kGroups + 4, kSplitK = kWarps * kPasses;
  constexpr int kBytes = kWarpBytes<Weight, kGroups, kTiles, kStages>;
  constexpr bool kIsCopied = Weight::kCopies > 0;
  static_assert(kPasses <= 2 && (kPasses == 1 || kIsCopied) && !(kIsEager && kIsCopied));
  extern __shared__ __align__(16) char memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32, part = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4, t = lane % 4;
  const int pass = (p.chunks + kSplitK - 1) / kSplitK;  // chunks of a part, at most
  const int count = kPasses == 2      ? 2 * pass
                    : part < p.chunks ? (p.chunks - part + kSplitK - 1) / kSplitK
                                      : 0;

  const int groups = p.n / 8 / (p.is_gated ? 2 : 1);  // of y
  const int own = p.is_gated ? kGroups / 2 : kGroups;
  // Blocks that share rows of the weight are neighbours: L2 holds the rows for them.
  const int parts = kTiles == 1 ? 1 : (p.m + kRows - 1) / kRows;
  const int first_row = static_cast<int>(blockIdx.x) % parts * kRows;  // of x
  const int first_group = static_cast<int>(blockIdx.x) / parts * own;
  const auto copies = [&](int stage, int r) {
    return reinterpret_cast<uint4*>(memory + part * kBytes) +
           (stage * kGroups + r) * Weight::kCopies * 32 + lane;
  };
  typename Weight::Fragment fragments[kStages][kGroups];
  typename Weight::Row from[kGroups];
#pragma unroll
  for (int r = 0; r < kGroups; ++r) {
    const int group = first_group + (r < own ? r : r - own);
    // The last block may have too many: it reads the last group again.
    const int row = (group < groups ? group : groups - 1) + (r < own ? 0 : groups);
    from[r] = weight.Begin(row * 8 + g);
  }
  // What lies beyond a row is multiplied by zeros: any of its weights will do.
  const auto column_of = [&](int i) {
    const bool is_second = kPasses == 2 && i >= pass;
    return Weight::Column(part + (is_second ? kWarps + (i - pass) * kSplitK : i * kSplitK), t);
  };
  const auto load = [&](int stage, int i) {
    const int column = column_of(i);
    if (i < count)
#pragma unroll
      for (int r = 0; r < kGroups; ++r)
        weight.Load(from[r], column < p.k ? column : 0, copies(stage, r), &fragments[stage][r]);
    if (kIsCopied) __pipeline_commit();  // empty ones, too: they are counted
  };
  const auto load_first = [&] {
#pragma unroll
    for (int s = 0; s < kStages; ++s) load(s, s);
  };
  uint4 eager[kIsEager ? kSlices : 1][kGroups];
  const auto make_eager = [&] {
    if constexpr (kIsEager) {
#pragma unroll
      for (int b = 0; b < kSlices; ++b)
#pragma unroll
        for (int r = 0; r < kGroups; ++r)
          eager[b][r] = weight.Values(nullptr, fragments[0][r], b, column_of(0));
      load(0, kStages);
      const int column = column_of(kStages + 1);
      if (kWarps == 4 && kStages + 1 < count && column < p.k)  // this chunk waits in L2
#pragma unroll
        for (int r = 0; r < kGroups; ++r) weight.Fetch(from[r], column);
    }
  };
  if (p.is_constant) load_first();
  if (p.bias != nullptr && threadIdx.x < kGroups) {  // read at the end
    const int r = static_cast<int>(threadIdx.x), half = r < own ? 0 : 1;
    const int group = first_group + r - half * own;
    if (group < groups) PrefetchL2(p.bias + (half * groups + group) * 8);
  }
  PdlTrigger();
  if (p.is_constant) make_eager();
  PdlWait();  // it may write all but a constant weight
  if (!p.is_constant) {
    load_first();
    make_eager();
  }

  const T* x[kTiles];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int row = first_row + m * 8 + g;
    x[m] = p.x + static_cast<std::int64_t>(row < p.m ? row : p.m - 1) * p.k;
  }
  using Columns = uint4[kSlices][kTiles];
  const auto load_x = [&](int i, Columns& to) {
    const int column = column_of(i);
    const bool is_inside = i < count && column < p.k;  // slices end together
#pragma unroll
    for (int b = 0; b < kSlices; ++b)
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        to[b][m] = is_inside ? *reinterpret_cast<const uint4*>(x[m] + column + b * Weight::kStep)
                             : uint4{};
  };
  float sums[kGroups / 2][kTiles][4] = {};
  float squares[kTiles][4] = {};  // the diagonal of x x^T
  Columns next;
  if (kIsCopied) load_x(0, next);
  // The last pass's sums lie where the copies were, those of the pass before it behind them.
  const auto sums_of = [&](int v) {
    constexpr int kFirst = (kPasses - 1) * kWarps;
    return reinterpret_cast<float*>(
        memory +
        (v < kFirst ? kWarps * kBytes + v * kSumsBytes<kGroups, kTiles> : (v - kFirst) * kBytes));
  };
  const auto keep_sums = [&](int v) {
#pragma unroll
    for (int r = 0; r < kGroups; r += 2)
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums_of(v)[(m * 8 + 2 * t + i % 2) * kWidth + (r + i / 2) * 8 + g] = sums[r / 2][m][i];
          sums[r / 2][m][i] = 0;
        }
    if (kIsNormed && g / 2 == t)
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        sums_of(v)[(m * 8 + g) * kWidth + 8 * kGroups] = g % 2 == 0 ? squares[m][0] : squares[m][1];
        squares[m][0] = squares[m][1] = 0;
      }
  };
  const auto multiply = [&](const Columns& own, const auto& value) {
#pragma unroll
    for (int b = 0; b < kSlices; ++b) {
      uint4 columns[kTiles];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) columns[m] = Weight::Arranged(own[b][m]);
#pragma unroll
      for (int r = 0; r < kGroups; r += 2)
        MultiplySlice<T>(value(b, r), value(b, r + 1), columns, sums[r / 2]);
      if (kIsNormed)
#pragma unroll
        for (int m = 0; m < kTiles; ++m) AddSquares<T>(columns[m], squares[m]);
    }
  };
  if constexpr (kIsEager)
    if (count > 0) {
      load_x(0, next);
      multiply(next, [&](int b, int r) { return eager[b][r]; });
    }
  constexpr int kUnrolled = kIsCopied ? 1 : kStages;  // registers have no numbers at run time
#pragma unroll 1
  for (int begin = kIsEager; begin < count; begin += kStages) {
#pragma unroll kUnrolled
    for (int step = 0; step < kStages; ++step) {
      const int i = begin + step, s = (kIsEager + step) % kStages;
      if (i >= count) break;
      const int column = column_of(i);
      Columns own;
      if (kIsCopied) {
        std::memcpy(own, next, sizeof(own));
        load_x(i + 1, next);  // there are registers for it
        WaitForCopies<kStages - 1>();
      } else {
        load_x(i, own);
      }
      if (kPasses == 1 || column < p.k)  // the last chunk of a pass may be missing
        multiply(own, [&](int b, int r) {
          return weight.Values(copies(s, r), fragments[s][r], b, column);
        });
      load(s, i + kStages);
      if (kPasses == 2 && i + 1 == pass) keep_sums(part);
    }
  }

  __syncwarp();  // its lanes have read their copies
  keep_sums(part + (kPasses - 1) * kWarps);
  __syncthreads();
  const auto sum_at = [&](int at) {
    float sum = 0, four = 0;
#pragma unroll
    for (int v = 0; v < kSplitK; ++v) {
      four += sums_of(v)[at];
      if (v + 1 < kSplitK && !(kIsCopied && v % 4 == 3 && InFours(p.n))) continue;
      sum += four, four = 0;
    }
    return sum;
  };
  const int width = own * 8, rows = p.m - first_row < kRows ? p.m - first_row : kRows;
  const int shift = (kGroups == 8 ? 6 : kGroups == 4 ? 5 : 4) - p.is_gated;  // log2(width)
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * width; i += kWarps * 32) {
    const int row = i >> shift, at = i & (width - 1), column = first_group * 8 + at;
    if (column >= groups * 8) continue;
    float sum = sum_at(row * kWidth + at);
    float other = p.is_gated ? sum_at(row * kWidth + at + width) : 0.0f;
    if (kIsNormed) {
      const float squares = sum_at(row * kWidth + 8 * kGroups);
      sum = Normed(p, sum, squares), other = Normed(p, other, squares);
    }
    const std::int64_t place = static_cast<std::int64_t>(first_row + row) * (groups * 8) + column;
    const T* const residual = p.residual == nullptr ? nullptr : p.residual + place;
    Round(ResultAt(p, residual, column, sum, other), &p.y[place]);
  }
}

// ------------------------------------------------------------------- the choice

template <int kGroups, int kTiles, int kWarps, int kStages, int kBlocks, int kPasses = 1,
          bool kIsEager = false, class Weight>
Status LaunchNarrow(const Call& call, const Weight& weight,
                    const Task<typename Weight::Type>& task) {
  constexpr int kWidth = 8 * kGroups, kRows = 8 * kTiles;
  const std::int64_t parts = (task.m + kRows - 1) / kRows;
  Grid grid{(task.n + kWidth - 1) / kWidth * parts, dim3(kWarps * 32)};
  grid.shared_bytes = kWarps * (kWarpBytes<Weight, kGroups, kTiles, kStages> +
                                (kPasses - 1) * kSumsBytes<kGroups, kTiles>);
  const auto launch = [&](auto normed) {
    return LaunchKernel(NarrowKernel<Weight, kGroups, kTiles, kWarps, kStages, kBlocks, kPasses,
                                     kIsEager, decltype(normed)::value>,
                        WithPdl(grid, INT32_MAX), call, weight, task);
  };
  if constexpr (Weight::kCopies > 0)
    if (task.rms_eps > 0) return launch(std::true_type{});
  return launch(std::false_type{});
}

inline constexpr int kVocabulary = 65536;  // as many rows has the logits' weight, or more

// split_k decides the bits: it does not depend on m. On some devices 32 parts have too little
// memory.
template <class T>
int SplitKOf(const Dense<T>&, const Task<T>& task, bool has_room) {
  if (task.n > 4608) return task.n < 8192 || task.n >= kVocabulary || task.chunks >= 64 ? 8 : 4;
  return has_room && task.n < 3072 && task.chunks >= 128 ? 32 : 16;
}

template <class T, int kBits, bool kHasZero>
int SplitKOf(const Blocks<T, kBits, kHasZero>&, const Task<T>& task) {
  if (task.n >= 8192) return 4;
  return task.n >= 3072 && (task.n > 4224 || task.k < 4096) ? 8 : 16;
}

// The other settings are as measured on an H200 (docs/tuning.md). They change how fast a call is.
// A block of four tiles reads as much of x as of the weight.
template <int kTiles, class T>
Status LaunchTiles(const Call& call, const Dense<T>& weight, const Task<T>& task) {
  const Target* target = nullptr;
  TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
  const std::int64_t most = target->block_bytes;
  const bool has_room = most >= 16 * kWarpBytes<Dense<T>, 4, 2, 2>;
  const bool is_narrow = task.n < 3072, is_short = task.chunks <= 32;
  const int split_k = SplitKOf(weight, task, has_room);
  if constexpr (kTiles == 4) {
#if defined(TWINOP_SM90A)
    bool done = false;  // in few_rows_hopper.cuh
    if (task.m > 32) TWINOP_RETURN_IF_ERROR(LaunchWide(call, weight, task, split_k, &done));
    if (done) return {};
#endif
    if (split_k == 4) return LaunchNarrow<4, kTiles, 4, 2, 4>(call, weight, task);
    if (split_k == 8)
      return task.n < 8192 || task.n >= kVocabulary
                 ? LaunchNarrow<4, kTiles, 8, 2, 2>(call, weight, task)
                 : LaunchNarrow<4, kTiles, 4, 2, 3, 2>(call, weight, task);
    if (split_k == 32) return LaunchNarrow<2, kTiles, 16, 2, 1, 2>(call, weight, task);
    return has_room ? LaunchNarrow<4, kTiles, 16, 2, 1>(call, weight, task)
                    : LaunchNarrow<2, kTiles, 16, 2, 1>(call, weight, task);
  } else {
    if (split_k == 4) return LaunchNarrow<4, kTiles, 4, kTiles == 1 ? 3 : 2, 4>(call, weight, task);
    if (split_k == 8)
      return kTiles == 1 && task.n < 8192 ? LaunchNarrow<2, 1, 8, 4, 2>(call, weight, task)
                                          : LaunchNarrow<4, kTiles, 8, 2, 2>(call, weight, task);
    if (split_k == 32) return LaunchNarrow<2, kTiles, 32, 2, 1>(call, weight, task);
    // 64 registers, beside attention; too few for squares, too.
    if (has_room && is_short && (is_narrow || (task.m == 1 && task.rms_eps == 0)))
      return LaunchNarrow<4, kTiles, 16, 2, kTiles == 1 ? 2 : 1>(call, weight, task);
    if (!is_short && !is_narrow && most >= 16 * kWarpBytes<Dense<T>, 4, kTiles, 3>)
      return LaunchNarrow<4, kTiles, 16, 3, 1>(call, weight, task);
    return is_short && !is_narrow ? LaunchNarrow<2, kTiles, 16, 2, 2>(call, weight, task)
                                  : LaunchNarrow<2, kTiles, 16, 3, 2>(call, weight, task);
  }
}

// A block makes its integers dense once for all its rows of x. With several tiles, more blocks at
// once hide more than more chunks under way. With split_k 4 the processors take all blocks at once,
// if registers allow it: blocks that wait for the first ones to end cost a whole wave.
template <int kTiles, class T, int kBits, bool kHasZero>
Status LaunchTiles(const Call& call, const Blocks<T, kBits, kHasZero>& weight,
                   const Task<T>& task) {
  constexpr bool kHas4Bits = kBits == 4;
  const Target* target = nullptr;
  TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
  const int processors = target->multiprocessors;
  const int parts = (task.m + 8 * kTiles - 1) / (8 * kTiles);
  // Blocks of a processor, of so many rows of the weight.
  const auto each = [&](int rows) {
    const std::int64_t blocks = std::int64_t{(task.n + rows - 1) / rows} * parts;
    return static_cast<int>((blocks + processors - 1) / processors);
  };
  const bool is_narrow = task.n < 3072, is_few = task.n <= 4224;  // for all processors
  const bool is_short = task.chunks <= 32;
  const int split_k = SplitKOf(weight, task);
  if constexpr (kTiles == 1) {
    if (split_k == 4) {
      if (each(32) <= (kHas4Bits ? 4 : 5))
        return LaunchNarrow<4, 1, 4, 1, 4, 1, true>(call, weight, task);
      if (each(32) == 6) return LaunchNarrow<4, kTiles, 4, 1, 6>(call, weight, task);
      return each(32) == 7 ? LaunchNarrow<4, kTiles, 4, 1, 7>(call, weight, task)
                           : LaunchNarrow<4, kTiles, 4, 1, 4>(call, weight, task);
    }
    if constexpr (kHas4Bits) {
      if (split_k == 8 && (!is_few || task.chunks <= 16))
        return LaunchNarrow<4, 1, 8, 1, 2, 1, true>(call, weight, task);
      if (split_k == 16 && is_short)
        return LaunchNarrow<4, 1, 16, 1, 1, 1, true>(call, weight, task);
      // Few registers, so that the next kernels begin beside this one.
      if (split_k == 16 && !is_narrow) return LaunchNarrow<2, kTiles, 16, 2, 2>(call, weight, task);
    }
    return split_k == 8 ? LaunchNarrow<2, kTiles, 8, 4, 2>(call, weight, task)
                        : LaunchNarrow<2, kTiles, 16, kHas4Bits ? 4 : 2, 1>(call, weight, task);
  } else {
    const bool is_many = task.m > 32;
    if (split_k == 4) {
      if constexpr (kTiles == 2)
        return each(64) == 3 || (each(64) > 4 && !kHasZero)
                   ? LaunchNarrow<8, kTiles, 4, 1, 3>(call, weight, task)
                   : LaunchNarrow<4, kTiles, 4, 1, 4>(call, weight, task);
      if (each(32) != 3) {
        if (each(64) == 3) return LaunchNarrow<8, kTiles, 4, 1, 3>(call, weight, task);
        if constexpr (kHas4Bits) return LaunchNarrow<8, kTiles, 4, 1, 2>(call, weight, task);
      }
      return LaunchNarrow<4, kTiles, 4, 1, 3>(call, weight, task);
    }
    if (split_k == 8) {
      if constexpr (!kHas4Bits && kTiles == 2)
        return LaunchNarrow<2, kTiles, 8, 2, 2>(call, weight, task);
      else
        return is_few && !is_many ? LaunchNarrow<4, kTiles, 8, 2, 1>(call, weight, task)
                                  : LaunchNarrow<4, kTiles, 8, 1, 2>(call, weight, task);
    }
    return !is_narrow || (kTiles == 2 ? is_short : is_many)
               ? LaunchNarrow<4, kTiles, 16, 4 / kTiles, 1>(call, weight, task)
               : LaunchNarrow<2, kTiles, 16, 2, 1>(call, weight, task);
  }
}

template <class Weight>
Status Launch(const Call& call, const Weight& weight, const Task<typename Weight::Type>& task) {
  if (task.m == 0) return {};
  if (task.m <= 8) return LaunchTiles<1>(call, weight, task);
  return task.m <= 16 ? LaunchTiles<2>(call, weight, task) : LaunchTiles<4>(call, weight, task);
}

// Describes a call; `sizes.n` is that of the weight.
template <class T>
Task<T> TaskOf(const GemmBuffers& at, const Sizes& sizes, std::string_view activation, bool gated,
               bool is_constant, int chunks, float rms_eps, void* y) {
  return {static_cast<const T*>(at.x.data),
          static_cast<const T*>(at.bias.data),
          static_cast<const T*>(at.residual.data),
          static_cast<T*>(y),
          static_cast<int>(sizes.m),
          static_cast<int>(sizes.n),
          static_cast<int>(sizes.k),
          chunks,
          ActiveOf(activation),
          gated,
          is_constant,
          rms_eps,
          1.0f / static_cast<float>(sizes.k)};
}

// Whether the kernels take a product of these sizes.
inline bool Fits(const Sizes& sizes, bool gated) {
  constexpr std::int64_t kMost = INT32_MAX / 4;
  return sizes.n % (gated ? 16 : 8) == 0 && sizes.n <= kMost && sizes.k <= kMost;
}

}  // namespace twinop::linear::few_rows
