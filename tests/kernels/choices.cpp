// Goes through the choices of the kernels and prints what contradicts them.
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "twinop/elementwise/choose.h"
#include "twinop/ops/attention_cached/choose.h"
#include "twinop/ops/linear/choose.h"
#include "twinop/ops/linear/float8.h"
#include "twinop/rowwise/choose.h"

using twinop::Target;

namespace {

constexpr Target On(const char* name, Target target) {
  for (const twinop::GpuLimits& gpu : twinop::kGpus)
    if (gpu.name == name) return twinop::Within(target, gpu);
  return target;
}
constexpr Target Part(Target target, int multiprocessors, int pairs) {
  target.multiprocessors = target.clusters[0] = multiprocessors;
  target.clusters[1] = pairs, target.clusters[2] = target.clusters[3] = 0;
  return target;
}
constexpr Target kH200{90, 90, true, 132, 227 << 10, 60 << 20, {132, 66, 32, 16}};
constexpr Target kOldCode{90, 80, true, 132, 227 << 10, 60 << 20, {132, 0, 0, 0}};
// The last two are parts of a GPU that hold clusters of two blocks, and none.
constexpr Target kTargets[] = {kH200,
                               kOldCode,
                               On("8.0", kOldCode),
                               On("8.6", kOldCode),
                               On("8.9", kH200),
                               On("10.0", kH200),
                               On("12.0", kH200),
                               Part(kH200, 16, 7),
                               Part(kH200, 16, 0)};

// On one GPU in all of its sizes; elsewhere most numbers decide the same.
std::int64_t Next(std::int64_t size, const Target& target) {
  return size + (size >= 18000 ? 7777 : &target == kTargets ? 1 : 31);
}

}  // namespace

namespace twinop::rowwise {

// What decides the order of the additions of a row: the threads that share it, or its slices. (A
// lane without a vector adds nothing. The lanes of interleaved rows take other elements.)
static std::tuple<int, int, bool> Order(const OpTraits& op, const Choice& choice) {
  const bool interleaved = choice.access == RowAccess::kInterleaved;
  const auto& [cluster, groups, threads, stages] = choice.cluster;
  if (choice.line == nullptr && !op.HasMisaligned())  // as rows in registers
    return {groups > 1 ? 32 : threads * op.Totals(), 0, false};
  if (choice.line == nullptr) return {cluster, -threads, false};
  return {choice.line->lanes > 0 ? 32 : choice.threads * choice.line->totals, 0, interleaved};
}

static void Check(const OpTraits& op) {
  std::set<std::pair<const ResidentChoice*, RowAccess>> chosen;
  std::set<Source> sources;
  for (const Target& target : kTargets) {
    for (std::int64_t columns = 1; columns < 600000; columns = Next(columns, target)) {
      std::set<std::tuple<int, int, bool>> orders;
      for (std::int64_t rows : {1, 200, 1000}) {
        for (bool aligned : {false, columns % op.Width() == 0}) {
          const Choice choice = Choose(op, {rows, columns, aligned}, target);
          orders.insert(Order(op, choice));
          if (choice.line != nullptr) {
            chosen.insert({choice.line, choice.access});
            const int threads = choice.threads;
            if (threads % 32 != 0 || threads > 1024 ||
                threads * RegisterLimit(op, *choice.line) > 65536)
              std::printf("%d threads for %ld columns do not run\n", threads, long{columns});
          } else {
            sources.insert(choice.source);
            if (op.sums && columns * op.bytes <= kOnePassBytes && op.bytes < 8)
              std::printf("%ld columns have no room for their functors\n", long{columns});
            const int threads = choice.cluster.groups * choice.cluster.threads;
            if (threads % 32 != 0 || threads > kClusterThreads ||
                choice.cluster.groups > kMaxGroups)
              std::printf("%d threads for slices of %ld columns do not run\n", threads,
                          long{columns});
            if (choice.source != Source::kGlobal && target.code < 90)
              std::printf("bulk copies before sm_90\n");
            if (target.ClustersOf(choice.cluster.cluster) == 0)
              std::printf("clusters of %d where none is\n", choice.cluster.cluster);
            if (SharedBytes(op, choice.source, choice.cluster, columns) >
                PipelineCapacity(target.block_bytes, op.Width()))
              std::printf("%ld columns do not fit into shared memory\n", long{columns});
          }
        }
      }
      if (orders.size() != 1)
        std::printf("%ld columns are added in several orders\n", long{columns});
    }
  }
  OpTraits quantising = op;
  quantising.quantises = true;
  for (std::int64_t columns = 1; op.bytes == 2 && !op.sums && columns < 20000; ++columns)
    if (QuantisesInOneKernel(columns)) {
      const RowShape shape{200, columns, true};
      if (Order(quantising, Choose(quantising, shape, kH200)) !=
          Order(op, Choose(op, shape, kH200)))
        std::printf("%ld columns in 8 bits are added in another order\n", long{columns});
    }
  for (const ResidentChoice& line : kResidentChoices)
    for (int access = 0; access < 3; ++access)
      if (HasKernel(op, line, static_cast<RowAccess>(access)) &&
          chosen.count({&line, static_cast<RowAccess>(access)}) == 0)
        std::printf("line %td is compiled for access %d and never chosen\n",
                    &line - kResidentChoices, access);
  for (int source = 0; source < 5; ++source)
    if (HasKernel(op, static_cast<Source>(source)) &&
        sources.count(static_cast<Source>(source)) == 0)
      std::printf("source %d is compiled and never chosen\n", source);
}

static void CheckAll() {
  for (int bytes : {2, 4, 8}) {
    for (int columns : {0, 1, 2})
      for (int column_bytes : {bytes, bytes == 2 ? 4 : bytes})
        for (bool extends : {false, true}) {
          Check({1, false, columns, false, extends, false, bytes, column_bytes});
          Check({2, true, columns, false, extends, false, bytes, column_bytes});
          Check({2, false, columns, false, extends, false, bytes, column_bytes});
          if (!extends) Check({2, false, columns, true, false, false, bytes, column_bytes});
        }
    for (int rows : {1, 2}) Check({rows, false, 0, false, false, true, bytes, bytes});
  }
}

}  // namespace twinop::rowwise

