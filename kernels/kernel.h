// What an op with kernels of its own includes: typed views of a call's tensors by their names,
// scratch memory, the choice of a kernel's instance by dtype, and grids.
//
//   template <class Op>
//   Status Launch(const CallOf<Op>& call) {
//     const auto* x = InputData<float>(call, "x"_name);
//     auto* partial = Scratch<float>(call);
//     ...
//     return LaunchKernel(MyKernel, GridOver(count, 256), call, x, partial, count);
//   }
//   TWINOP_OP(my_op, Record("my_op(Tensor x) -> Tensor").dtypes("float32").scratch<4096>(), Launch)
//
// A wrong name, or a type that the record's dtypes do not have, is a compile error.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "twinop/math/numeric.h"
#include "twinop/record/registry.h"

namespace twinop {

// Whether the record's dtypes give T to the input or output of this index.
template <class T>
constexpr bool HasType(const OpSpec& record, bool is_output, int index) {
  for (std::size_t i = 0; i < record.combination_count; ++i)
    if ((is_output ? record.output_types[i][index] : record.input_types[i][index]) == DTypeOf<T>())
      return true;
  return false;
}

// The elements of an input; null where an optional input is absent.
template <class T, class Op, class Name>
const T* InputData(const CallOf<Op>& call, Name name) {
  constexpr int kIndex = Op::kRecord.FindInput(Name::view());
  if constexpr (kIndex >= 0)
    static_assert(HasType<T>(Op::kRecord, false, kIndex),
                  "the record's dtypes do not have this type for the input");
  return InputOf(call, name).template as<const T>();
}

template <class T, class Op, class Name>
T* OutputData(const CallOf<Op>& call, Name name) {
  constexpr int kIndex = Op::kRecord.FindOutput(Name::view());
  if constexpr (kIndex >= 0)
    static_assert(HasType<T>(Op::kRecord, true, kIndex),
                  "the record's dtypes do not have this type for the output");
  return OutputOf(call, name).template as<T>();
}

// The scratch memory of the call, as many bytes as the record's scratch<...>() says.
template <class T, class Op>
T* Scratch(const CallOf<Op>& call) {
  static_assert(Op::kRecord.scratch_size != nullptr,
                "the op's record says no scratch<...>(), so the call has no scratch memory");
  return static_cast<T*>(call.scratch);
}

}  // namespace twinop
