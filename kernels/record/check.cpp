#include "twinop/record/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace twinop {
namespace {

std::string Quote(std::string_view text) { return "'" + std::string(text) + "'"; }

// An error that does not depend on the inputs.
Status WrongAttribute(const OpSpec& record, const Argument& argument, const std::string& message) {
  return Status::Error(std::string(record.domain) + "::" + std::string(record.name) +
                       ": attribute " + std::string(argument.name) + " " + message);
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// Whether a number keeps to a bound.
template <class T>
bool IsWithin(int rule, T value, T bound) {
  return rule == TWINOP_ABOVE      ? value > bound
         : rule == TWINOP_AT_LEAST ? value >= bound
         : rule == TWINOP_BELOW    ? value < bound
                                   : value <= bound;
}

// "custom_domain::gelu(x: float32[2, 3], approximate=none)"; without attributes if they are null.
std::string CallText(const OpSpec& record, const Tensor* inputs, const Attribute* attributes) {
  std::string text = std::string(record.domain) + "::" + std::string(record.name) + "(";
  for (std::size_t i = 0; i < record.input_count; ++i)
    text += (i > 0 ? ", " : "") + Describe(record.input(i).name, inputs[i]);
  for (std::size_t i = 0; attributes != nullptr && i < record.attribute_count; ++i) {
    const Argument& argument = record.attribute(i);
    const Attribute& value = attributes[i];
    text += ", " + std::string(argument.name) + "=" +
            (argument.kind == Kind::kFloat     ? Number(value.f)
             : argument.kind == Kind::kString  ? std::string(value.text())
             : argument.kind == Kind::kIntList ? SizesText(value.ints, value.count)
                                               : std::to_string(value.i));
  }
  return text + ")";
}

}  // namespace

Status CheckTable(const twinop_table* table, const char* reader) {
  if (table == nullptr) return Status::Error("the library has no table of ops. Build it again");
  if (table->abi_version == TWINOP_ABI_VERSION) return {};
  return Status::Error("the library's ops have version " + std::to_string(table->abi_version) +
                       " of twinop's binary interface, " + reader + " reads version " +
                       std::to_string(TWINOP_ABI_VERSION) +
                       ". Build the library again with this twinop (" TWINOP_VERSION
                       "), or use the twinop that built it");
}

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

Status Failure(const OpSpec& record, const Tensor* inputs, std::string_view message) {
  return Status::Error(CallText(record, inputs, nullptr) + ": " + std::string(message));
}

void TraceCall(const OpSpec& record, const Call& call) {
  static constexpr const char* kLevels[] = {"", "", ", AVX2", ", AVX-512"};
  const bool on_cuda = call.context->device_type == TWINOP_CUDA;
  Trace("%s on %s", CallText(record, call.inputs, call.attributes).c_str(),
        on_cuda ? ("CUDA device " + std::to_string(call.context->device_index)).c_str()
                : (std::string("the CPU") + kLevels[static_cast<int>(CpuLevel())]).c_str());
}

void SetDefault(const Argument& argument, Attribute* value, AttributeStorage* storage) {
  value->i = argument.default_int;
  value->f = argument.default_float;
  value->ints = argument.default_ints;
  value->count = argument.default_count;
  storage->text = View(argument.default_text);
  value->set_text(storage->text);
}

Status CheckAttribute(const OpSpec& record, std::size_t index, const Attribute& value) {
  static constexpr const char* kSigns[] = {"", "> ", ">= ", "< ", "<= ", ""};
  const Argument& argument = record.attribute(index);
  if (value.count > kMaxList)
    return WrongAttribute(record, argument,
                          "has " + std::to_string(value.count) + " entries, at most " +
                              std::to_string(kMaxList) + " are taken");
  const bool is_float = argument.kind == Kind::kFloat, is_text = argument.kind == Kind::kString;
  const auto number = static_cast<float>(value.f);
  bool fits = true, has_choices = false, is_choice = false;
  const twinop_limit* own[TWINOP_MAX_LIMITS];
  std::size_t count = 0;
  for (std::size_t i = 0; i < record.limit_count; ++i) {
    const twinop_limit& limit = record.limits[i];
    if (limit.attribute != static_cast<int>(index) || limit.rule == TWINOP_DIMENSION_OF) continue;
    own[count++] = &limit;
    has_choices = limit.rule == TWINOP_ONE_OF;
    if (has_choices)
      is_choice |= is_text ? View(limit.text) == value.text() : limit.value == value.i;
    else
      fits &= is_float ? std::isfinite(number) &&
                             IsWithin(limit.rule, number, static_cast<float>(limit.number))
                       : IsWithin(limit.rule, value.i, limit.value);
  }
  if (fits && (is_choice || !has_choices)) return {};
  // Bounds from below come first.
  std::stable_sort(own, own + count, [](auto* a, auto* b) {
    return a->rule <= TWINOP_AT_LEAST && b->rule > TWINOP_AT_LEAST;
  });
  std::string expected = has_choices ? "one of " : is_float ? "a finite number " : "a number ";
  for (std::size_t i = 0; i < count; ++i)
    expected += (i == 0        ? ""
                 : has_choices ? " | "
                               : " and ") +
                std::string(kSigns[own[i]->rule]) +
                (is_text    ? std::string(View(own[i]->text))
                 : is_float ? Number(own[i]->number)
                            : std::to_string(own[i]->value));
  return WrongAttribute(record, argument,
                        "is " +
                            (is_text    ? Quote(value.text())
                             : is_float ? Number(value.f)
                                        : std::to_string(value.i)) +
                            ", expected " + expected);
}

Status FindCombination(const OpSpec& record, const Tensor* inputs, std::size_t* combination) {
  for (std::size_t c = 0; c < record.combination_count; ++c) {
    bool matches = true;
    for (std::size_t i = 0; i < record.input_count && matches; ++i)
      matches = !inputs[i].present || inputs[i].dtype == record.input_types[c][i];
    if (matches) {
      *combination = c;
      return {};
    }
  }
  return Failure(record, inputs,
                 std::string("no kernel takes these dtypes; the inputs must have one of: ") +
                     record.dtypes + " (all inputs the same but where one is named)");
}

Status ScratchBytes(const OpSpec& record, const Call& call, std::int64_t* bytes) {
  *bytes = 0;
  if (record.scratch_size == nullptr) return {};
  ErrorText error;
  if (record.scratch_size(&call, bytes, &error) != 0)
    return Failure(record, call.inputs, error.text);
  if (*bytes >= 0 && *bytes <= INT64_MAX / 2) return {};
  return Failure(record, call.inputs,
                 "the op asks for " + std::to_string(*bytes) + " bytes of scratch memory");
}

Status CreateState(const OpSpec& record, const Call& call, void** state) {
  *state = nullptr;
  if (record.create == nullptr) return {};
  ErrorText error;
  if (record.create(&call, state, &error) == 0) return {};
  *state = nullptr;
  return Status::Error("creating its state failed: " + error.text);
}

bool AllEmpty(const OpSpec& record, const Tensor* outputs) {
  for (std::size_t i = 0; i < record.output_count; ++i)
    if (outputs[i].numel > 0) return false;
  return true;
}

Status CheckAliases(const OpSpec& record, const Call& call) {
  const Tensor* inputs = call.inputs;
  const Tensor* outputs = call.outputs;
  auto overlap = [](const Tensor& a, const Tensor& b) {
    const char* p = a.as<char>();
    const char* q = b.as<char>();
    return a.numel > 0 && b.numel > 0 && p < q + b.bytes() && q < p + a.bytes();
  };
  for (std::size_t o = 0; o < record.output_count; ++o) {
    if (!outputs[o].present) continue;
    for (std::size_t i = 0; i < call.input_count; ++i) {
      if (!inputs[i].present || !overlap(inputs[i], outputs[o])) continue;
      bool same = inputs[i].data == outputs[o].data && inputs[i].bytes() == outputs[o].bytes();
      if (same && record.InPlaceInput(o) == static_cast<int>(i)) continue;
      return Failure(record, inputs,
                     "output " + std::string(record.outputs[o].name) +
                         " overlaps the memory of input " +
                         std::string(record.input(std::min(i, record.input_count - 1)).name) +
                         "; give the output memory of its own");
    }
  }
  return {};
}

}  // namespace twinop
