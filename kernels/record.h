// The op record: the one place that says what an op is. The torch registration, fakes, autograd,
// the ORT custom op, both exporters and the JSON in the library are all derived from it.
//
// The record is text plus two launchers, so that Python can give one as well (twinop/record.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/schema.h"
#include "kernels/shape.h"
#include "kernels/status.h"

namespace twinop {

inline constexpr const char* kDomain = "custom_domain";
inline constexpr int kDomainVersion = 1;

// ---------------------------------------------------------------------------------- element types

// Kernels exist for some of these; the others have a name so that an error can say what was given.
enum class DType : std::uint8_t {
  kNone,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // numpy's and torch's
  std::size_t size;       // bytes
};
inline constexpr DTypeInfo kDTypes[] = {
    {DType::kNone, "unsupported", 0},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat64, "float64", 8},
    {DType::kInt8, "int8", 1},
    {DType::kInt16, "int16", 2},
    {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},
    {DType::kUInt8, "uint8", 1},
    {DType::kBool, "bool", 1},
    {DType::kComplex64, "complex64", 8},
    {DType::kComplex128, "complex128", 16},
};

constexpr const DTypeInfo& Info(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }

constexpr DType DTypeNamed(std::string_view name) {
  for (const DTypeInfo& info : kDTypes)
    if (info.name == name && info.dtype != DType::kNone) return info.dtype;
  throw "a record names a dtype that does not exist";
}

// ---------------------------------------------------------------------------------- a call

// A view of a framework's tensor: nothing is owned. Data is dense in the order of `sizes` unless
// the op's layout is elementwise, where any one dense order is the same for all tensors of the
// call.
struct Tensor {
  void* data = nullptr;  // null where an optional input is absent
  DType dtype = DType::kNone;
  std::size_t rank = 0;
  const std::int64_t* sizes = nullptr;
  std::int64_t numel = 0;
  bool present = false;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  std::int64_t bytes() const { return numel * static_cast<std::int64_t>(Info(dtype).size); }
};

// Where a launch runs. `parallel_for` is the framework's own thread pool.
struct Context {
  using Range = void (*)(std::int64_t begin, std::int64_t end, void* argument);

  void* stream = nullptr;  // cudaStream_t; null on the CPU
  void (*parallel_for)(void* pool, std::int64_t count, std::int64_t grain, Range range,
                       void* argument) = nullptr;
  void* pool = nullptr;

