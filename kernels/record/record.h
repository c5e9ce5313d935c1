// The op record: the one description of an op. The torch registration, fakes, autograd, the ORT
// custom op, both exporters and the JSON in the library are derived from it.
//
// A record is texts and functions. The library's table (kernels/abi.h) and the JSON in its file
// hold the texts. The adapters and Python (twinop/record/op_spec.py) parse them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "twinop/record/call.h"
#include "twinop/record/record_parts.h"
#include "twinop/record/schema.h"

namespace twinop {

inline constexpr std::size_t kMaxCombinations = 16;

struct Record {
  Schema schema;
  // Allowed combinations of dtypes, "float16; float16 weight=float32". Every tensor has the first
  // type unless it is named.
  std::string_view dtypes_text = "float32; float16; bfloat16; float64";
  // Shapes of the outputs, "y = x; s = x[:-1]" (shape.h). An output that is not listed has the
  // shape of the first input.
  std::string_view shapes_text = "";
  // Sizes that the kernel counts, with upper bounds (int expressions of shape.h): "n <= x[0]; m".
  // Shapes of outputs may name them. With a `count`, the launcher runs after it, with outputs of
  // these sizes. Without one, every size has a bound. The launcher then runs once. It writes the
  // sizes to call.counts, and outputs of the largest sizes, whose beginning becomes the result:
  // only the first dimension of an output may be such a size.
  std::string_view sizes_text = "";
  // Shapes that inputs must have, "weight = x[axis:]" (shape.h). Absent inputs are not checked.
  std::string_view input_shapes_text = "";
  // Outputs that may overwrite an input of the same shape and type, "y = x".
  std::string_view in_place_text = "";
  // Allowed values of str attributes, "approximate = none | tanh".
  std::string_view choices_text = "";
  // Allowed values of numbers: "dim of x" is a dimension of x, counted from the end if it is
  // negative; "offset in 0 | 1" is one of these; "eps > 0" is finite and more than 0. Such bounds
  // (>=, >, <=, <) are literals of the attribute's kind. One from below and one from above may
  // stand together: "p >= 0; p < 0.5".
  std::string_view limits_text = "";
  // Derivative formulas, "x = relu_backward(grad, y)", as in torch's derivatives.yaml: Python over
  // the op's inputs, outputs, attributes and `grad` (`grad_<output>` if there are several outputs).
  // A formula with several results, "x, weight, _ = f(grad)" (`_`: not wanted), is evaluated once.
  // The formulas after it may use the results: "residual = grad_x". An input without a formula has
  // derivative zero. An op without formulas cannot be differentiated.
  std::string_view gradient_text = "";
  // Under torch.autocast, "keep" runs in the dtype given, "widest" promotes mixed float inputs, and
  // "lower" converts float inputs to autocast's dtype, as torch does for products.
  std::string_view autocast_text = "keep";
  // The inputs have one shape or, if `shapes` says broadcast(...), broadcast to the shape of the
  // outputs. The order of the elements in memory does not matter.
  bool is_elementwise = false;
  // The launcher reads rows, which may be at any distance from each other. "axis:" means that a row
  // is x[axis:]; "dim" or "-1" means that a row lies along that dimension. The dimensions before it
  // collapse to one stride, and the others are contiguous. If rows lie along a dimension that is
  // not the last, all of x is contiguous. This holds for inputs with as many dimensions as the
  // first. Other inputs, and all inputs of an op without `rows`, are contiguous.
  std::string_view rows_text = "";
  // Inputs that lie in host memory on every device, "lengths = host", because the launcher itself
  // reads them; outputs that it does not write where their data is null, "sum = optional".
  std::string_view memory_text = "";

  // The library's domain, which is known when the library is loaded.
  std::string_view domain = "custom_domain";
  // The op's functions, as kernels/abi.h describes them.
  twinop_launch cpu_launch = nullptr;
  twinop_launch cuda_launch = nullptr;
  Launcher count_launch = nullptr;  // of this compiler; the others call it (registry.h)
  bool two_pass = false;            // twinop_op.two_pass
  decltype(twinop_op::scratch_size) scratch_size = nullptr;
  decltype(twinop_op::create) create_state = nullptr;
  decltype(twinop_op::destroy) destroy_state = nullptr;
  decltype(twinop_op::body) body_model = nullptr;
  int body_pieces = 0;  // twinop_op.row_body

