// The checks that both adapters make. Messages name the op, its tensors and what was expected.
#pragma once

#include <string>

#include "twinop/primitives/cpu_features.h"
#include "twinop/record/op_spec.h"
#include "twinop/record/trace.h"

namespace twinop {

// Checks that a library's table has the ABI version of this code. The message names `reader`.
Status CheckTable(const twinop_table* table, const char* reader);

// "[2, 3]"
std::string SizesText(const std::int64_t* sizes, std::size_t rank);

// "x: float32[2, 3]"
std::string Describe(std::string_view name, const Tensor& tensor);

// An error: the op and all its tensors, then `message`.
Status Failure(const OpSpec& record, const Tensor* inputs, std::string_view message);

// Storage for what an attribute's value points to.
struct AttributeStorage {
  std::string text;                  // str
  std::int64_t ints[kMaxList] = {};  // int[]
};

// Sets an attribute to its default.
void SetDefault(const Argument& argument, Attribute* value, AttributeStorage* storage);

// Checks an attribute against its choices and limits, and an int[] against kMaxList, as far as the
// inputs do not matter.
Status CheckAttribute(const OpSpec& record, std::size_t attribute, const Attribute& value);

// Finds the dtype combination of the inputs. The error lists all combinations.
Status FindCombination(const OpSpec& record, const Tensor* inputs, std::size_t* combination);

// Checks that the inputs have the shapes that the record requires, and that attributes that are
// dimensions exist. (OutputShape checks whether inputs broadcast.)
Status CheckShapes(const OpSpec& record, const Tensor* inputs, const Attribute* attributes);

// Computes the shape of an output. `counts` are the sizes that come from the data, if there are.
Status OutputShape(const OpSpec& record, std::size_t output, const Tensor* inputs,
                   const Attribute* attributes, std::int64_t* sizes, std::size_t* rank,
                   const std::int64_t* counts = nullptr);

// Computes the upper bound of a size that comes from the data; INT64_MAX where it has none.
Status SizeBound(const OpSpec& record, std::size_t size, const Tensor* inputs,
                 const Attribute* attributes, std::int64_t* bound);

// Asks the op for the bytes of scratch memory that a call needs.
Status ScratchBytes(const OpSpec& record, const Call& call, std::int64_t* bytes);

// Makes the state of a kernel for `call`; null where the op has none.
Status CreateState(const OpSpec& record, const Call& call, void** state);

// Whether no output has elements, so that nothing is launched.
bool AllEmpty(const OpSpec& record, const Tensor* outputs);

// Checks that no output overlaps an input, except where the record allows the same memory.
Status CheckAliases(const OpSpec& record, const Call& call);

// Prints the call: the op, its tensors and attributes, and where it runs.
void TraceCall(const OpSpec& record, const Call& call);

// Runs the op's launcher.
inline Status Launch(const OpSpec& record, twinop_launch launch, const Call& call) {
  if (__builtin_expect(call.context->device_type == TWINOP_CPU && CpuLevel() == Level::kNone,
                       false))
    return Status::Error(
        "twinop's CPU kernels need a processor with AVX2, FMA, F16C and BMI2, which this one has "
        "not "
        "(its CUDA kernels need none of them)");
  if (__builtin_expect(kIsTraced, false)) TraceCall(record, call);
  ErrorText error;
  if (__builtin_expect(launch(&call, &error) == 0, true)) return {};
  return Failure(record, call.inputs, error.text);
}

}  // namespace twinop