  // Calls body(begin, end) over [0, count) in pieces of at least `grain`, on this thread if one is
  // enough.
  template <class Body>
  void ParallelFor(std::int64_t count, std::int64_t grain, const Body& body) const {
    if (count <= grain) return body(0, count);
    parallel_for(
        pool, count, grain,
        [](std::int64_t begin, std::int64_t end, void* argument) {
          (*static_cast<const Body*>(argument))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

struct Call {
  const Tensor* inputs = nullptr;         // in schema order, absent ones not `present`
  Tensor* outputs = nullptr;              // allocated by the binding
  const Attribute* attributes = nullptr;  // in schema order
  void* scratch = nullptr;  // Record::scratch bytes; aligned to 64 bytes, on CUDA to 256
  const Context* context = nullptr;
};

// Queues the work and returns: no allocation, no synchronize, no exception.
using Launcher = Status (*)(const Call& call);

// ---------------------------------------------------------------------------------- the record

// "y = x; s = x[:-1]": the text behind `name`, empty where there is none.
constexpr std::string_view Entry(std::string_view entries, std::string_view name) {
  Scanner scan(entries);
  while (!scan.AtEnd()) {
    std::string_view key = scan.Word();
    scan.Expect("=");
    std::string_view value = scan.Until(";");
    if (key == name) return value;
    if (!scan.AtEnd()) scan.Expect(";");
  }
  return {};
}

struct Record {
  Schema schema;
  // Allowed combinations, "float16; float16 weight=float32": every tensor has the first type but
  // those named.
  std::string_view dtypes_text = "float32; float16; bfloat16; float64";
  // Output shapes, "y = x; s = x[:-1]" (shape.h). An output left out has the shape of the first
  // input.
  std::string_view shapes_text = "";
  // Bytes of scratch memory that a launch needs: a size expression (shape.h).
  std::string_view scratch_text = "0";
  // Outputs that may overwrite an input of the same shape and type, "y = x".
  std::string_view in_place_text = "";
  // Allowed values of str attributes, "variant = auto | scalar | vec4".
  std::string_view choices_text = "";
  // Derivative formulas, "x = relu_backward(grad, y)", as in torch's derivatives.yaml: Python over
  // the op's inputs, outputs, attributes and `grad` (`grad_<output>` where there are several).
  std::string_view gradient_text = "";
  // Under torch.autocast: "keep" runs in the dtype given, "widest" promotes mixed float inputs.
  std::string_view autocast_text = "keep";
  // Every tensor of the call has one shape, and the order of the elements does not matter.
  bool is_elementwise = false;
  Launcher cpu_launcher = nullptr;
  Launcher cuda_launcher = nullptr;
  // What shapes_text and in_place_text say of each output, read once: calls ask for it. The input
  // whose shape it has, and the one that it may overwrite, or Schema::kNotFound.
  std::int8_t same_shape_inputs[kMaxOutputs] = {};
  std::int8_t in_place_inputs[kMaxOutputs] = {};

  constexpr explicit Record(std::string_view schema_text) : schema(ParseSchema(schema_text)) {
    ReadTexts();
  }

  constexpr Record dtypes(std::string_view text) const { return With(&Record::dtypes_text, text); }
  constexpr Record shapes(std::string_view text) const { return With(&Record::shapes_text, text); }
  constexpr Record scratch(std::string_view text) const {
    return With(&Record::scratch_text, text);
  }
  constexpr Record in_place(std::string_view text) const {
    return With(&Record::in_place_text, text);
  }
  constexpr Record choices(std::string_view text) const {
    return With(&Record::choices_text, text);
  }
  constexpr Record gradient(std::string_view text) const {
    return With(&Record::gradient_text, text);
  }
  constexpr Record autocast(std::string_view text) const {
    return With(&Record::autocast_text, text);
  }
  constexpr Record elementwise() const { return With(&Record::is_elementwise, true); }
  constexpr Record cpu(Launcher launcher) const { return With(&Record::cpu_launcher, launcher); }
  constexpr Record cuda(Launcher launcher) const { return With(&Record::cuda_launcher, launcher); }

  // ------------------------------------------------------------------------------ questions

  constexpr std::size_t CombinationCount() const {
    std::size_t count = 1;
    for (char c : dtypes_text) count += c == ';';
    return count;
  }

  // The element type of a tensor, by its argument's or output's name, in one combination.
  constexpr DType TypeOf(std::size_t combination, std::string_view name) const {
    Scanner scan(dtypes_text);
    for (std::size_t i = 0; i < combination; ++i) {
      scan.Until(";");
      scan.Expect(";");
    }
    DType result = DTypeNamed(scan.Word());
    while (!scan.AtEnd() && scan.Peek() != ';') {
      std::string_view argument = scan.Word();
      scan.Expect("=");
      DType dtype = DTypeNamed(scan.Word());
      if (argument == name) result = dtype;
    }
    return result;
  }

  constexpr std::string_view ShapeText(std::size_t output) const {
    std::string_view text = Entry(shapes_text, schema.outputs[output].view());
    return text.empty() ? schema.input(0).name.view() : text;
  }

  // Index of the input that the output may overwrite, or Schema::kNotFound.
  constexpr int InPlaceInput(std::size_t output) const { return in_place_inputs[output]; }

 private:
  template <class T>
  constexpr Record With(T Record::* member, T value) const {
    Record copy = *this;
    copy.*member = value;
    copy.ReadTexts();
    return copy;
  }

  constexpr void ReadTexts() {
    for (std::size_t i = 0; i < schema.output_count; ++i) {
      same_shape_inputs[i] = static_cast<std::int8_t>(schema.FindInput(ShapeText(i)));
      std::string_view text = Entry(in_place_text, schema.outputs[i].view());
      in_place_inputs[i] =
          static_cast<std::int8_t>(text.empty() ? Schema::kNotFound : schema.FindInput(text));
    }
  }
};

// Compile-time proof that a record is well formed; called by TWINOP_OP (registry.h).
constexpr bool Validate(const Record& record) {
  const Schema& schema = record.schema;
  for (std::size_t c = 0; c < record.CombinationCount(); ++c)
    record.TypeOf(c, schema.input(0).name.view());
  for (Scanner scan(record.dtypes_text); !scan.AtEnd();) {
    std::string_view name = scan.Word();
    if (!scan.Accept("=")) {
      scan.Accept(";");
      continue;
    }
    scan.Word();
    scan.Accept(";");
    if (schema.FindInput(name) < 0 && schema.FindOutput(name) < 0)
      throw "a record's dtypes name no tensor of its op";
  }

  Shape unknown;
  unknown.known_rank = false;
  const Shape* inputs[kMaxArguments] = {};
  for (std::size_t i = 0; i < schema.input_count; ++i) inputs[i] = &unknown;
  Attribute attributes[kMaxArguments] = {};
  for (Attribute& attribute : attributes) {
    attribute.i = kUnknownSize;
    attribute.count = kMaxList;
    for (std::int64_t& entry : attribute.ints) entry = kUnknownSize;
  }
  ShapeScope scope{&schema, inputs, attributes};
  for (std::size_t i = 0; i < schema.output_count; ++i)
    ShapeExpression(record.ShapeText(i), scope).EvaluateShape();
  ShapeExpression(record.scratch_text, scope).EvaluateInt();

  auto check = [](std::string_view entries, auto&& known) {
    Scanner scan(entries);
    while (!scan.AtEnd()) {
      std::string_view name = scan.Word();
      if (!known(name)) throw "a record's entry names no argument or output of its op";
      scan.Expect("=");
      std::string_view value = scan.Until(";");
      if (value.empty()) throw "a record's entry is empty";
      if (Entry(entries, name).data() != value.data()) throw "a record has two entries of one name";
      if (!scan.AtEnd()) scan.Expect(";");
    }
  };
  check(record.shapes_text, [&](std::string_view name) { return schema.FindOutput(name) >= 0; });
  check(record.in_place_text, [&](std::string_view name) { return schema.FindOutput(name) >= 0; });
  check(record.choices_text,
        [&](std::string_view name) { return schema.FindAttribute(name) >= 0; });
  check(record.gradient_text, [&](std::string_view name) { return schema.FindInput(name) >= 0; });
  for (std::size_t i = 0; i < schema.output_count; ++i)
    if (!Entry(record.in_place_text, schema.outputs[i].view()).empty() &&
        record.InPlaceInput(i) < 0)
      throw "a record's in_place names no input";
  if (record.autocast_text != "keep" && record.autocast_text != "widest")
    throw "autocast is keep or widest";
  return true;
}

}  // namespace twinop
