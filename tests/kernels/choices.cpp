// Goes through the choices of the row-wise kernels and prints what contradicts them.
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "twinop/rowwise/choose.h"

using namespace twinop::rowwise;

namespace {

// What decides the order of the additions of a row: the threads that share it, or its slices. (A
// lane without a vector adds nothing. The lanes of interleaved rows take other elements.)
std::tuple<int, int, bool> Order(const Choice& choice) {
  const bool interleaved = choice.access == RowAccess::kInterleaved;
  if (choice.line == nullptr) return {choice.cluster.cluster, -choice.cluster.threads, false};
  return {choice.line->lanes > 0 ? 32 : choice.threads * choice.line->totals, 0, interleaved};
}

void Check(const OpTraits& op) {
  std::set<std::pair<const ResidentChoice*, RowAccess>> chosen;
  std::set<Source> sources;
  for (int architecture : {80, 90, 100, 120}) {
    for (std::int64_t columns = 1; columns < 600000; columns += columns < 18000 ? 1 : 7777) {
      std::set<std::tuple<int, int, bool>> orders;
      for (std::int64_t rows : {1, 200, 1000}) {
        for (bool aligned : {false, columns % op.Width() == 0}) {
          const Choice choice = Choose(op, {rows, columns, aligned}, architecture);
          orders.insert(Order(choice));
          if (choice.line != nullptr) {
            chosen.insert({choice.line, choice.access});
            if (choice.threads % 32 != 0 || choice.threads > 1024)
              std::printf("%d threads for %ld columns\n", choice.threads, long{columns});
          } else {
            sources.insert(choice.source);
            if (op.sums && columns * op.bytes <= kOnePassBytes)
              std::printf("%ld columns have no room for their functors\n", long{columns});
            if (choice.source != Source::kGlobal && architecture < 90)
              std::printf("clusters before sm_90\n");
          }
        }
      }
      if (orders.size() != 1)
        std::printf("%ld columns are added in several orders\n", long{columns});
    }
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

}  // namespace

int main() {
  for (int bytes : {2, 4, 8})
    for (int columns : {0, 1, 2})
      for (int column_bytes : {bytes, bytes == 2 ? 4 : bytes})
        for (bool extends : {false, true}) {
          Check({1, false, columns, false, extends, bytes, column_bytes});
          Check({2, true, columns, false, extends, bytes, column_bytes});
          Check({2, false, columns, false, extends, bytes, column_bytes});
          if (!extends) Check({2, false, columns, true, false, bytes, column_bytes});
        }
  std::printf("checked\n");
}
