// Elementwise ops on CUDA: launches the kernel that Choose names for the tensors of a call.
#pragma once

#include <cstdint>

#include "twinop/elementwise/choose.h"
#include "twinop/elementwise/flat_kernel.cuh"
#include "twinop/elementwise/strided_kernel.cuh"
#include "twinop/primitives/launch.cuh"

namespace twinop::elementwise {

template <class F, class T, int kOutputs, int kInputs>
struct Launch {
  static constexpr int kOperands = kOutputs + kInputs;
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  using Out = Outputs<T, kOutputs>;
  using In = Inputs<T, kInputs>;

  const Call& call;
  const F& functor;

  Status Run() const {
    const Out out = OutputPointers<T, kOutputs>(call);
    const In in = InputPointers<T, kInputs>(call);
    const bool aligned = AreAligned(out) && AreAligned(in);
    if (aligned && IsFlat(call, kOutputs, kInputs)) return RunFlat(out, in);
    const auto layout = MakeLayout<kOutputs, kInputs>(call);
    // Tensors that have strides may still be flat: a range of whole rows, for example.
    if (aligned && layout.IsFlat()) return RunFlat(out, in);
    return RunStrided(layout, out, in);
  }

 private:
  template <class U, int kCount>
  static bool AreAligned(const Pointers<U, kCount>& tensors) {
    bool aligned = true;
    for (U* pointer : tensors.pointers) aligned = aligned && IsAligned(pointer, kVectorBytes);
    return aligned;
  }

  Status ChooseKernel(const CallShape& shape, Kernel* kernel) const {
    int architecture = 0;
    TWINOP_RETURN_IF_ERROR(CompiledArchitecture(call, &architecture));
    *kernel = Choose(shape, sizeof(T), architecture);
    if (__builtin_expect(kIsTraced, false)) Trace("  %s", NameOf(*kernel));
    return {};
  }

  // Blocks for a thread of which takes `each` elements.
  static Grid GridOf(std::int64_t count, std::int64_t each) {
    return Dependent(GridOver((count + each - 1) / each, kThreads));
  }

  // The L2 hint for operands none of which is broadcast.
  static Reads ReadsOf(std::int64_t count) {
    return Reads(count * kOperands * static_cast<std::int64_t>(sizeof(T)));
  }

  Status RunFlat(const Out& out, const In& in) const {
    constexpr int kMost = kTuning<F>.loads;
    CallShape shape{};
    shape.is_flat = true;
    shape.bytes = call.outputs[0].bytes();
    Kernel kernel;
    TWINOP_RETURN_IF_ERROR(ChooseKernel(shape, &kernel));
    if constexpr (sizeof(T) < 8) {
      if (kernel == Kernel::kFlatSmall) return LaunchFlat<kLoads>(out, in);
      if (kernel == Kernel::kFlatCached)
        return LaunchFlat<(kMost > kLoads ? kMost : kCachedLoads)>(out, in);
    }
    return LaunchFlat<kMost>(out, in);
  }

  template <int kEach>
  Status LaunchFlat(const Out& out, const In& in) const {
    const std::int64_t count = call.outputs[0].numel;
    return LaunchKernel(FlatKernel<F, T, kEach, kOutputs, kInputs>, GridOf(count, kEach * kWidth),
                        call, functor, count, out, in, ReadsOf(count));
  }

  // Whether a vector of the output is one of the operand, too, and aligned.
  static bool IsVector(const Layout<kOperands>& layout, int operand, const T* data) {
    const std::int64_t* strides = layout.strides[operand];
    if (!IsAligned(data, kVectorBytes)) return false;
    if (layout.IsFlat(operand)) return true;
    bool vector = strides[0] == 1 && layout.sizes[0] % kWidth == 0;
    for (int d = 1; d < layout.rank; ++d) vector = vector && strides[d] % kWidth == 0;
    return vector;
  }

  static Access AccessOf(const Layout<kOperands>& layout, int operand, const T* data) {
    const std::int64_t stride = layout.strides[operand][0];
    if (IsVector(layout, operand, data)) return Access::kVector;
    if (layout.IsScalar(operand) || (layout.sizes[0] % kWidth == 0 && stride == 0))
      return Access::kScalar;
    return stride == 1 ? Access::kShifted : Access::kGather;
  }

  Status RunStrided(const Layout<kOperands>& layout, const Out& out, const In& in) const {
    if (layout.numel > kMaxStridedElements) return RunHalves(layout, out, in);
    CallShape shape{};
    shape.has_vectors = true;
    shape.row = layout.sizes[0];
    shape.inputs = kInputs;
    for (int k = 0; k < kOutputs; ++k)
      shape.has_vectors = shape.has_vectors && IsVector(layout, k, out[k]);
    Accesses<kInputs> accesses;
    for (int k = 0; k < kInputs; ++k) {
      accesses.values[k] = AccessOf(layout, kOutputs + k, in[k]);
      shape.shifted += accesses.values[k] == Access::kShifted;
      shape.gathered += accesses.values[k] == Access::kGather;
    }
    Kernel kernel;
    TWINOP_RETURN_IF_ERROR(ChooseKernel(shape, &kernel));
    const auto launch = [&](auto strided_kernel, int each) {
      return LaunchKernel(strided_kernel, GridOf(layout.numel, each), call, functor,
                          static_cast<std::uint32_t>(layout.numel), out, in, accesses,
                          Strides<kOperands>(layout), ReadsOf(layout.numel));
    };
    if constexpr (sizeof(T) < 8) {
      if (kernel == Kernel::kGathered)
        return launch(StridedKernel<F, T, kWidth, true, kLoads, kOutputs, kInputs>,
                      kLoads * kWidth);
      if constexpr (kInputs > 1) {
        if (kernel == Kernel::kVectors)
          return launch(StridedKernel<F, T, kWidth, false, kLoads, kOutputs, kInputs>,
                        kLoads * kWidth);
      }
    }
    constexpr int kElements = LoneElements(sizeof(T));
    return launch(StridedKernel<F, T, 1, false, kElements, kOutputs, kInputs>, kElements);
  }

  // Halves the outermost dimension.
  Status RunHalves(Layout<kOperands> layout, const Out& out, const In& in) const {
    while (layout.sizes[layout.rank - 1] == 1) --layout.rank;
    const int d = layout.rank - 1;
    const std::int64_t size = layout.sizes[d];
    std::int64_t half = size / 2;
    if (d == 0) half -= half % kWidth;  // both halves stay aligned
    Out back_out = out;
    In back_in = in;
    for (int k = 0; k < kOutputs; ++k) back_out.pointers[k] += half * layout.strides[k][d];
    for (int k = 0; k < kInputs; ++k) back_in.pointers[k] += half * layout.strides[kOutputs + k][d];
    Layout<kOperands> back = layout;
    layout.sizes[d] = half;
    layout.numel = layout.numel / size * half;
    back.sizes[d] -= half;
    back.numel -= layout.numel;
    TWINOP_RETURN_IF_ERROR(RunStrided(layout, out, in));
    return RunStrided(back, back_out, back_in);
  }
};

template <template <class> class F, class AnyCall>
Status Cuda(const AnyCall& call) {
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using Functor = F<ElementCompute<T>>;
    const auto functor = MakeFunctor<Functor>(call);
    return Launch<Functor, T, kResults<F>, kArity<F>>{call, functor}.Run();
  });
}

}  // namespace twinop::elementwise
