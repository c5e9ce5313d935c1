// The elementwise skeleton: an op is a functor over compute types.
//
//   template <class T>
//   struct Relu {
//     TWINOP_INLINE T operator()(T x) const { return x < T(0) ? T(0) : x; }
//   };
//
//   TWINOP_ELEMENTWISE(relu, Relu, Record("relu(Tensor x) -> Tensor").in_place("y = x"))
//
// The op then runs on both devices in fp32, fp16, bf16 and fp64. With other dtypes in its record,
// "float32 y=int8", it computes in fp32. Its inputs broadcast as NumPy's and may have any strides.
// A functor takes 1 to 3 values, in the order of the op's inputs. A functor with several outputs
// returns elementwise::Results. A functor with attributes has a constructor:
//
//   template <class Op>
//   explicit LeakyRelu(const CallOf<Op>& call) : slope(AttributeOf<float>(call, "slope"_name)) {}
#pragma once

#include <type_traits>

#include "twinop/elementwise/strided.h"
#include "twinop/math/numeric.h"
#include "twinop/record/registry.h"

namespace twinop::elementwise {

template <class F, class T>
constexpr int ArityOf() {
  if constexpr (std::is_invocable_v<F, T>) return 1;
  if constexpr (std::is_invocable_v<F, T, T>) return 2;
  if constexpr (std::is_invocable_v<F, T, T, T>) return 3;
  return 0;
}

// The number of tensors that the functor reads.
template <template <class> class F>
inline constexpr int kArity = ArityOf<F<float>, float>();

// The value of a functor with several outputs: `return elementwise::Results<T, 2>{{a, b}};`
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

// The number of tensors that the functor writes.
template <template <class> class F>
inline constexpr int kResults = OutputsOf<F<float>, float, kArity<F>>();

// Makes the functor of a call, from the call if the functor has attributes.
template <class F, class AnyCall>
F MakeFunctor(const AnyCall& call) {
  if constexpr (std::is_constructible_v<F, const AnyCall&>) {
    return F(call);
  } else {
    static_assert(std::is_default_constructible_v<F>,
                  "an elementwise functor has a constructor that takes `const CallOf<Op>&` (for "
                  "attributes), or none");
    static_cast<void>(call);
    return F{};
  }
}

// A plain struct, because it is a kernel parameter and std::array's accessors are host functions.
template <class T, int kCount>
struct Pointers {
  T* pointers[kCount];

  TWINOP_INLINE T* operator[](int i) const { return pointers[i]; }
};
template <class T, int kInputs>
using Inputs = Pointers<const T, kInputs>;
template <class T, int kOutputs>
using Outputs = Pointers<T, kOutputs>;

template <class T, int kCount>
Pointers<T, kCount> PointersOf(const Tensor* tensors) {
  Pointers<T, kCount> found;
  for (int i = 0; i < kCount; ++i) found.pointers[i] = tensors[i].as<T>();
  return found;
}

// Whether the operands of a call are not all of one dtype that the functor computes in. They are
// then computed in fp32: of(i) is the dtype of operand i.
template <class Of>
constexpr bool IsMixed(int operands, const Of& of) {
  const DType first = of(0);
  bool mixed = first != DType::kFloat64 && (!IsStorage(first) || Info(first).size == 1);
  for (int i = 1; i < operands; ++i) mixed = mixed || of(i) != first;
  return mixed;
}

// Whether the record of an op has such a combination; whether the skeleton lacks kernels for one.
struct Mixed {
  bool found = false, wrong = false;
};
template <class Op>
constexpr Mixed FindMixed() {
  constexpr const OpSpec& kRecord = Op::kRecord;
  constexpr int kInputs = static_cast<int>(kRecord.input_count);
  constexpr int kOperands = kInputs + static_cast<int>(kRecord.output_count);
  Mixed mixed;
  for (std::size_t i = 0; i < kRecord.combination_count; ++i) {
    const auto of = [i](int k) {
      return k < kInputs ? Op::kRecord.input_types[i][k] : Op::kRecord.output_types[i][k - kInputs];
    };
    if (!IsMixed(kOperands, of)) continue;
    mixed.found = true;
    for (int k = 0; k < kOperands; ++k) mixed.wrong = mixed.wrong || !IsStorage(of(k));
  }
  return mixed;
}
template <class AnyCall>
inline constexpr Mixed kMixed{};
template <class Op>
inline constexpr Mixed kMixed<CallOf<Op>> = FindMixed<Op>();

template <int kOutputs, int kInputs>
bool IsMixed(const Call& call) {
  return IsMixed(kOutputs + kInputs, [&](int k) {
    return k < kOutputs ? call.outputs[k].dtype : call.inputs[k - kOutputs].dtype;
  });
}

// Runs a functor on the device that this compiler builds for.
template <template <class> class F, class AnyCall>
Status Run(const AnyCall& call);

}  // namespace twinop::elementwise

