// Test ops for what no op of twinop's uses: state, an input in host memory, integer and bool
// tensors, and eight outputs. They form a library with a domain of its own.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "for_each.h"

namespace twinop {

// ------------------------------------------------------------------------------ state

struct PackWeight {
  const float* weight;
  float* values;
  float n;
  TWINOP_INLINE void operator()(std::int64_t i) const { values[i] = n * weight[i]; }
};

// The C++ compiler makes the state. What it does with CUDA is a function that nvcc compiles;
// `used`, because nothing in that file calls it.
#if defined(__CUDACC__)
[[gnu::used]] inline Status PackOnCuda(const twinop_call* c_call, const float* weight,
                                       std::int64_t count, float n, float** values) {
  return OnDevice(FromC(c_call), [&](const Call& call) -> Status {
    TWINOP_RETURN_IF_ERROR(
        CudaStatus(cudaMalloc(values, static_cast<std::size_t>(count) * sizeof(float)), "malloc"));
    TWINOP_RETURN_IF_ERROR(ForEach(call, count, PackWeight{weight, *values, n}));
    return CudaStatus(cudaStreamSynchronize(nullptr), "packing");
  });
}
[[gnu::used]] inline void FreeOnCuda(float* values) { cudaFree(values); }
#elif defined(TWINOP_WITH_CUDA)
Status PackOnCuda(const twinop_call*, const float*, std::int64_t, float, float**);
void FreeOnCuda(float*);
#else
inline Status PackOnCuda(const twinop_call*, const float*, std::int64_t, float, float**) {
  return Status::Error("built without CUDA");
}
inline void FreeOnCuda(float*) {}
#endif

// n * weight, made with the state where weight is constant.
template <class Op>
struct PackedWeight {
  std::vector<float> on_cpu;
  float* on_cuda = nullptr;

  PackedWeight() = default;
  PackedWeight(const PackedWeight&) = delete;
  PackedWeight& operator=(const PackedWeight&) = delete;
  ~PackedWeight() {
    if (on_cuda != nullptr) FreeOnCuda(on_cuda);
  }
  const float* values() const { return on_cpu.empty() ? on_cuda : on_cpu.data(); }

  static Status Create(const CallOf<Op>& call, std::unique_ptr<PackedWeight>* state) {
    const auto n = AttributeOf<std::int64_t>(call, "n"_name);
    if (n == 13) return Status::Error("n is 13, and no weight is packed 13 times");
    *state = std::make_unique<PackedWeight>();
    const Tensor& weight = InputOf(call, "weight"_name);
    if (!weight.present || weight.numel == 0) return {};
    const auto* data = weight.as<const float>();
    if (call.context->device_type == TWINOP_CUDA)
      return PackOnCuda(&call, data, weight.numel, static_cast<float>(n), &(*state)->on_cuda);
    (*state)->on_cpu.resize(static_cast<std::size_t>(weight.numel));
    const PackWeight pack{data, (*state)->on_cpu.data(), static_cast<float>(n)};
    for (std::int64_t i = 0; i < weight.numel; ++i) pack(i);
    return {};
  }
};

// y = x * (n * weight), and whether n * weight was made with the state.
struct MultiplyPacked {
  const float *x, *weight, *packed;
  float* y;
  std::int64_t* was_packed;
  std::int64_t columns, count;
  float n;

  TWINOP_INLINE void operator()(std::int64_t i) const {
    const std::int64_t j = i % columns;
    if (i < count) y[i] = x[i] * (packed != nullptr ? packed[j] : n * weight[j]);
    if (i == 0) *was_packed = packed != nullptr ? 1 : 0;
  }
};

template <class Op>
Status LaunchPacked(const CallOf<Op>& call) {
  const MultiplyPacked multiply{InputData<float>(call, "x"_name),
                                InputData<float>(call, "weight"_name),
                                static_cast<const PackedWeight<Op>*>(call.state)->values(),
                                OutputData<float>(call, "y"_name),
                                OutputData<std::int64_t>(call, "was_packed"_name),
                                std::max<std::int64_t>(InputOf(call, "weight"_name).numel, 1),
                                OutputOf(call, "y"_name).numel,
                                static_cast<float>(AttributeOf<std::int64_t>(call, "n"_name))};
  return ForEach(call, std::max<std::int64_t>(multiply.count, 1), multiply);
}

// ------------------------------------------------------------------------------ host memory

struct ScaleBy {
  const float* x;
  float* y;
  float factor;
  TWINOP_INLINE void operator()(std::int64_t i) const { y[i] = factor * x[i]; }
};

// y = x * sum(factors), which are read on the host on either device.
template <class Op>
Status LaunchScaleBy(const CallOf<Op>& call) {
  const Tensor& factors = InputOf(call, "factors"_name);
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < factors.numel; ++i) sum += factors.as<const std::int64_t>()[i];
  return ForEach(call, OutputOf(call, "y"_name).numel,
                 ScaleBy{InputData<float>(call, "x"_name), OutputData<float>(call, "y"_name),
                         static_cast<float>(sum)});
}

