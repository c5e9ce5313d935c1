// Right ops that need care of their tests: sizes from the data, ties, integers, a string that a
// body compares.
#pragma once
#include <cstring>
#include <string_view>
#include <type_traits>

#include "twinop/kernel.h"

namespace twinop {

// The rows whose score is above a bound.
template <class Op>
Status LaunchKeepAbove(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const float* score = InputData<float>(call, "score"_name);
  const std::int64_t rows = x.sizes[0], width = rows ? x.numel / rows : 0;
  return Dispatch<float, double>(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T* from = InputData<T>(call, "x"_name);
    T* to = OutputData<T>(call, "y"_name);
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      if (score[i] <= AttributeOf<float>(call, "bound"_name)) continue;
      std::memcpy(to + count++ * width, from + i * width, width * sizeof(T));
    }
    call.counts[0] = count;
    return Status();
  });
}

TWINOP_CPU_OP(keep_above,
              Record("keep_above(Tensor x, Tensor score, float bound=0.5) -> Tensor y")
                  .dtypes("float32; float64 score=float32")
                  .input_shapes("score = [x[0]]")
                  .sizes("n <= x[0]")
                  .shapes("y = [n] + x[1:]")
                  .gradient("x = torch.zeros_like(x).masked_scatter((score > bound).view(-1, "
                            "*[1] * (x.ndim - 1)).expand_as(x), grad)"),
              LaunchKeepAbove)

// The largest element of each row, and where it is: the first one of equal ones.
template <class Op>
Status LaunchRowMax(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const std::int64_t width = x.sizes[x.rank - 1];
  if (width == 0) return Status::Error("rows without elements have no largest one");
  std::int64_t* index = OutputData<std::int64_t>(call, "index"_name);
  return Dispatch<float, std::int32_t>(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T* row = InputData<T>(call, "x"_name);
    for (std::int64_t r = 0; r < x.numel / width; ++r, row += width) {
      index[r] = 0;
      for (std::int64_t i = 1; i < width; ++i)
        if (row[i] > row[index[r]]) index[r] = i;
      OutputData<T>(call, "y"_name)[r] = row[index[r]];
    }
    return Status();
  });
}

TWINOP_CPU_OP(row_max,
              Record("row_max(Tensor x) -> (Tensor y, Tensor index)")
                  .dtypes("float32 index=int64; int32 index=int64")
                  .shapes("y = x[:-1]; index = x[:-1]")
                  .gradient("x = torch.zeros_like(x).scatter(-1, index.unsqueeze(-1), "
                            "grad_y.unsqueeze(-1))"),
              LaunchRowMax)

// Whether x is more than w; a w that is absent is `least`. And the same id.
template <class Op>
Status LaunchIsMore(const CallOf<Op>& call) {
  const std::int32_t* x = InputData<std::int32_t>(call, "x"_name);
  const Tensor& w = InputOf(call, "w"_name);
  for (std::int64_t i = 0; i < InputOf(call, "x"_name).numel; ++i) {
    OutputData<bool>(call, "y"_name)[i] =
        x[i] >
        (w.present ? w.as<const std::int32_t>()[i] : AttributeOf<std::int64_t>(call, "least"_name));
    OutputData<std::uint64_t>(call, "z"_name)[i] = InputData<std::uint64_t>(call, "id"_name)[i];
  }
  return Status();
}

TWINOP_CPU_OP(is_more,
              Record("is_more(Tensor x, Tensor? w, Tensor id, int least) -> (Tensor y, Tensor z)")
                  .dtypes("int32 id=uint64 y=bool z=uint64")
                  .input_shapes("w = x; id = x"),
              LaunchIsMore)

// x, or its negative.
template <class Op>
Status LaunchSigned(const CallOf<Op>& call) {
  const bool negative = AttributeOf<std::string_view>(call, "sign"_name) == "minus";
  const float* from = InputData<float>(call, "x"_name);
  for (std::int64_t i = 0; i < InputOf(call, "x"_name).numel; ++i)
    OutputData<float>(call, "y"_name)[i] = negative ? -from[i] : from[i];
  return Status();
}

TWINOP_CPU_OP(with_sign,
              Record("with_sign(Tensor x, str sign=\"plus\") -> Tensor")
                  .dtypes("float32")
                  .choices("sign = plus | minus")
                  .gradient("x = grad * int(x.sum() > 0)"),
              LaunchSigned)

}  // namespace twinop