#if defined(__CUDACC__)
#include "twinop/elementwise/cuda.cuh"
#else
#include "twinop/elementwise/cpu.h"
#endif

namespace twinop::elementwise {

// Is compiled on the CPU, and never called: a functor of ApproxFloat, which CUDA takes for 16-bit
// types. A build without nvcc so refuses what one with nvcc would.
template <class F, class Op, int kInputs>
auto CompileReduced(const CallOf<Op>& call, ApproxFloat x) {
  const F functor = MakeFunctor<F>(call);
  if constexpr (kInputs == 1) return functor(x);
  if constexpr (kInputs == 2) return functor(x, x);
  if constexpr (kInputs == 3) return functor(x, x, x);
}

// Checks a functor against the op's record, and runs it.
template <template <class> class F, class Op>
Status Launcher(const CallOf<Op>& call) {
  constexpr const OpSpec& kRecord = Op::kRecord;
  static_assert(Op::kRecord.is_elementwise, "the record of an elementwise op says .elementwise()");
  static_assert(
      !kMixed<CallOf<Op>>.wrong,
      "an elementwise op whose tensors are not all of one of float32, float16, bfloat16 and "
      "float64 may have these but float64, float8_e4m3fn, float8_e5m2, int8 and uint8");
  static_assert(kArity<F> > 0,
                "an elementwise functor has `T operator()(T, ...) const` of 1 to 3 values");
  if constexpr (kArity<F> > 0) {
    static_assert(kArity<F> == static_cast<int>(kRecord.input_count),
                  "the functor takes another number of values than the op's schema has tensors");
    static_assert(!kRecord.HasOptionalInput(),
                  "an elementwise functor reads a value of each tensor, so none is a Tensor?");
    static_assert(kResults<F> == static_cast<int>(kRecord.output_count),
                  "the functor returns another number of values than the op's schema has outputs "
                  "(elementwise::Results<T, 2> returns two)");
#if !defined(__CUDACC__)
    if constexpr (Op::kIsOnCuda) static_cast<void>(&CompileReduced<F<ApproxFloat>, Op, kArity<F>>);
#endif
    return Run<F>(call);
  }
}

// Runs a functor without attributes on tensors other than those of the op's schema.
template <template <class> class F>
Status Launcher(const Call& call) {
  return Run<F>(call);
}

}  // namespace twinop::elementwise

// TWINOP_ELEMENTWISE(id, Functor, record), in namespace twinop, registers an elementwise op.
#define TWINOP_ELEMENTWISE(id, Functor, ...) \
  TWINOP_OP(id, (__VA_ARGS__).elementwise(), elementwise::Launcher<Functor>)

// TWINOP_UNARY(silu, Silu, x) registers an op y = f(x) and its derivative: silu with the functor
// Silu, and silu_backward with the functor SiluBackward of grad_y and x. The last argument is the
// tensor that the derivative is computed from, x or y.
#define TWINOP_UNARY(id, Functor, of)                                      \
  TWINOP_ELEMENTWISE(id, Functor,                                          \
                     Record(#id "(Tensor x) -> Tensor")                    \
                         .in_place("y = x")                                \
                         .gradient("x = " #id "_backward(grad, " #of ")")) \
  TWINOP_ELEMENTWISE(id##_backward, Functor##Backward,                     \
                     Record(#id "_backward(Tensor grad_y, Tensor " #of ") -> Tensor grad_x"))
