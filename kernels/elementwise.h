// The elementwise skeleton: an op is a functor over compute types.
//
//   template <class T>
//   struct Relu {
//     TWINOP_INLINE T operator()(T x) const { return x < T(0) ? T(0) : x; }
//   };
//
// elementwise::Cpu<Relu> and elementwise::Cuda<Relu> are its launchers for fp32, fp16, bf16 and
// fp64; the inputs broadcast as numpy's and may have any strides. A functor takes 1 to 3 values;
// one with attributes has a constructor that takes `const Attribute*`; one with several outputs
// returns elementwise::Results.
#pragma once

#include <type_traits>

#include "kernels/elementwise/strided.h"
#include "kernels/math/numeric.h"
#include "kernels/record/registry.h"

namespace twinop::elementwise {

template <class F, class T>
constexpr int ArityOf() {
  if constexpr (std::is_invocable_v<F, T>) return 1;
  if constexpr (std::is_invocable_v<F, T, T>) return 2;
  if constexpr (std::is_invocable_v<F, T, T, T>) return 3;
  return 0;
}

// Number of tensors that the functor reads.
template <template <class> class F>
inline constexpr int kArity = ArityOf<F<float>, float>();

// What a functor with several outputs returns: `return elementwise::Results<T, 2>{{a, b}};`
template <class T, int kCount>
struct Results {
  T values[kCount];
};

template <class T>
inline constexpr int kResultCount = 1;
template <class T, int kCount>
inline constexpr int kResultCount<Results<T, kCount>> = kCount;

template <class F, class T, int kInputs>
constexpr int OutputsOf() {
  if constexpr (kInputs == 1) return kResultCount<std::invoke_result_t<F, T>>;
  if constexpr (kInputs == 2) return kResultCount<std::invoke_result_t<F, T, T>>;
  if constexpr (kInputs == 3) return kResultCount<std::invoke_result_t<F, T, T, T>>;
  return 0;
}

// Number of tensors that the functor writes.
template <template <class> class F>
inline constexpr int kResults = OutputsOf<F<float>, float, kArity<F>>();

template <class F>
F MakeFunctor(const Attribute* attributes) {
  if constexpr (std::is_constructible_v<F, const Attribute*>) {
    return F(attributes);
  } else {
    static_cast<void>(attributes);
    return F{};
  }
}

// A plain struct: it is a kernel parameter, and std::array's accessors are host functions.
template <class T, int kCount>
struct Pointers {
  T* pointers[kCount];

  TWINOP_INLINE T* operator[](int i) const { return pointers[i]; }
};
template <class T, int kInputs>
using Inputs = Pointers<const T, kInputs>;
template <class T, int kOutputs>
using Outputs = Pointers<T, kOutputs>;

template <class T, int kInputs>
Inputs<T, kInputs> InputPointers(const Call& call) {
  Inputs<T, kInputs> inputs;
  for (int i = 0; i < kInputs; ++i) inputs.pointers[i] = call.inputs[i].template as<const T>();
  return inputs;
}

template <class T, int kOutputs>
Outputs<T, kOutputs> OutputPointers(const Call& call) {
  Outputs<T, kOutputs> outputs;
  for (int i = 0; i < kOutputs; ++i) outputs.pointers[i] = call.outputs[i].template as<T>();
  return outputs;
}

}  // namespace twinop::elementwise

#if defined(__CUDACC__)
#include "kernels/elementwise/cuda.cuh"
#include "kernels/elementwise/strided_cuda.cuh"
#else
#include "kernels/elementwise/cpu.h"
#endif

// An op y = f(x) with its derivative, in namespace twinop:
//
//   TWINOP_UNARY(silu, Silu, x, "grad * grad_y * ...")
//
// declares silu (functor Silu) and silu_backward (functor SiluBackward, of grad_y and x). The third
// argument says what the derivative is computed of, x or y; the last is the derivative of
// silu_backward by it, Python over torch's operators (torch_op/autograd.py).
#define TWINOP_UNARY(id, Functor, of, second_derivative)                                       \
  TWINOP_OP(id,                                                                                \
            Record(#id "(Tensor x) -> Tensor")                                                 \
                .elementwise()                                                                 \
                .in_place("y = x")                                                             \
                .gradient("x = " #id "_backward(grad, " #of ")"),                              \
            elementwise::Cpu<Functor>, elementwise::Cuda<Functor>)                             \
  TWINOP_OP(                                                                                   \
      id##_backward,                                                                           \
      Record(#id "_backward(Tensor grad_y, Tensor " #of ") -> Tensor grad_x")                  \
          .elementwise()                                                                       \
          .gradient("grad_y = " #id "_backward(grad, " #of "); " #of " = " second_derivative), \
      elementwise::Cpu<Functor##Backward>, elementwise::Cuda<Functor##Backward>)
