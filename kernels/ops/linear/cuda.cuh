// linear and linear_swiglu on CUDA: cuBLASLt computes the product and what its epilogues can do,
// and twinop's kernels the rest; or one kernel computes both (few_rows.cuh, fused.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "twinop/elementwise.h"
#include "twinop/elementwise/gate_up_view.h"
#include "twinop/math/gelu.h"
#include "twinop/ops/linear/cublas_gemm.cuh"
#include "twinop/ops/linear/few_rows.cuh"
#if defined(TWINOP_SM90A)
#include "twinop/ops/linear/few_rows_hopper.cuh"
#include "twinop/ops/linear/fused.cuh"
#else
namespace twinop::linear::fused {
inline Status Run(const Call&, const GemmBuffers&, const Sizes&, DType, std::string_view, bool,
                  void*, bool* done) {
  *done = false;
  return {};
}
}  // namespace twinop::linear::fused
#endif

namespace twinop {
TWINOP_LAUNCH_ON_CUDA(relu)
TWINOP_LAUNCH_ON_CUDA(gelu)
TWINOP_LAUNCH_ON_CUDA(silu)
TWINOP_LAUNCH_ON_CUDA(swiglu_packed)
TWINOP_LAUNCH_ON_CUDA(rms_norm)
}  // namespace twinop

namespace twinop::linear {

// y = bias + residual, each if present: the result for k = 0, and the matrix that cuBLASLt adds its
// product to if it has no epilogue for the bias.
template <class T>
static __global__ void FillKernel(T* y, const T* bias, const T* residual, std::int64_t n,
                                  std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  Compute<T> sum(0);
  if (bias != nullptr) sum += ToCompute(bias[i % n]);
  if (residual != nullptr) sum += ToCompute(residual[i]);
  Round(sum, &y[i]);
}

inline Status Fill(const Call& call, const GemmBuffers& at, const Sizes& sizes, DType dtype,
                   void* y) {
  return DispatchFloat(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const std::int64_t count = sizes.m * sizes.n;
    return LaunchKernel(FillKernel<T>, GridOver(count, 256), call, static_cast<T*>(y),
                        static_cast<const T*>(at.bias.data),
                        static_cast<const T*>(at.residual.data), sizes.n, count);
  });
}

// Runs another op of the library on dense tensors.
inline Status RunOp(Status (*launch)(const twinop_call*), const Call& call, const Tensor& x,
                    Tensor y, std::string_view attribute) {
  Attribute attributes[kMaxArguments];
  attributes[0].set_text(attribute);
  Call other = call;
  other.inputs = &x;
  other.input_count = 1;
  other.outputs = &y;
  other.attributes = attributes;
  return launch(&other);
}

// Divides each row of x by its root mean square, into `normed`, which x then is.
inline Status Norm(const Call& call, GemmBuffers* at, float eps) {
  Tensor tensors[] = {*at->x.tensor, Tensor(), *at->x.tensor};  // x, no weight, y
  tensors[0].data = at->x.data;
  tensors[2].data = at->x.data = at->normed;
  Attribute attributes[kMaxArguments];  // axis, eps, offset
  attributes[0].i = -1;
  attributes[1].f = eps;
  Call other = call;
  other.inputs = tensors;
  other.input_count = 2;
  other.outputs = &tensors[2];
  other.attributes = attributes;
  return rms_norm_op::LaunchOnCuda<true>(&other);
}

inline Status Activate(const Call& call, const Tensor& y, std::string_view activation) {
  if (activation == "none") return {};
  if (activation == "relu") return RunOp(relu_op::LaunchOnCuda<true>, call, y, y, "auto");
  if (activation == "silu") return RunOp(silu_op::LaunchOnCuda<true>, call, y, y, "");
  return RunOp(gelu_op::LaunchOnCuda<true>, call, y, y,
               activation == "gelu_tanh" ? "tanh" : "none");
}

