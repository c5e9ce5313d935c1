// The elementwise skeleton: an op is a functor over compute types.
//
//   template <class T>
//   struct Relu {
//     TWINOP_INLINE T operator()(T x) const { return x < T(0) ? T(0) : x; }
//   };
//
// elementwise::Cpu<Relu> and elementwise::Cuda<Relu> are its launchers for fp32, fp16, bf16 and
// fp64. A functor with attributes has a constructor that takes `const Attribute*`.
#pragma once

#include <type_traits>

#include "kernels/numeric.h"
#include "kernels/registry.h"

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
template <class T, int kInputs>
struct Inputs {
  const T* pointers[kInputs];

  TWINOP_INLINE const T* operator[](int i) const { return pointers[i]; }
};

template <class T, int kInputs>
Inputs<T, kInputs> InputPointers(const Call& call) {
  Inputs<T, kInputs> inputs;
  for (int i = 0; i < kInputs; ++i) inputs.pointers[i] = call.inputs[i].template as<const T>();
  return inputs;
}

}  // namespace twinop::elementwise

#if defined(__CUDACC__)
#include "kernels/elementwise_cuda.cuh"
#else
#include "kernels/elementwise_cpu.h"
#endif
