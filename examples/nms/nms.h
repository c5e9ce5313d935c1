// nms -> torch.ops.nms.nms, CustomNms in the domain nms: the boxes that stay of boxes that overlap.
//
// As torchvision.ops.nms: boxes are (x1, y1, x2, y2). From the highest score on, each box removes
// those behind it whose intersection is more than iou_threshold of the union. `keep` has the
// indices of the others, by score; of equal scores the first comes first.
//
// How many stay depends on the data, so the op has two launchers. CountKept does all the work and
// leaves it in the scratch memory. WriteKept writes the indices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "twinop/kernel.h"
#if defined(__CUDACC__)
#include "nms.cuh"
#endif

namespace twinop {

// The scratch memory, as far as the two launchers share it.
inline std::int64_t WordCount(std::int64_t boxes) { return (boxes + 63) / 64; }

struct NmsScratch {
  std::uint64_t* kept;   // a bit for each box, by score
  std::int64_t* before;  // how many stay of the boxes before each word
  std::int32_t* order;   // the boxes by score
  std::int32_t* rank;    // on CUDA: the place of each box
  float* sorted;         // the boxes by score
  std::uint64_t*
      overlap;  // on CUDA: overlap[64 words * w + i]: which of the 64 boxes of word w box i removes

  template <class T>
  static std::int64_t Take(char** next, std::int64_t count, T** data) {
    *data = reinterpret_cast<T*>(*next);
    const std::int64_t bytes = (count * static_cast<std::int64_t>(sizeof(T)) + 255) / 256 * 256;
    *next += bytes;
    return bytes;
  }

  NmsScratch(void* memory, std::int64_t boxes, bool on_cuda) {
    const std::int64_t words = WordCount(boxes);
    char* next = static_cast<char*>(memory);
    bytes = Take(&next, words, &kept);
    bytes += Take(&next, words, &before);
    bytes += Take(&next, boxes, &order);
    bytes += Take(&next, 5 * boxes, &sorted);
    if (!on_cuda) return;
    bytes += Take(&next, boxes, &rank);
    bytes += Take(&next, 64 * words * words, &overlap);
  }
  std::int64_t bytes;
};

template <class Op>
std::int64_t NmsBytes(const CallOf<Op>& call) {
  const bool on_cuda = call.context->device_type == TWINOP_CUDA;
  return NmsScratch(nullptr, InputOf(call, "scores"_name).numel, on_cuda).bytes;
}

#if !defined(__CUDACC__)
// Boxes as five arrays, which the compiler compares with one box by vectors.
struct Boxes {
  float *x1, *y1, *x2, *y2, *area;

  Boxes(float* memory, std::int64_t most)
      : x1(memory), y1(x1 + most), x2(y1 + most), y2(x2 + most), area(y2 + most) {}

  void Set(std::int64_t at, const float* box) const {
    x1[at] = box[0], y1[at] = box[1], x2[at] = box[2], y2[at] = box[3];
    area[at] = (box[2] - box[0]) * (box[3] - box[1]);
  }