  // The parsed texts, for the use of every call. Inputs are indices, or Schema::kNotFound.
  std::int8_t same_shape_inputs[kMaxOutputs] = {};  // whose shape the output has
  std::int8_t in_place_inputs[kMaxOutputs] = {};    // that the output may overwrite
  std::string_view input_shape_texts[kMaxArguments] = {};
  SizeNames sizes_counted;
  std::string_view bound_texts[kMaxSizes] = {};
  std::int8_t bound_trees[kMaxSizes] = {};  // -1: without a bound
  ShapeTrees shape_trees;
  std::int8_t output_trees[kMaxOutputs] = {};
  std::int8_t input_trees[kMaxArguments] = {};  // -1: any shape
  RowDimension row_dimension;
  Limit limit_table[kMaxArguments] = {};  // by attribute
  bool broadcasts = false;
  bool host_inputs[kMaxArguments] = {};
  bool optional_outputs[kMaxOutputs] = {};
  std::uint8_t combination_count = 0;
  DType input_types[kMaxCombinations][kMaxArguments] = {};
  DType output_types[kMaxCombinations][kMaxOutputs] = {};

  constexpr explicit Record(std::string_view schema_text) : schema(ParseSchema(schema_text)) {
    ReadTexts();
  }

  constexpr Record dtypes(std::string_view text) const { return With(&Record::dtypes_text, text); }
  constexpr Record shapes(std::string_view text) const { return With(&Record::shapes_text, text); }
  constexpr Record sizes(std::string_view text) const { return With(&Record::sizes_text, text); }
  constexpr Record input_shapes(std::string_view text) const {
    return With(&Record::input_shapes_text, text);
  }
  constexpr Record limits(std::string_view text) const { return With(&Record::limits_text, text); }
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
  constexpr Record rows(std::string_view text) const { return With(&Record::rows_text, text); }
  constexpr Record memory(std::string_view text) const { return With(&Record::memory_text, text); }
  constexpr Record elementwise() const { return With(&Record::is_elementwise, true); }
  constexpr Record cpu(twinop_launch launch) const { return With(&Record::cpu_launch, launch); }
  constexpr Record cuda(twinop_launch launch) const { return With(&Record::cuda_launch, launch); }
  // The launcher needs kBytes bytes of scratch memory, or kBytes(call), a number that depends on
  // the shapes of the inputs, the attributes and the addresses only. The function takes the call as
  // a launcher does.
  template <auto kBytes>
  constexpr Record scratch() const {
    Record copy = *this;
    copy.scratch_size = [](const twinop_call* call, std::int64_t* bytes, twinop_error* error) {
      return AtBoundary(error, [=] {
        if constexpr (std::is_integral_v<decltype(kBytes)>)
          *bytes = static_cast<std::int64_t>(kBytes);
        else
          *bytes = Invoke(kBytes, FromC(call));
        return Status();
      });
    };
    return copy;
  }
  // The launcher runs after kCount(call), a function of the call as a launcher, which writes the
  // sizes of `sizes` to call.counts. Both get the same scratch memory. Both compilers compile it.
  template <auto kCount>
  constexpr Record count() const {
    Record copy = With(&Record::two_pass, true);
    copy.count_launch = [](const twinop_call* call) { return Invoke(kCount, FromC(call)); };
    return copy;
  }
  // On the CPU of ONNX Runtime the op runs its function body, which the model that
  //   std::string_view kBody(const Call& call)
  // returns has (twinop_op.body in kernels/abi.h). The text lives as long as the library.
  template <auto kBody>
  constexpr Record body() const {
    Record copy = *this;
    copy.body_model = [](const twinop_call* call, const void** model, std::size_t* size,
                         twinop_error* error) {
      return AtBoundary(error, [=] {
        const std::string_view text = Invoke(kBody, FromC(call));
        *model = text.data();
        *size = text.size();
        return Status();
      });
    };
    return copy;
  }
  // On the CPU of ONNX Runtime the op runs the model that
  //   static Status kBody(const CallOf<Op>& call, const std::string** model)
  // returns, on pieces of the rows or of the batch (twinop_op.row_body in kernels/abi.h, 1 or 2).
  // The text lives as long as the library.
  template <auto kBody>
  constexpr Record row_body() const {
    return PiecewiseBody<kBody>(1);
  }
  template <auto kBody>
  constexpr Record batch_body() const {
    return PiecewiseBody<kBody>(2);
  }
  template <auto kBody>
  constexpr Record PiecewiseBody(int pieces) const {
    Record copy = With(&Record::body_pieces, pieces);
    copy.body_model = [](const twinop_call* call, const void** model, std::size_t* size,
                         twinop_error* error) {
      return AtBoundary(error, [=] {
        const std::string* text = nullptr;
        Status status = Invoke(kBody, FromC(call), &text);
        if (text != nullptr) {
          *model = text->data();
          *size = text->size();
        }
        return status;
      });
    };
    return copy;
  }
  // The op keeps a State for each kernel, which a launcher finds in call.state. It is made from the
  // attributes and the constant inputs by
  //   static Status State::Create(const CallOf<Op>& call, std::unique_ptr<State>* state)
  template <class State>
  constexpr Record state() const {
    Record copy = *this;
    copy.create_state = [](const twinop_call* call, void** state, twinop_error* error) {
      return AtBoundary(error, [=] {
        std::unique_ptr<State> made;
        Status status = Invoke(State::Create, FromC(call), &made);
        *state = made.release();
        return status;
      });
    };
    copy.destroy_state = [](void* state) { delete static_cast<State*>(state); };
    return copy;
  }

