// The checks that both adapters make. Messages name the op, its tensors and what was expected.
#pragma once

#include <string>

#include "twinop/record/record.h"
#include "twinop/record/trace.h"

namespace twinop {

// "[2, 3]"
std::string SizesText(const std::int64_t* sizes, std::size_t rank);

// "x: float32[2, 3]"
std::string Describe(std::string_view name, const Tensor& tensor);

// An error: the op and all its tensors, then `message`.
Status Failure(const Record& record, const Tensor* inputs, std::string_view message);

// Storage for what an attribute's value points to.
struct AttributeStorage {
  std::string text;                  // str
  std::int64_t ints[kMaxList] = {};  // int[]
};

// Parses the default of an attribute.
Status ParseDefault(const Record& record, std::size_t index, Attribute* value,
                    AttributeStorage* storage);

// Checks an attribute against its choices and limits, and an int[] against kMaxList, as far as the
// inputs do not matter.
Status CheckAttribute(const Record& record, std::size_t attribute, const Attribute& value);

// Finds the dtype combination of the inputs. The error lists all combinations.
Status FindCombination(const Record& record, const Tensor* inputs, std::size_t* combination);

// Checks that the inputs have the shapes that the record requires, and that attributes that are
// dimensions exist. (OutputShape checks whether inputs broadcast.)
Status CheckShapes(const Record& record, const Tensor* inputs, const Attribute* attributes);

// Computes the shape of an output. `counts` are the sizes that come from the data, if there are.
Status OutputShape(const Record& record, std::size_t output, const Tensor* inputs,
                   const Attribute* attributes, std::int64_t* sizes, std::size_t* rank,
                   const std::int64_t* counts = nullptr);

// Computes the upper bound of a size that comes from the data; INT64_MAX where it has none.
Status SizeBound(const Record& record, std::size_t size, const Tensor* inputs,
                 const Attribute* attributes, std::int64_t* bound);

// Asks the op for the bytes of scratch memory that a call needs.
Status ScratchBytes(const Record& record, const Call& call, std::int64_t* bytes);

// Makes the state of a kernel for `call`; null where the op has none.
Status CreateState(const Record& record, const Call& call, void** state);

// Whether no output has elements, so that nothing is launched.
bool AllEmpty(const Record& record, const Tensor* outputs);

// Checks that no output overlaps an input, except where the record allows the same memory.
Status CheckAliases(const Record& record, const Call& call);

// Prints the call: the op, its tensors and attributes, and where it runs.
void TraceCall(const Record& record, const Call& call);

// Runs the op's launcher.
inline Status Launch(const Record& record, twinop_launch launch, const Call& call) {
  if (__builtin_expect(kIsTraced, false)) TraceCall(record, call);
  ErrorText error;
  if (__builtin_expect(launch(&call, &error) == 0, true)) return {};
  return Failure(record, call.inputs, error.text);
}

}  // namespace twinop