// Returns the epilogue that computes the activation, or 0. cuBLASLt's GELU is the tanh form with
// the hardware's tanh, which is accurate enough for 16 bits only.
inline std::uint32_t EpilogueOf(std::string_view activation, DType dtype) {
  if (activation == "relu") return kLtRelu;
  return activation == "gelu_tanh" && Info(dtype).size == 2 ? kLtTanhGelu : 0;
}

// Computes y [m, n] into `y.data`, with the largest epilogue that cuBLASLt has an algorithm for.
inline Status Compute(const Call& call, const GemmBuffers& at, const Sizes& sizes, const Tensor& y,
                      std::string_view activation) {
  const std::uint32_t bias = at.bias.data != nullptr ? kLtBias : 0;
  const std::uint32_t active = EpilogueOf(activation, y.dtype);
  const void* const residual = at.residual.data;
  bool done = false;
  const auto multiply = [&](const void* c, std::uint32_t epilogue) {
    return Multiply(call, at, sizes, y.dtype, c, y.data, epilogue != 0 ? epilogue : kLtDefault,
                    &done);
  };
  if (sizes.k == 0) {
    TWINOP_RETURN_IF_ERROR(Fill(call, at, sizes, y.dtype, y.data));
    return Activate(call, y, activation);
  }
  if (active != 0) TWINOP_RETURN_IF_ERROR(multiply(residual, active | bias));
  if (done) return {};
  TWINOP_RETURN_IF_ERROR(multiply(residual, bias));
  if (!done) {
    if (bias != 0) TWINOP_RETURN_IF_ERROR(Fill(call, at, sizes, y.dtype, y.data));
    TWINOP_RETURN_IF_ERROR(multiply(bias != 0 ? y.data : residual, 0));
  }
  if (!done)
    return Status::Error("cuBLASLt has no algorithm for a product of " + std::to_string(sizes.m) +
                         " x " + std::to_string(sizes.k) + " and " + std::to_string(sizes.k) +
                         " x " + std::to_string(sizes.n) + " matrices on this GPU");
  return Activate(call, y, activation);
}

// Runs `compute(buffers, y)` on aligned buffers, copying those that are not.
template <class Op, class Body>
Status WithOperands(const CallOf<Op>& call, const Body& compute) {
  GemmBuffers at = BuffersOf(call);
  for (const Operand* each : {&at.x, &at.weight, &at.bias, &at.residual})
    if (each->is_moved()) TWINOP_RETURN_IF_ERROR(CopyTensor(call, *each->tensor, each->data));
  Tensor y = OutputOf(call, "y"_name);
  y.data = at.y.data;
  TWINOP_RETURN_IF_ERROR(compute(&at, y));
  return at.y.is_moved() ? CopyTensor(call, y, at.y.tensor->data) : Status();
}

// Whether the kernels of few rows take a product (few_rows.cuh).
inline bool AreFewRows(const Sizes& sizes, DType dtype, bool gated, std::int64_t few) {
  constexpr int kChunk = few_rows::Dense<Half>::kSlices * few_rows::kSlice;
  return sizes.m <= few && Info(dtype).size == 2 && !sizes.is_kn && sizes.k > 0 &&
         sizes.k % kChunk == 0 && few_rows::Fits(sizes, gated);
}

template <bool kHere>
Status IsOneKernel(const twinop_call* call, const GemmBuffers& at, const Sizes& sizes, DType dtype,
                   std::string_view activation, bool gated, std::int64_t few, bool* is_one) {
  *is_one = AreFewRows(sizes, dtype, gated, few);
  if (*is_one) return {};
  return OnDevice(FromC(call), [&](const Call& call) {
    return fused::Run(call, at, sizes, dtype, activation, gated, nullptr, is_one);
  });
}
template Status IsOneKernel<InThisPart("linear")>(const twinop_call*, const GemmBuffers&,
                                                  const Sizes&, DType, std::string_view, bool,
                                                  std::int64_t, bool*);