  constexpr std::size_t CombinationCount() const { return combination_count; }

  constexpr std::string_view ShapeText(std::size_t output) const {
    if (const int input = schema.WrittenInput(output); input >= 0)
      return schema.input(input).name.view();
    std::string_view text = Entry(shapes_text, schema.outputs[output].view());
    return text.empty() ? schema.input(0).name.view() : text;
  }

  // Index of the input that the output may overwrite, or Schema::kNotFound.
  constexpr int InPlaceInput(std::size_t output) const { return in_place_inputs[output]; }

  // Parses the texts. Throws const char* if one does not parse.
  constexpr void ReadTexts() {
    ReadDTypes();
    ReadShapes();
    for (std::size_t i = 0; i < schema.output_count; ++i) {
      std::string_view text = Entry(in_place_text, schema.outputs[i].view());
      in_place_inputs[i] =
          static_cast<std::int8_t>(text.empty() ? schema.WrittenInput(i) : schema.FindInput(text));
      optional_outputs[i] = Entry(memory_text, schema.outputs[i].view()) == "optional";
    }
    for (std::size_t i = 0; i < schema.input_count; ++i)
      host_inputs[i] = Entry(memory_text, schema.input(i).name.view()) == "host";
    ReadLimits();
    ReadRows();
  }

 private:
  // Calls a function of the call, which it takes as a Call or a CallOf<Op>.
  template <class Result, class AnyCall, class... More>
  static Result Invoke(Result (*function)(const AnyCall&, More...), const Call& call,
                       More... more) {
    static_assert(std::is_base_of_v<Call, AnyCall> && sizeof(AnyCall) == sizeof(Call));
    return function(static_cast<const AnyCall&>(call), more...);
  }

  template <class T>
  constexpr Record With(T Record::* member, T value) const {
    Record copy = *this;
    copy.*member = value;
    copy.ReadTexts();
    return copy;
  }

  // The element type of every tensor in every combination.
  constexpr void ReadDTypes() {
    combination_count = 0;
    Scanner scan(dtypes_text);
    do {
      if (combination_count == kMaxCombinations) throw "a record has too many dtype combinations";
      DType* inputs = input_types[combination_count];
      DType* outputs = output_types[combination_count++];
      const DType first = DTypeNamed(scan.Word());
      for (std::size_t i = 0; i < schema.input_count; ++i) inputs[i] = first;
      for (std::size_t i = 0; i < schema.output_count; ++i) outputs[i] = first;
      while (!scan.AtEnd() && scan.Peek() != ';') {
        std::string_view name = scan.Word();
        scan.Expect("=");
        const DType dtype = DTypeNamed(scan.Word());
        const int input = schema.FindInput(name);
        const int output = schema.FindOutput(name);
        if (input < 0 && output < 0) throw "a record's dtypes name no tensor of its op";
        (input >= 0 ? inputs[input] : outputs[output]) = dtype;
      }
      for (std::size_t i = schema.returned_count; i < schema.output_count; ++i)
        outputs[i] = inputs[schema.WrittenInput(i)];
    } while (scan.Accept(";"));
    if (!scan.AtEnd()) throw "a record's dtypes do not parse";
  }

  constexpr void ReadShapes() {
    shape_trees = ShapeTrees();
    ReadSizes();
    for (std::size_t i = 0; i < schema.output_count; ++i) {
      output_trees[i] = ShapeParser(ShapeText(i), schema, -1, &shape_trees, sizes_counted).Parse();
      const ShapeNode& root = shape_trees[output_trees[i]];
      same_shape_inputs[i] = root.operation == ShapeNode::kInput ? root.index : std::int8_t{-1};
    }
    for (std::size_t i = 0; i < schema.input_count; ++i) {
      const std::string_view text = Entry(input_shapes_text, schema.input(i).name.view());
      const int own = static_cast<int>(i);
      input_shape_texts[i] = text;
      input_trees[i] =
          text.empty() ? std::int8_t{-1} : ShapeParser(text, schema, own, &shape_trees).Parse();
    }
    broadcasts = is_elementwise && shape_trees[output_trees[0]].operation == ShapeNode::kBroadcast;
  }