namespace twinop::attention_cached {

static void CheckAll() {
  for (int size : {64, 96, 128, 256})
    for (const Target& target : kTargets) {
      const int splits = ChooseStep({size, 1, 1}, target).splits;
      if (splits < 2) std::printf("heads of %d: a step takes the kernel for prompts\n", size);
      if ((target.block_bytes == kH200.block_bytes || size <= 96) && splits != kKvSplits)
        std::printf("heads of %d: %d splits\n", size, splits);
      for (std::int64_t blocks = 1; blocks < 600; ++blocks)
        for (std::int64_t rows : {1, 128, 129, 256, 257, 512, 1024, 1025, 9999}) {
          const StepPlan plan = ChooseStep({size, blocks, rows}, target);
          if (plan.splits != splits) std::printf("heads of %d: the bits depend on more\n", size);
          if (plan.shared_bytes + StaticBytes(size) > target.block_bytes)
            std::printf("heads of %d do not fit into shared memory\n", size);
          if (plan.cluster * plan.teams > plan.splits || plan.cluster * plan.teams < 1 ||
              target.ClustersOf(plan.cluster) == 0 || (plan.teams > 1 && size > 64))
            std::printf("clusters of %d with %d teams\n", plan.cluster, plan.teams);
        }
    }
}

}  // namespace twinop::attention_cached

