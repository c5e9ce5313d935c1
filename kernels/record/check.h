// Checks that every binding makes, and the messages they give: op, argument, shape and dtype.
#pragma once

#include <string>

#include "kernels/record/record.h"

namespace twinop {

// "x: float32[2, 3]"
std::string Describe(std::string_view name, const Tensor& tensor);

// `message` with the op and all its tensors before it.
Status Failure(const Record& record, const Tensor* inputs, std::string_view message);

// What an attribute's value points to.
struct AttributeStorage {
  std::string text;                  // str
  std::int64_t ints[kMaxList] = {};  // int[]
};

// An attribute's default as written in the schema. Required attributes stay zero.
Status ParseDefault(const Record& record, std::size_t index, Attribute* value,
                    AttributeStorage* storage);

// What is wrong with an attribute whatever the inputs are: it is none of its choices, or outside
// its limits, or an int[] longer than kMaxList.
Status CheckAttribute(const Record& record, std::size_t attribute, const Attribute& value);

// Index of the dtype combination that the inputs have, or an error that lists the combinations.
Status FindCombination(const Record& record, const Tensor* inputs, std::size_t* combination);

// The inputs have the shapes that the record requires, and attributes that are dimensions are some
// of them. (Whether inputs broadcast, OutputShape says.)
Status CheckShapes(const Record& record, const Tensor* inputs, const Attribute* attributes);

// The output's shape for these inputs.
Status OutputShape(const Record& record, std::size_t output, const Tensor* inputs,
                   const Attribute* attributes, std::int64_t* sizes, std::size_t* rank);

// The bytes of scratch memory that a call needs, from the op's own function.
Status ScratchBytes(const Record& record, const Call& call, std::int64_t* bytes);

// No output overlaps an input, but where the record allows it to be the very same memory.
Status CheckAliases(const Record& record, const Call& call);

// Runs the op's launcher.
inline Status Launch(const Record& record, twinop_launch launch, const Call& call) {
  ErrorText error;
  if (__builtin_expect(launch(ToC(call), &error) == 0, true)) return {};
  return Failure(record, call.inputs, error.text);
}

}  // namespace twinop