  // "n <= x[0]; m"
  constexpr void ReadSizes() {
    sizes_counted = SizeNames();
    Scanner scan(sizes_text);
    while (!scan.AtEnd()) {
      const std::size_t i = sizes_counted.count;
      if (i == kMaxSizes) throw "a record has too many sizes";
      const std::string_view name = scan.Word();
      if (schema.FindInput(name) >= 0 || schema.FindAttribute(name) >= 0 ||
          schema.FindOutput(name) >= 0 || sizes_counted.Find(name) >= 0)
        throw "a record's size has the name of an argument, an output or another size";
      const bool bounded = scan.Accept("<=");
      bound_texts[i] = bounded ? scan.Until(";") : std::string_view();
      bound_trees[i] = bounded ? ShapeParser(bound_texts[i], schema, -1, &shape_trees).ParseSize()
                               : std::int8_t{-1};
      sizes_counted.names[sizes_counted.count++] = name;
      if (!scan.AtEnd()) scan.Expect(";");
    }
  }

  constexpr void ReadRows() {
    row_dimension = RowDimension();
    Scanner scan(rows_text);
    if (scan.AtEnd()) return;
    row_dimension.given = true;
    if (scan.Peek() == '-' || Scanner::IsDigit(scan.Peek())) {
      row_dimension.value = scan.Integer();
    } else {
      const int attribute = schema.FindAttribute(scan.Word());
      if (attribute < 0 || schema.attribute(attribute).kind != Kind::kInt)
        throw "a record's rows name no int attribute of its op";
      row_dimension.attribute = static_cast<std::int8_t>(attribute);
    }
    row_dimension.to_the_end = scan.Accept(":");
    if (!scan.AtEnd()) throw "a record's rows are \"dim\", \"axis:\" or \"-1\"";
  }

  constexpr void ReadLimits() {
    for (std::size_t i = 0; i < schema.attribute_count; ++i) {
      limit_table[i] = Limit();
      limit_table[i].choices = Entry(choices_text, schema.attribute(i).name.view());
      if (!limit_table[i].choices.empty()) limit_table[i].kind = Limit::Kind::kOneOf;
    }
    Scanner scan(limits_text);
    while (!scan.AtEnd()) {
      const int attribute = schema.FindAttribute(scan.Word());
      if (attribute < 0) throw "a record's limits name no attribute of its op";
      const Kind kind = schema.attribute(attribute).kind;
      Limit limit = limit_table[attribute];
      const char sign = scan.Peek();
      const bool is_lower = sign == '>';
      const bool is_bound = is_lower || sign == '<';
      if (limit.kind != Limit::Kind::kNone && !(is_bound && limit.kind == Limit::Kind::kBounds &&
                                                (is_lower ? limit.lower : limit.upper).empty()))
        throw "a record's limits name an attribute twice";
      if (is_bound) {
        if (kind != Kind::kInt && kind != Kind::kFloat)
          throw "a limit >=, >, <= or < is for an int or a float";
        limit.kind = Limit::Kind::kBounds;
        scan.Expect(is_lower ? ">" : "<");
        (is_lower ? limit.above : limit.below) = !scan.Accept("=");
        std::string_view& bound = is_lower ? limit.lower : limit.upper;
        bound = scan.Until(";");
        if (!IsLiteral(kind, bound)) throw "a limit's number is no value of its attribute's kind";
      } else if (scan.Accept("of")) {
        limit.kind = Limit::Kind::kDimension;
        limit.input = static_cast<std::int8_t>(schema.FindInput(scan.Word()));
        if (kind != Kind::kInt || limit.input < 0)
          throw "a limit `a of x` is for an int and an input";
      } else {
        scan.Expect("in");
        if (kind != Kind::kInt) throw "a limit `in` is for an int; choices are for a str";
        limit.kind = Limit::Kind::kOneOf;
        limit.choices = scan.Until(";");
        Scanner choices(limit.choices);
        do choices.Integer();
        while (choices.Accept("|"));
        if (!choices.AtEnd()) throw "a limit `in` lists ints: 0 | 1";
      }
      limit_table[attribute] = limit;
      if (!scan.AtEnd()) scan.Expect(";");
    }
  }
};

}  // namespace twinop