namespace twinop::linear::float8 {

static void CheckAll() {
  for (const Target& target : kTargets)
    for (std::int64_t m : {1, 32, 33, 64, 65, 512, 16384})
      for (std::int64_t k : {768, 3072, 14336}) {
        const Way way = ChooseWay({m, 768, k, false}, target, true);
        if (ChooseWay({m, 768, k, false}, target, false) == Way::kScaled ||
            (way == Way::kScaled && target.capability != 90) ||
            (way == Way::kWide) != (target.capability < 89))
          std::printf("%ld rows of %ld in 8 bits: another way\n", long{m}, long{k});
        for (std::int64_t few : {0, 32, 64})  // x in 16 bits
          if (ChooseWay({m, 768, k, false}, target, true, few) != (m <= few ? Way::kFewRows : way))
            std::printf("%ld rows of %ld in 16 bits: another way\n", long{m}, long{k});
      }
  static_assert(ChooseWay({0, 768, 0, false}, kH200, true, 32) != Way::kFewRows);
  static_assert(ChooseWay({512, 768, 3072, false}, kH200, true) == Way::kSums);
  static_assert(ChooseWay({2048, 768, 3072, false}, kH200, true) == Way::kScaled);
}

}  // namespace twinop::linear::float8

namespace twinop::linear::few_rows {

static void CheckAll() {
  std::set<std::tuple<const Line*, WeightKind, int>> chosen;
  constexpr WeightKind kKinds[] = {kPlain, kNormed,    k4Bits,  k4BitsZero,
                                   k8Bits, k8BitsZero, kFloat8, kFloat8Normed};
  for (const Target& target : kTargets)
    for (WeightKind kind : kKinds)
      for (int n = 8; n < 140000; n = static_cast<int>(Next(n / 8, target)) * 8)
        for (int chunks : {1, 16, 17, 32, 33, 63, 64, 127, 128}) {
          const int k = 64 * chunks, split_k = SplitKOf({kind, 1, n, k, chunks}, target);
          for (int m : {1, 2, 9, 16, 17, 32, 33, 200}) {
            const ProductShape shape{kind, m, n, k, chunks};
            const Line* const line = Choose(shape, target);
            if (line == nullptr) {
              std::printf("no line for %d x %d\n", m, n);
              continue;
            }
            chosen.insert({line, kind, TilesOf(m)});
            if (line->SplitK() != split_k) std::printf("%d rows, other bits\n", m);
            if (SharedBytes(*line, TilesOf(m)) > target.block_bytes)
              std::printf("%d x %d does not fit into shared memory\n", m, n);
            const WidePlan wide = ChooseWide(shape, target);
            if (wide.stages > 0 && (!target.has_wgmma || target.ClustersOf(wide.blocks) == 0))
              std::printf("%d x %d takes wgmma\n", m, n);
          }
        }
  for (const Line& line : kLines) {
    if (line.warps * line.blocks > 48)  // as many has a multiprocessor of 8.6, 8.9 and 12.0
      std::printf("line %td wants too many warps\n", &line - kLines);
    for (WeightKind kind : kKinds)
      for (int tiles : {1, 2, 4})
        if ((line.weights & kind) != 0 && (line.tiles & tiles) != 0 &&
            chosen.count({&line, kind, tiles}) == 0)
          std::printf("line %td is compiled for weight %d and %d tiles and never chosen\n",
                      &line - kLines, kind, tiles);
  }
}

}  // namespace twinop::linear::few_rows

int main(int count, char** arguments) {
  if (count > 1) {
    Target target = kH200;
    const twinop::Status status = twinop::LimitTo(arguments[1], &target);
    std::printf("%s\n", status.ok() ? "known" : status.message().c_str());
    return 0;
  }
  twinop::rowwise::CheckAll();
  twinop::attention_cached::CheckAll();
  twinop::linear::float8::CheckAll();
  twinop::linear::few_rows::CheckAll();
  for (const Target& target : kTargets)
    for (std::int64_t bytes = 1 << 20; bytes < 200 << 20; bytes += 1 << 20) {
      twinop::elementwise::CallShape call{};
      call.is_flat = true, call.bytes = bytes;
      if (Choose(call, 2, target) == twinop::elementwise::Kernel::kFlatCached &&
          bytes > target.l2_bytes)
        std::printf("%ld bytes do not stay in L2\n", long{bytes});
    }
  std::printf("checked\n");
}