// Computes all in one kernel; sets `*done` to false, with x normed, where there is none for this
// call.
template <class Op>
Status RunOneKernel(const CallOf<Op>& call, GemmBuffers* at, const Sizes& sizes, const Tensor& y,
                    std::string_view activation, bool* done) {
  constexpr bool gated = kGated<Op>;
  const bool is_constant = Constants<Op>::HasWeight(call) && !at->weight.is_moved();
  const auto rms_eps = AttributeOf<float>(call, "rms_eps"_name);
  *done = AreFewRows(sizes, y.dtype, gated, MostFewRows(call));
  if (*done) {
    constexpr int kChunk = few_rows::Dense<Half>::kSlices * few_rows::kSlice;
    const auto run = [&](auto tag) {
      using T = typename decltype(tag)::Type;
      const few_rows::Dense<T> weight{static_cast<const T*>(at->weight.data), sizes.k};
      const int chunks = static_cast<int>(sizes.k / kChunk);
      return few_rows::Launch(
          call, weight,
          few_rows::TaskOf<T>(*at, sizes, activation, gated, is_constant, chunks, rms_eps, y.data));
    };
    return y.dtype == DType::kFloat16 ? run(Tag<Half>{}) : run(Tag<BFloat16>{});
  }
  if (AttributeOf<bool>(call, "invariant"_name))
    return Status::Error(
        "K is " + std::to_string(sizes.k) + " and N " + std::to_string(sizes.n) +
        "; an invariant product takes 16-bit types, layout nk, K a multiple of 64 and N of " +
        (gated ? "16" : "8"));
  if (rms_eps > 0) TWINOP_RETURN_IF_ERROR(Norm(call, at, rms_eps));
  return fused::Run(call, *at, sizes, y.dtype, activation, gated, y.data, done);
}

// y = gelu(gate) * other
template <class T>
struct Geglu {
  TWINOP_INLINE T operator()(T other, T gate) const { return other * Gelu<T>{}(gate); }
};
template <class T>
struct TanhGeglu {
  TWINOP_INLINE T operator()(T other, T gate) const { return other * TanhGelu<T>{}(gate); }
};

// y [m, n / 2] = activation(gate) * other, of gates and others [m, n].
inline Status Gate(const Call& call, const Tensor& packed, const Sizes& sizes,
                   std::string_view activation, const Tensor& to) {
  const std::int64_t y_sizes[] = {sizes.m, sizes.n / 2};
  Tensor y(to.data, y_sizes, 2, to.numel, to.dtype);
  if (activation == "silu") return RunOp(swiglu_packed_op::LaunchOnCuda<true>, call, packed, y, "");
  const GateUpView halves(packed);
  const Tensor inputs[] = {halves.value, halves.gate};
  Call gated = call;
  gated.inputs = inputs;
  gated.input_count = 2;
  gated.outputs = &y;
  return activation == "gelu" ? elementwise::Launcher<Geglu>(gated)
                              : elementwise::Launcher<TanhGeglu>(gated);
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  return WithOperands(call, [&](GemmBuffers* at, const Tensor& y) {
    const Sizes sizes = SizesOf(call);
    const auto activation = AttributeOf<std::string_view>(call, "activation"_name);
    bool done = false;
    TWINOP_RETURN_IF_ERROR(RunOneKernel(call, at, sizes, y, activation, &done));
    if (done) return Status();
    if (!kGated<Op>) return Compute(call, *at, sizes, y, activation);
    const std::int64_t packed_sizes[] = {sizes.m, sizes.n};
    const Tensor packed(at->packed, packed_sizes, 2, sizes.m * sizes.n, y.dtype);
    TWINOP_RETURN_IF_ERROR(Compute(call, *at, sizes, packed, "none"));
    return Gate(call, packed, sizes, activation, y);
  });
}

}  // namespace twinop::linear
