"""A mistake in an op gives one compiler error, which names the mistake."""

import re

from record_driver import read_by_compiler

ELEMENTWISE = """
#include "twinop/elementwise.h"
namespace twinop {
template <class T>
struct LeakyRelu {
  T slope;
  template <class Op>
  explicit LeakyRelu(const CallOf<Op>& call) : slope(AttributeOf<float>(call, "slope"_name)) {}
  TWINOP_INLINE T operator()(T x) const { return x < T(0) ? slope * x : x; }
};
TWINOP_ELEMENTWISE(leaky_relu, LeakyRelu, Record("leaky_relu(Tensor x, float slope=0.1) -> Tensor"))
}  // namespace twinop
"""
ROWWISE = """
#include "twinop/rowwise.h"
namespace twinop {
template <class T>
struct Normalize : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x");
  using Phases = rowwise::Reductions<rowwise::kSquares>;
  using One = rowwise::Values<T, 1>;
  using None = rowwise::Values<T, 0>;
  T scale = 0;
  TWINOP_INLINE One Term(rowwise::Phase<0>, One& x, const None&) const { return x; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) { scale = Rsqrt(total[0]); }
  TWINOP_INLINE One Result(const One& x, const None&) const { return {x[0] * scale}; }
};
TWINOP_ROWWISE(normalize, Normalize, Record("normalize(Tensor x) -> Tensor").rows("-1"))
}  // namespace twinop
"""
KERNEL = """
#include "twinop/kernel.h"
namespace twinop {
template <class Op>
Status LaunchNonzero(const CallOf<Op>& call) {
  auto* count = OutputData<std::int64_t>(call, "count"_name);
  auto* partial = Scratch<std::int64_t>(call);
  return Dispatch<float, Half>(InputOf(call, "x"_name).dtype, [&](auto tag) {
    const auto* x = InputData<typename decltype(tag)::Type>(call, "x"_name);
    *count = *partial = x != nullptr;
    return Status();
  });
}
TWINOP_OP(nonzero,
          Record("nonzero(Tensor x) -> Tensor count")
              .dtypes("float32 count=int64; float16 count=int64").shapes("count = []").scratch<8>(),
          LaunchNonzero)
}  // namespace twinop
"""
TWO_SUMS = (
    ("One Term(rowwise::Phase<0>, One& x, const None&) const { return x; }",
     "rowwise::Values<T, 2> Term(rowwise::Phase<0>, One& x, const None&) const { return {x[0], x[0]}; }"),
    ("const One& total", "const rowwise::Values<T, 2>& total"),
)  # fmt: skip
OWN, MINE = (("template <class T>", f"float {f}(float x); double {f}(double x);\ntemplate <class T>")
             for f in ("Own", "Mine"))  # fmt: skip
MISTAKES = [
    # On CUDA, the T of 16-bit types is no float: a build for the CPU refuses what CUDA cannot compile.
    (ELEMENTWISE, [OWN, ("slope * x", "Own(slope * x)")], "'Own(twinop::ApproxFloat)'"),
    (ROWWISE, [MINE, ("Rsqrt(total[0])", "Mine(total[0])")], "'Mine(const twinop::ApproxFloat&)'"),
    (ELEMENTWISE, [('"slope"_name', '"slop"_name')], "the op's schema has no attribute of this name"),
    (ELEMENTWISE, [("AttributeOf<float>", "AttributeOf<bool>")], "declares this attribute with another kind"),
    (ELEMENTWISE, [("AttributeOf<float>", "AttributeOf<double>")], "an attribute is a std::int64_t (int)"),
    (ELEMENTWISE, [("Tensor x, float", "Tensor x, Tensor z, float")], "takes another number of values than"),
    (ELEMENTWISE, [("Tensor x, float", "Tensor? x=None, float")], "tensor, so none is a Tensor?"),
    (ELEMENTWISE, [("-> Tensor", "-> (Tensor y, Tensor z)")], "returns another number of values than"),
    (ELEMENTWISE, [("T operator()(T x) const", "T apply(T x) const")], "`T operator()(T, ...) const`"),
    (ELEMENTWISE, [("ELEMENTWISE(leaky_relu", "ELEMENTWISE(leaky")], "the schema has another name than the"),
    (ROWWISE, [('Names("x")', 'Names("z")')], "kRows names an input that the schema does not have"),
    (ROWWISE, [("Tensor x)", "Tensor? x=None)")], "rows are read in each call, so none is a Tensor?"),
    (ROWWISE, [("-> Tensor", "-> (Tensor y, Tensor z)")], "are the number of the schema's outputs"),
    (ROWWISE, [('.rows("-1")', "")], "the record of a row-wise op has .rows(...)"),
    (ROWWISE, [(" Term(", " Terms(")], "each phase has `Values<T, N> Term(Phase<i>, "),
    (ROWWISE, [(" Result(", " Results(")], "Result(const Values<T, rows>&, const Values<T, columns>&)"),
    (KERNEL, [('Data<std::int64_t>(call, "count"', 'Data<std::int32_t>(call, "count"')], "for the output"),
    (KERNEL, [("Dispatch<float, Half>", "Dispatch<float, double>")], "do not have this type for the input"),
    (KERNEL, [("Dispatch<float, Half>", "Dispatch<float, char*>")], "Dispatch lists element types: float"),
    (KERNEL, [('(call, "count"_name)', '(call, "y"_name)')], "the op's schema has no output of this name"),
    (KERNEL, [(".scratch<8>()", "")], "the op's record says no scratch<...>(), so the call has no scratch"),
    (KERNEL, [("LaunchNonzero)\n}", "Tag<int>)\n}")], "a launcher is `template <class Op> Status Launch("),
    (ELEMENTWISE, [('-> Tensor")', '-> Tensor").dtypes("float32 y=int32")')], "may have these but float64, "),
    (ROWWISE, [('.rows("-1")', '.rows("-1").dtypes("float32 y=int8")')], "results of a row-wise op have one"),
    (ROWWISE, TWO_SUMS, "a functor without column inputs sums one term in each phase"),
]


NAMES = re.compile(r"\b(leaky_relu|LeakyRelu|normalize|Normalize|nonzero|LaunchNonzero)\b")


def test_each_mistake_is_one_error_in_words() -> None:
    """In one text, as each compiler takes a second to begin; the ops without a mistake are in it, too."""
    sources = [ELEMENTWISE, ROWWISE, KERNEL]
    for source, changes, _ in MISTAKES:
        for right, wrong in changes:
            assert right in source
            source = source.replace(right, wrong)
        sources.append(source)
    ops = [NAMES.sub(rf"\g<1>{i}", source) for i, source in enumerate(sources)]
    errors = [line for line in read_by_compiler("".join(ops)).stderr.splitlines() if "error:" in line]
    found = [sum(message in error for error in errors) for *_, message in MISTAKES]
    assert found == [1] * len(MISTAKES) == [1] * len(errors), "\n".join(errors)