// ------------------------------------------------------------------------------ outputs

struct Spread {
  const std::int8_t* x;
  std::int8_t* outputs[8];
  TWINOP_INLINE void operator()(std::int64_t i) const {
    for (int k = 0; k < 8; ++k) outputs[k][i] = static_cast<std::int8_t>(x[i] + k);
  }
};

// Eight outputs: x + 0 to x + 7, in int8.
inline Status LaunchSpread(const Call& call) {
  Spread spread{call.inputs[0].as<const std::int8_t>(), {}};
  for (int k = 0; k < 8; ++k) spread.outputs[k] = call.outputs[k].as<std::int8_t>();
  return ForEach(call, call.inputs[0].numel, spread);
}

// ------------------------------------------------------------------------------ integers and bools

template <class T, class I>
struct Take {
  const T* x;
  const I* index;
  const bool* keep;
  T* y;
  bool* valid;
  std::int64_t size;

  TWINOP_INLINE void operator()(std::int64_t i) const {
    valid[i] = keep[i] && index[i] >= 0 && index[i] < size;
    y[i] = valid[i] ? x[index[i]] : T{};
  }
};

// y = x[index] and true, where `keep` says so and the index exists; else 0 and false.
template <class Op>
Status LaunchTake(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& index = InputOf(call, "index"_name);
  return Dispatch<float, Half, bool, std::int8_t, std::int32_t, std::int64_t>(
      x.dtype, [&](auto x_tag) {
        return Dispatch<std::int64_t, std::int32_t>(index.dtype, [&](auto index_tag) {
          using T = typename decltype(x_tag)::Type;
          using I = typename decltype(index_tag)::Type;
          return ForEach(
              call, index.numel,
              Take<T, I>{InputData<T>(call, "x"_name), InputData<I>(call, "index"_name),
                         InputData<bool>(call, "keep"_name), OutputData<T>(call, "y"_name),
                         OutputData<bool>(call, "valid"_name), x.numel});
        });
      });
}

// clang-format off
TWINOP_OP(packed,
          Record("packed(Tensor x, Tensor weight, int n=1) -> (Tensor y, Tensor was_packed)")
              .dtypes("float32 was_packed=int64")
              .shapes("y = x; was_packed = [1]")
              .state<PackedWeight<Op>>(),
          LaunchPacked)

TWINOP_OP(scale_by,
          Record("scale_by(Tensor x, Tensor factors) -> Tensor")
              .dtypes("float32 factors=int64")
              .shapes("y = x")
              .memory("factors = host"),
          LaunchScaleBy)

TWINOP_OP(spread,
          Record("spread(Tensor x) -> (Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, "
                 "Tensor g, Tensor h)")
              .dtypes("int8")
              .shapes("a = x; b = x; c = x; d = x; e = x; f = x; g = x; h = x"),
          LaunchSpread)

TWINOP_OP(take,
          Record("take(Tensor x, Tensor index, Tensor keep) -> (Tensor y, Tensor valid)")
              .dtypes("float32 index=int64 keep=bool valid=bool; float32 index=int32 keep=bool valid=bool; "
                      "float16 index=int64 keep=bool valid=bool; float16 index=int32 keep=bool valid=bool; "
                      "int8 index=int64 keep=bool valid=bool; int8 index=int32 keep=bool valid=bool; "
                      "int32 index=int64 keep=bool valid=bool; int32 keep=bool valid=bool; "
                      "int64 keep=bool valid=bool; int64 index=int32 keep=bool valid=bool; "
                      "bool index=int64; bool index=int32")
              .shapes("y = index; valid = index")
              .input_shapes("x = [numel(x)]; keep = index"),
          LaunchTake)
// clang-format on

}  // namespace twinop
