// linear_q, linear_q_swiglu -> torch.ops.custom_domain.linear_q, CustomLinearQ ...
#pragma once

#include "twinop/ops/linear_q/quantised.h"
#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/ops/linear_q/quantised.cuh"
#endif

namespace twinop {

// linear and linear_swiglu with a weight of integers in blocks of a row: (q - zero) scale, rounded
// to the dtype of x. The inputs are those of ONNX Runtime's MatMulNBits: `weight` [n, blocks, bytes
// of a block]; `scale` [n, blocks]; `zero` [n, bytes]. Of two integers of 4 bits in a byte the
// first is the lower half.
// clang-format off
TWINOP_CUDA_OP(linear_q,
               Record("linear_q(Tensor x, Tensor weight, Tensor scale, Tensor? zero=None, Tensor? bias=None, "
                      "Tensor? residual=None, int bits=4, int block=32, str activation=\"none\", bool invariant=False) -> Tensor")
                   .dtypes("float16 weight=uint8 zero=uint8; bfloat16 weight=uint8 zero=uint8")
                   .shapes("y = x[:-1] + [weight[0]]")
                   .input_shapes("weight = [weight[0], (x[-1] + block - 1) // block, block * bits // 8]; "
                                 "scale = [weight[0], weight[1]]; zero = [weight[0], (weight[1] * bits + 7) // 8]; "
                                 "bias = [weight[0]]; residual = x[:-1] + [weight[0]]")
                   .limits("bits in 4 | 8; block in 32 | 128")
                   .choices("activation = none | relu | gelu | gelu_tanh | silu")
                   .scratch<linear::quantised::ScratchBytes<Op>>()
                   .state<linear::Constants<Op>>()
                   .row_body<linear::quantised::Body<Op>>(),
               linear::quantised::Cuda)

TWINOP_CUDA_OP(linear_q_swiglu,
               Record("linear_q_swiglu(Tensor x, Tensor weight, Tensor scale, Tensor? zero=None, "
                      "Tensor? bias=None, int bits=4, int block=32, str activation=\"silu\", bool invariant=False) -> Tensor")
                   .dtypes("float16 weight=uint8 zero=uint8; bfloat16 weight=uint8 zero=uint8")
                   .shapes("y = x[:-1] + [weight[0] // 2]")
                   .input_shapes("weight = [weight[0] // 2 * 2, (x[-1] + block - 1) // block, block * bits // 8]; "
                                 "scale = [weight[0], weight[1]]; zero = [weight[0], (weight[1] * bits + 7) // 8]; "
                                 "bias = [weight[0]]")
                   .limits("bits in 4 | 8; block in 32 | 128")
                   .choices("activation = silu | gelu | gelu_tanh")
                   .scratch<linear::quantised::ScratchBytes<Op>>()
                   .state<linear::Constants<Op>>()
                   .row_body<linear::quantised::Body<Op>>(),
               linear::quantised::Cuda)
// clang-format on

}  // namespace twinop
