#include "twinop/record/check.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "twinop/primitives/cpu_features.h"

namespace twinop {
namespace {

std::string Quote(std::string_view text) { return "'" + std::string(text) + "'"; }

// An error that does not depend on the inputs.
Status WrongAttribute(const Record& record, const Argument& argument, const std::string& message) {
  return Status::Error(std::string(record.domain) + "::" + std::string(record.schema.name.view()) +
                       ": attribute " + std::string(argument.name.view()) + " " + message);
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// Whether a number is finite and within the bounds. Bounds of floats are fp32, as attributes are.
template <class T>
bool IsWithin(const Limit& limit, T value) {
  auto number = [](std::string_view text) {
    T result = 0;
    std::from_chars(text.data(), text.data() + text.size(), result);
    return result;
  };
  if (!std::isfinite(static_cast<double>(value))) return false;
  if (!limit.lower.empty()) {
    const T lower = number(limit.lower);
    if (limit.above ? !(value > lower) : !(value >= lower)) return false;
  }
  if (limit.upper.empty()) return true;
  const T upper = number(limit.upper);
  return limit.below ? value < upper : value <= upper;
}

// ">= 0 and < 1"
std::string BoundsText(const Limit& limit) {
  std::string text;
  if (!limit.lower.empty()) text = (limit.above ? "> " : ">= ") + std::string(limit.lower);
  if (limit.upper.empty()) return text;
  return (text.empty() ? "" : text + " and ") + (limit.below ? "< " : "<= ") +
         std::string(limit.upper);
}

// "custom_domain::gelu(x: float32[2, 3], approximate=none)"; without attributes if they are null.
std::string CallText(const Record& record, const Tensor* inputs, const Attribute* attributes) {
  const Schema& schema = record.schema;
  std::string text = std::string(record.domain) + "::" + std::string(schema.name.view()) + "(";
  for (std::size_t i = 0; i < schema.input_count; ++i)
    text += (i > 0 ? ", " : "") + Describe(schema.input(i).name.view(), inputs[i]);
  for (std::size_t i = 0; attributes != nullptr && i < schema.attribute_count; ++i) {
    const Argument& argument = schema.attribute(i);
    const Attribute& value = attributes[i];
    text += ", " + std::string(argument.name.view()) + "=" +
            (argument.kind == Kind::kFloat     ? Number(value.f)
             : argument.kind == Kind::kString  ? std::string(value.text())
             : argument.kind == Kind::kIntList ? SizesText(value.ints, value.count)
                                               : std::to_string(value.i));
  }
  return text + ")";
}

}  // namespace

std::string SizesText(const std::int64_t* sizes, std::size_t rank) {
  std::string text = "[";
  for (std::size_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string Describe(std::string_view name, const Tensor& tensor) {
  if (!tensor.present) return std::string(name) + ": absent";
  return std::string(name) + ": " + std::string(Info(tensor.dtype).name) +
         SizesText(tensor.sizes, tensor.rank);
}

Status Failure(const Record& record, const Tensor* inputs, std::string_view message) {
  return Status::Error(CallText(record, inputs, nullptr) + ": " + std::string(message));
}

void TraceCall(const Record& record, const Call& call) {
  static constexpr const char* kLevels[] = {"baseline", "AVX2", "AVX-512"};
  const bool on_cuda = call.context->device_type == TWINOP_CUDA;
  Trace("%s on %s", CallText(record, call.inputs, call.attributes).c_str(),
        on_cuda ? ("CUDA device " + std::to_string(call.context->device_index)).c_str()
                : (std::string("the CPU, ") + kLevels[static_cast<int>(CpuLevel())]).c_str());
}

Status ParseDefault(const Record& record, std::size_t index, Attribute* value,
                    AttributeStorage* storage) {
  const Argument& argument = record.schema.attribute(index);
  std::string_view text = argument.default_text;
  auto number = [](std::string_view digits, auto* result) {
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *result);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  bool ok = true;
  switch (argument.kind) {
    case Kind::kInt:
      ok = number(text, &value->i);
      break;
    case Kind::kBool:
      value->i = text == "True";
      break;
    case Kind::kFloat: {
      ok = number(text, &value->f);
      value->f = static_cast<float>(value->f);
      break;
    }
    case Kind::kString:
      storage->text = text.substr(1, text.size() - 2);
      value->set_text(storage->text);
      break;
    default: {  // int[]: "[1, 2]"
      Scanner scan(text);
      scan.Expect("[");
      value->ints = storage->ints;
      value->count = 0;
      while (!scan.Accept("]")) {
        if (value->count > 0) scan.Expect(",");
        storage->ints[value->count++] = scan.Integer();
      }
    }
  }
  if (ok) return {};
  return Status::Error("schema " + std::string(record.schema.text) + ": the default of " +
                       std::string(argument.name.view()) + " does not parse");
}

Status CheckAttribute(const Record& record, std::size_t index, const Attribute& value) {
  const Argument& argument = record.schema.attribute(index);
  if (value.count > kMaxList)
    return WrongAttribute(record, argument,
                          "has " + std::to_string(value.count) + " entries, at most " +
                              std::to_string(kMaxList) + " are taken");
  const Limit& limit = record.limit_table[index];
  if (limit.kind == Limit::Kind::kBounds) {
    const bool whole = argument.kind == Kind::kInt;
    if (!(whole ? IsWithin(limit, value.i) : IsWithin(limit, static_cast<float>(value.f))))
      return WrongAttribute(record, argument,
                            "is " + (whole ? std::to_string(value.i) : Number(value.f)) +
                                ", expected a " + (whole ? "" : "finite ") + "number " +
                                BoundsText(limit));
  }
  if (limit.kind != Limit::Kind::kOneOf) return {};
  const bool is_text = argument.kind == Kind::kString;
  Scanner scan(limit.choices);
  do {
    if (is_text ? scan.Word() == value.text() : scan.Integer() == value.i) return {};
  } while (scan.Accept("|"));
  return WrongAttribute(record, argument,
                        "is " + (is_text ? Quote(value.text()) : std::to_string(value.i)) +
                            ", expected one of " + std::string(limit.choices));
}

Status FindCombination(const Record& record, const Tensor* inputs, std::size_t* combination) {
  const Schema& schema = record.schema;
  for (std::size_t c = 0; c < record.CombinationCount(); ++c) {
    bool matches = true;
    for (std::size_t i = 0; i < schema.input_count && matches; ++i)
      matches = !inputs[i].present || inputs[i].dtype == record.input_types[c][i];
    if (matches) {
      *combination = c;
      return {};
    }
  }
  return Failure(record, inputs,
                 "no kernel takes these dtypes; the inputs must have one of: " +
                     std::string(record.dtypes_text) +
                     " (all inputs the same but where one is named)");
}

Status ScratchBytes(const Record& record, const Call& call, std::int64_t* bytes) {
  *bytes = 0;
  if (record.scratch_size == nullptr) return {};
  ErrorText error;
  if (record.scratch_size(&call, bytes, &error) != 0)
    return Failure(record, call.inputs, error.text);
  if (*bytes >= 0 && *bytes <= INT64_MAX / 2) return {};
  return Failure(record, call.inputs,
                 "the op asks for " + std::to_string(*bytes) + " bytes of scratch memory");
}

Status CreateState(const Record& record, const Call& call, void** state) {
  *state = nullptr;
  if (record.create_state == nullptr) return {};
  ErrorText error;
  if (record.create_state(&call, state, &error) == 0) return {};
  *state = nullptr;
  return Status::Error("creating its state failed: " + error.text);
}

bool AllEmpty(const Record& record, const Tensor* outputs) {
  for (std::size_t i = 0; i < record.schema.output_count; ++i)
    if (outputs[i].numel > 0) return false;
  return true;
}

Status CheckAliases(const Record& record, const Call& call) {
  const Schema& schema = record.schema;
  const Tensor* inputs = call.inputs;
  const Tensor* outputs = call.outputs;
  auto overlap = [](const Tensor& a, const Tensor& b) {
    const char* p = a.as<char>();
    const char* q = b.as<char>();
    return a.numel > 0 && b.numel > 0 && p < q + b.bytes() && q < p + a.bytes();
  };
  for (std::size_t o = 0; o < schema.output_count; ++o) {
    if (!outputs[o].present) continue;
    for (std::size_t i = 0; i < call.input_count; ++i) {
      if (!inputs[i].present || !overlap(inputs[i], outputs[o])) continue;
      bool same = inputs[i].data == outputs[o].data && inputs[i].bytes() == outputs[o].bytes();
      if (same && record.InPlaceInput(o) == static_cast<int>(i)) continue;
      return Failure(
          record, inputs,
          "output " + std::string(schema.outputs[o].view()) + " overlaps the memory of input " +
              std::string(schema.input(std::min(i, schema.input_count - 1)).name.view()) +
              "; give the output memory of its own");
    }
  }
  return {};
}

}  // namespace twinop
