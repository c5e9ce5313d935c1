// Checks that every binding makes, and the messages they give: op, argument, shape and dtype.
#pragma once

#include <string>

#include "kernels/record.h"

namespace twinop {

// "x: float32[2, 3]"
std::string Describe(std::string_view name, const Tensor& tensor);

// The attributes' defaults as written in the schema. Required attributes stay zero.
Status ParseDefault(const Record& record, std::size_t attribute, Attribute* value);

// A str attribute is one of its choices, an int[] no longer than kMaxList.
Status CheckAttribute(const Record& record, std::size_t attribute, const Attribute& value);

// Index of the dtype combination that the inputs have, or an error that lists the combinations.
Status FindCombination(const Record& record, const Tensor* inputs, std::size_t* combination);

// The inputs of an elementwise op have one shape.
Status CheckShapes(const Record& record, const Tensor* inputs);

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
