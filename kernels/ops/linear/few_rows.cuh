// y = activation(x W^T + bias + residual) for few rows of x, normed if asked, in 16-bit types. What
// it costs is to read the weight once, so a thread reads what it multiplies itself: 16 rows of the
// weight, 8 and 8, are those of an m16n8k16 product, 8 rows of x its columns. A thread holds
// neighbours of a row, because both operands are permuted alike. Integers wait in registers, where
// the first ones are made dense before x is there, and values of 16 bits in shared memory, where
// more of them can be under way (docs/tuning.md).
//
// The columns are divided into `split_k` parts: part v sums the chunks v, v + split_k, ..., and the
// parts' sums are added up in order, in 16 bits four by four where the weight has few rows. split_k
// (choose.h) does not depend on m, so a row of y has the same bits whatever else is in x. Each part
// is a warp's, so that all processors read, but for many rows a warp may take two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "twinop/math/gelu.h"
#include "twinop/ops/linear/buffers.h"
#include "twinop/ops/linear/choose.h"
#include "twinop/ops/linear/few_rows_weights.cuh"
#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/tensor_core.cuh"

namespace twinop::linear::few_rows {

// ------------------------------------------------------------------- the kernel

enum class Active : int { kNone, kRelu, kGelu, kTanhGelu, kSilu };

inline Active ActiveOf(std::string_view name) {
  constexpr std::string_view kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  return static_cast<Active>(std::find(kNames, kNames + 5, name) - kNames);
}

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
  constexpr int kBytes = WarpBytes(Weight::kCopies, kGroups, kTiles, kStages);
  constexpr int kSumsBytes = SumsBytes(kGroups, kTiles);
  constexpr bool kIsCopied = Weight::kCopies > 0, kIsFloat8 = Weight::kKind == kFloat8;
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
    if constexpr (kIsFloat8)
      if (group < groups) PrefetchL2(weight.scale + (half * groups + group) * 8);
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
        memory + (v < kFirst ? kWarps * kBytes + v * kSumsBytes : (v - kFirst) * kBytes));
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
    if constexpr (kIsFloat8) {
      sum *= weight.scale[column];
      if (p.is_gated) other *= weight.scale[column + p.n / 2];
    }
    const std::int64_t place = static_cast<std::int64_t>(first_row + row) * (groups * 8) + column;
    const T* const residual = p.residual == nullptr ? nullptr : p.residual + place;
    Round(ResultAt(p, residual, column, sum, other), &p.y[place]);
  }
}

// ------------------------------------------------------------------- the launch

// Launches the chosen line: each that the weight has is compiled, and no other.
template <bool kIsNormed, std::size_t kLine = 0, class Weight>
Status LaunchLine(const Call& call, const Weight& weight, const Task<typename Weight::Type>& task,
                  const Line* chosen) {
  if constexpr (kLine < std::size(kLines)) {
    constexpr const Line& line = kLines[kLine];
    if constexpr ((line.weights & (kIsNormed ? 2 * Weight::kKind : Weight::kKind)) != 0) {
      const auto launch = [&](auto tiles) {
        constexpr int kTiles = decltype(tiles)::value;
        const std::int64_t parts = (task.m + 8 * kTiles - 1) / (8 * kTiles);
        const std::int64_t across = (task.n + 8 * line.groups - 1) / (8 * line.groups);
        const Grid grid{across * parts, dim3(line.warps * 32), 1, SharedBytes(line, kTiles)};
        return LaunchKernel(NarrowKernel<Weight, line.groups, kTiles, line.warps, line.stages,
                                         line.blocks, line.passes, line.is_eager, kIsNormed>,
                            WithPdl(grid, INT32_MAX), call, weight, task);
      };
      const int tiles = chosen == &line ? TilesOf(task.m) : 0;
      if constexpr ((line.tiles & 1) != 0)
        if (tiles == 1) return launch(std::integral_constant<int, 1>());
      if constexpr ((line.tiles & 2) != 0)
        if (tiles == 2) return launch(std::integral_constant<int, 2>());
      if constexpr ((line.tiles & 4) != 0)
        if (tiles == 4) return launch(std::integral_constant<int, 4>());
    }
    return LaunchLine<kIsNormed, kLine + 1>(call, weight, task, chosen);
  }
  return Status::Error("no kernel of few rows fits into this GPU's shared memory");
}

template <class Weight>
Status Launch(const Call& call, const Weight& weight, const Task<typename Weight::Type>& task) {
  if (task.m == 0) return {};
  const Target* target = nullptr;
  TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
  constexpr bool kNorms = Weight::kKind == kPlain || Weight::kKind == kFloat8;
  const bool is_normed = kNorms && task.rms_eps > 0;
  const auto kind = static_cast<WeightKind>(is_normed ? 2 * Weight::kKind : Weight::kKind);
  const ProductShape shape{kind, task.m, task.n, task.k, task.chunks};
#if defined(TWINOP_SM90A)
  if constexpr (Weight::kKind == kPlain) {
    bool done = false;  // in few_rows_hopper.cuh
    TWINOP_RETURN_IF_ERROR(LaunchWide(call, weight, task, shape, *target, &done));
    if (done) return {};
  }
#endif
  const Line* const line = Choose(shape, *target);
  if constexpr (kNorms)
    if (is_normed) return LaunchLine<true>(call, weight, task, line);
  return LaunchLine<false>(call, weight, task, line);
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
