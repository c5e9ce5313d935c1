// The op record: the one description of an op. The torch registration, fakes, autograd, the ORT
// custom op, both exporters and the JSON in the library are derived from it.
//
// A record is texts and functions. The compiler parses the texts (parse.h), and the library's table
// has what they say as structures (kernels/abi.h). The JSON in its file has the texts (json.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "twinop/record/call.h"

namespace twinop {

struct Record {
  std::string_view schema_text;
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

  // The op's functions, as kernels/abi.h describes them.
  Launcher count_launch = nullptr;  // of this compiler; the others call it (registry.h)
  bool two_pass = false;            // twinop_op.two_pass
  decltype(twinop_op::scratch_size) scratch_size = nullptr;
  decltype(twinop_op::create) create_state = nullptr;
  decltype(twinop_op::destroy) destroy_state = nullptr;
  decltype(twinop_op::body) body_model = nullptr;
  int body_pieces = 0;  // twinop_op.row_body

  constexpr explicit Record(std::string_view schema) : schema_text(schema) {}

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
  //   std::string_view kBody(const CallOf<Op>& call)
  // returns has (twinop_op.body in kernels/abi.h). The text lives as long as the library.
  template <auto kBody>
  constexpr Record body(int pieces = 0) const {
    Record copy = With(&Record::body_pieces, pieces);
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
  // The model runs on pieces of the rows or of the batch (twinop_op.row_body, 1 or 2).
  template <auto kBody>
  constexpr Record row_body() const {
    return body<kBody>(1);
  }
  template <auto kBody>
  constexpr Record batch_body() const {
    return body<kBody>(2);
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
    return copy;
  }
};

}  // namespace twinop
