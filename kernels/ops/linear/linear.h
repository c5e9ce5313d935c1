// linear, linear_swiglu and those in 8 bits -> torch.ops.custom_domain.linear, CustomLinear ...
#pragma once

#include "twinop/ops/linear/body.h"
#include "twinop/ops/linear/buffers.h"
#include "twinop/ops/linear/float8.h"
#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/ops/linear/cuda.cuh"
#include "twinop/ops/linear/float8.cuh"
#endif

namespace twinop {

// y = activation(x W + bias + residual). W is `weight`, as torch's layers have it ([N, K], layout
// "nk") or as ONNX has it ([K, N], "kn"). On CUDA cuBLASLt computes the product, or a kernel of
// twinop that has the activation in it (linear/few_rows.cuh, linear/fused.cuh); on the CPU the
// framework does. On CUDA the sums of `invariant` products have one order for any number of rows:
// in 16 bits, layout "nk", K a multiple of 64, N of 8, or of 16 with a gate; others are refused.
// If it is false, such products have that order for up to `few_rows` rows.
// If `rms_eps` is not 0, each row of x is first divided by sqrt(mean(x^2) + rms_eps): an RMS norm
// whose weight W may have in it.
//
// linear_swiglu: the first half of the columns of x W is a gate; y = activation(gate) * the others.
// clang-format off
TWINOP_CUDA_OP(linear,
               Record("linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, "
                      "str activation=\"none\", str layout=\"nk\", bool invariant=False, float rms_eps=0.0, int few_rows=32) -> Tensor")
                   .shapes("y = x[:-1] + [weight[1] if layout == \"kn\" else weight[0]]")
                   .input_shapes("weight = [x[-1] if layout == \"kn\" else weight[0], "
                                 "weight[1] if layout == \"kn\" else x[-1]]; "
                                 "bias = [weight[1] if layout == \"kn\" else weight[0]]; "
                                 "residual = x[:-1] + [weight[1] if layout == \"kn\" else weight[0]]")
                   .limits("rms_eps >= 0; few_rows >= 0")
                   .choices("activation = none | relu | gelu | gelu_tanh | silu; layout = nk | kn")
                   .autocast("lower")
                   .scratch<linear::ScratchBytes<Op>>()
                   .state<linear::Constants<Op>>()
                   .row_body<linear::Body<Op>>(),
               linear::Cuda)

TWINOP_CUDA_OP(linear_swiglu,
               Record("linear_swiglu(Tensor x, Tensor weight, Tensor? bias=None, "
                      "str activation=\"silu\", str layout=\"nk\", bool invariant=False, float rms_eps=0.0, int few_rows=32) -> Tensor")
                   .shapes("y = x[:-1] + [(weight[1] if layout == \"kn\" else weight[0]) // 2]")
                   .input_shapes("weight = [x[-1] if layout == \"kn\" else weight[0] // 2 * 2, "
                                 "weight[1] // 2 * 2 if layout == \"kn\" else x[-1]]; "
                                 "bias = [weight[1] if layout == \"kn\" else weight[0]]")
                   .limits("rms_eps >= 0; few_rows >= 0")
                   .choices("activation = silu | gelu | gelu_tanh; layout = nk | kn")
                   .autocast("lower")
                   .scratch<linear::ScratchBytes<Op>>()
                   .state<linear::Constants<Op>>()
                   .row_body<linear::Body<Op>>(),
               linear::Cuda)

// y = activation(x W^T x_scale weight_scale + bias + residual), of operands in 8 bits with a scale
// a row. The bias has the dtype of y.
TWINOP_CUDA_OP(linear_fp8,
               Record("linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor bias, "
                      "Tensor? residual=None, str activation=\"none\") -> Tensor")
                   .dtypes("float8_e4m3fn x_scale=float32 weight_scale=float32 bias=float16 residual=float16 y=float16; "
                           "float8_e4m3fn x_scale=float32 weight_scale=float32 bias=bfloat16 residual=bfloat16 "
                           "y=bfloat16")
                   .shapes("y = x[:-1] + [weight[0]]")
                   .input_shapes("x_scale = x[:-1]; weight = [weight[0], x[-1]]; weight_scale = [weight[0]]; "
                                 "bias = [weight[0]]; residual = x[:-1] + [weight[0]]")
                   .choices("activation = none | relu | gelu | gelu_tanh | silu")
                   .scratch<linear::float8::ScratchBytes<Op>>()
                   .row_body<linear::float8::Body<Op>>(),
               linear::float8::Cuda)

// linear and linear_swiglu with a weight in 8 bits, for decoders: on CUDA up to `few_rows` rows are
// multiplied in 16 bits. More are put in 8 bits first, as quantize_rows and rms_norm_fp8 do it, and
// multiplied as linear_fp8 does it.
TWINOP_CUDA_OP(linear_w8,
               Record("linear_w8(Tensor x, Tensor weight, Tensor weight_scale, Tensor bias, Tensor? residual=None, "
                      "str activation=\"none\", float rms_eps=0.0, int few_rows=32) -> Tensor")
                   .dtypes("float16 weight=float8_e4m3fn weight_scale=float32; "
                           "bfloat16 weight=float8_e4m3fn weight_scale=float32")
                   .shapes("y = x[:-1] + [weight[0]]")
                   .input_shapes("weight = [weight[0], x[-1]]; weight_scale = [weight[0]]; bias = [weight[0]]; "
                                 "residual = x[:-1] + [weight[0]]")
                   .limits("rms_eps >= 0; few_rows >= 0")
                   .choices("activation = none | relu | gelu | gelu_tanh | silu")
                   .scratch<linear::float8::ScratchBytes<Op>>()
                   .state<linear::Constants<Op>>()
                   .row_body<linear::float8::Body<Op>>(),
               linear::float8::Cuda)

TWINOP_CUDA_OP(linear_w8_swiglu,
               Record("linear_w8_swiglu(Tensor x, Tensor weight, Tensor weight_scale, Tensor bias, "
                      "str activation=\"silu\", float rms_eps=0.0, int few_rows=32) -> Tensor")
                   .dtypes("float16 weight=float8_e4m3fn weight_scale=float32; "
                           "bfloat16 weight=float8_e4m3fn weight_scale=float32")
                   .shapes("y = x[:-1] + [weight[0] // 2]")
                   .input_shapes("weight = [weight[0] // 2 * 2, x[-1]]; weight_scale = [weight[0]]; "
                                 "bias = [weight[0]]")
                   .limits("rms_eps >= 0; few_rows >= 0")
                   .choices("activation = silu | gelu | gelu_tanh")
                   .scratch<linear::float8::ScratchBytes<Op>>()
                   .state<linear::Constants<Op>>()
                   .row_body<linear::float8::Body<Op>>(),
               linear::float8::Cuda)
// clang-format on

}  // namespace twinop