  // Whether one of the first `count` boxes removes this one: by their intersection, in float as on
  // CUDA.
  bool Remove(const float* box, std::int64_t count, float threshold) const {
    const float own = (box[2] - box[0]) * (box[3] - box[1]);
    for (std::int64_t begin = 0; begin < count; begin += 64) {
      int found = 0;
      for (std::int64_t k = begin; k < std::min(begin + 64, count); ++k) {
        const float width = std::max(std::min(x2[k], box[2]) - std::max(x1[k], box[0]), 0.0f);
        const float height = std::max(std::min(y2[k], box[3]) - std::max(y1[k], box[1]), 0.0f);
        const float both = width * height;
        found |= both / (area[k] + own - both) > threshold ? 1 : 0;
      }
      if (found != 0) return true;
    }
    return false;
  }
};
#endif

template <class Op>
Status CountKept(const CallOf<Op>& call) {
  const std::int64_t count = InputOf(call, "scores"_name).numel;
  const auto* const boxes = InputData<float>(call, "boxes"_name);
  const auto* const scores = InputData<float>(call, "scores"_name);
  const float threshold = AttributeOf<float>(call, "iou_threshold"_name);
#if defined(__CUDACC__)
  const NmsScratch scratch(call.scratch, count, true);
  const auto words = static_cast<int>(WordCount(count));
  const auto n = static_cast<int>(count);
  auto* const sorted = reinterpret_cast<float4*>(scratch.sorted);
  TWINOP_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(scratch.rank, 0, static_cast<std::size_t>(count) * sizeof(int),
                                 static_cast<cudaStream_t>(call.context->stream)),
                 "clearing the ranks"));
  Grid pairs = GridOver(count, kRankThreads);
  pairs.blocks_y =
      static_cast<unsigned>(std::min<std::int64_t>(GridOver(count, kRankColumns).blocks, 65535));
  TWINOP_RETURN_IF_ERROR(LaunchKernel(RankKernel, pairs, call, scores, n, scratch.rank));
  TWINOP_RETURN_IF_ERROR(LaunchKernel(OrderKernel, GridOver(count, 256), call,
                                      reinterpret_cast<const float4*>(boxes), n, scratch.rank,
                                      scratch.order, sorted));
  Grid tiles{words, dim3(64)};
  tiles.blocks_y = static_cast<unsigned>(std::min(words, 65535));
  TWINOP_RETURN_IF_ERROR(
      LaunchKernel(OverlapKernel, tiles, call, sorted, n, threshold, scratch.overlap));
  return LaunchKernel(ScanKernel, {1, dim3(kScanThreads)}, call, scratch.overlap, n, scratch.kept,
                      scratch.before, call.counts);
#else
  const NmsScratch scratch(call.scratch, count, false);
  std::iota(scratch.order, scratch.order + count, 0);
  // NaN is more than all numbers, as in torch.sort.
  std::stable_sort(scratch.order, scratch.order + count, [scores](std::int32_t a, std::int32_t b) {
    return scores[a] > scores[b] || (std::isnan(scores[a]) && !std::isnan(scores[b]));
  });
  std::memset(scratch.kept, 0, static_cast<std::size_t>(WordCount(count)) * sizeof(*scratch.kept));
  const Boxes stay(scratch.sorted, count);  // each next box is compared with these
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float* const box = boxes + 4 * static_cast<std::int64_t>(scratch.order[i]);
    if (stay.Remove(box, n, threshold)) continue;
    stay.Set(n++, box);
    scratch.kept[i / 64] |= std::uint64_t{1} << (i % 64);
  }
  call.counts[0] = n;
  return {};
#endif
}

template <class Op>
Status WriteKept(const CallOf<Op>& call) {
  const std::int64_t count = InputOf(call, "scores"_name).numel;
  auto* keep = OutputData<std::int64_t>(call, "keep"_name);
#if defined(__CUDACC__)
  const NmsScratch scratch(call.scratch, count, true);
  return LaunchKernel(WriteKernel, GridOver(count, 256), call, scratch.kept, scratch.before,
                      scratch.order, static_cast<int>(count), keep);
#else
  const NmsScratch scratch(call.scratch, count, false);
  for (std::int64_t i = 0; i < count; ++i)
    if ((scratch.kept[i / 64] >> (i % 64) & 1) != 0) *keep++ = scratch.order[i];
  return {};
#endif
}

TWINOP_OP(nms,
          Record("nms(Tensor boxes, Tensor scores, float iou_threshold=0.5) -> Tensor keep")
              .dtypes("float32 keep=int64")
              .input_shapes("boxes = [boxes[0], 4]; scores = [boxes[0]]")
              .limits("iou_threshold >= 0; iou_threshold <= 1")
              .sizes("n <= boxes[0]")
              .shapes("keep = [n]")
              .scratch<NmsBytes<Op>>()
              .count<CountKept<Op>>(),
          WriteKept)

}  // namespace twinop
