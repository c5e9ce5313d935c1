// Checks that every binding makes, and the messages they give: op, argument, shape and dtype.
#pragma once

#include <string>

#include "kernels/record.h"

namespace twinop {

// "x: float32[2, 3]"
std::string Describe(std::string_view name, const Tensor& tensor);

// The attributes' defaults as written in the schema. Required attributes stay zero.
Status ParseDefault(const Record& record, std::size_t attribute, Attribute* value);

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

// Bytes of scratch memory.
Status ScratchBytes(const Record& record, const Tensor* inputs, const Attribute* attributes,
                    std::int64_t* bytes);

// No output overlaps an input, but where the record allows it to be the very same memory.
Status CheckAliases(const Record& record, const Tensor* inputs, const Tensor* outputs);

// `message` with the op and all its tensors before it.
Status Failure(const Record& record, const Tensor* inputs, std::string_view message);

}  // namespace twinop
