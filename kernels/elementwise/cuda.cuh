// Elementwise ops on CUDA: launches the kernel that Choose names for the tensors of a call.
#pragma once

#include <cstdint>

#include "twinop/elementwise/choose.h"
#include "twinop/elementwise/flat_kernel.cuh"
#include "twinop/elementwise/mixed_kernel.cuh"
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
    const Out out = PointersOf<T, kOutputs>(call.outputs);
    const In in = PointersOf<const T, kInputs>(call.inputs);
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
    const Target* target = nullptr;
    TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
    *kernel = Choose(shape, sizeof(T), *target);
    if (__builtin_expect(kIsTraced, false)) Trace("  %s", NameOf(*kernel));
    return {};
  }

  // Blocks for a thread of which takes `each` elements.
  static Grid GridOf(std::int64_t count, std::int64_t each) {
    return WithPdl(GridOver((count + each - 1) / each, kThreads));
  }

  // The L2 hint for operands none of which is broadcast.
  static L2ReadPolicy ReadPolicyOf(std::int64_t count) {
    return L2ReadPolicy(count * kOperands * static_cast<std::int64_t>(sizeof(T)));
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
                        call, functor, count, out, in, ReadPolicyOf(count));
  }

  // Whether a vector of the output is one of the operand, too, and aligned.
  static bool IsVector(const Layout<kOperands>& layout, int operand, const T* data) {
    return IsAligned(data, kVectorBytes) && layout.HasVectors(operand, kWidth);
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
                          Strides<kOperands>(layout), ReadPolicyOf(layout.numel));
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

  Status RunHalves(Layout<kOperands> layout, const Out& out, const In& in) const {
    std::int64_t offsets[kOperands];
    const Layout<kOperands> back = layout.Split(kWidth, offsets);  // both halves stay aligned
    Out back_out = out;
    In back_in = in;
    for (int k = 0; k < kOutputs; ++k) back_out.pointers[k] += offsets[k];
    for (int k = 0; k < kInputs; ++k) back_in.pointers[k] += offsets[kOutputs + k];
    TWINOP_RETURN_IF_ERROR(RunStrided(layout, out, in));
    return RunStrided(back, back_out, back_in);
  }
};

// Operands of several dtypes: one kernel for all calls, which computes in fp32.
template <class F, int kOutputs, int kInputs>
Status RunMixed(const Call& call, const F& functor, Layout<kOutputs + kInputs> layout,
                MixedOperands<kOutputs + kInputs> operands) {
  constexpr int kOperands = kOutputs + kInputs;
  if (layout.numel > kMaxStridedElements) {
    std::int64_t offsets[kOperands];
    const Layout<kOperands> back = layout.Split(kMixedWidth, offsets);
    TWINOP_RETURN_IF_ERROR((RunMixed<F, kOutputs, kInputs>(call, functor, layout, operands)));
    for (int k = 0; k < kOperands; ++k)
      operands.data[k] += offsets[k] * static_cast<std::int64_t>(Info(operands.dtypes[k]).size);
    return RunMixed<F, kOutputs, kInputs>(call, functor, back, operands);
  }
  for (int k = 0; k < kOperands; ++k)
    operands.have_vectors[k] =
        IsAligned(operands.data[k], kMixedWidth * Info(operands.dtypes[k]).size) &&
        layout.HasVectors(k, kMixedWidth);
  const std::int64_t threads = (layout.numel + kMixedWidth - 1) / kMixedWidth;
  return LaunchKernel(MixedKernel<F, kOutputs, kInputs>, WithPdl(GridOver(threads, kThreads)), call,
                      functor, static_cast<std::uint32_t>(layout.numel), operands,
                      Strides<kOperands>(layout));
}

template <template <class> class F, class AnyCall>
Status Run(const AnyCall& call) {
  if constexpr (kMixed<AnyCall>.found) {
    constexpr int kOutputs = kResults<F>, kInputs = kArity<F>;
    if (IsMixed<kOutputs, kInputs>(call)) {
      MixedOperands<kOutputs + kInputs> operands{};
      for (int k = 0; k < kOutputs + kInputs; ++k) {
        const Tensor& tensor = k < kOutputs ? call.outputs[k] : call.inputs[k - kOutputs];
        operands.data[k] = tensor.as<char>();
        operands.dtypes[k] = tensor.dtype;
      }
      const auto functor = MakeFunctor<F<float>>(call);
      return RunMixed<F<float>, kOutputs, kInputs>(call, functor,
                                                   MakeLayout<kOutputs, kInputs>(call), operands);
    }
  }
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using Functor = F<ElementCompute<T>>;
    const auto functor = MakeFunctor<Functor>(call);
    return Launch<Functor, T, kResults<F>, kArity<F>>{call, functor}.Run();
  });
}

}  // namespace twinop::elementwise
