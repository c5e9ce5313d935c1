// A product with cuBLASLt: y = activation(x W + bias + residual).
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "twinop/ops/linear/buffers.h"
#include "twinop/ops/linear/cublaslt.h"
#include "twinop/primitives/launch.cuh"

namespace twinop::linear {

inline Status LtResult(const CublasLt& lt, LtStatus status, const char* what) {
  if (status == 0) return {};
  return Status::Error(std::string("cuBLASLt: ") + what + " failed: " + lt.StatusName(status));
}
#define TWINOP_RETURN_IF_LT_ERROR(lt, call) TWINOP_RETURN_IF_ERROR(LtResult(lt, (lt).call, #call))

// A descriptor of cuBLASLt that is destroyed at the end of its scope.
template <class Description>
struct Owned {
  LtStatus (*destroy)(Description);
  Description value = nullptr;

  explicit Owned(LtStatus (*destroy)(Description)) : destroy(destroy) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (value != nullptr) destroy(value);
  }
};

// What an algorithm is chosen for. Row-major matrices are transposed column-major ones, so cuBLASLt
// computes y^T = W^T x^T: W is its A, and x its B.
struct GemmKey {
  Sizes sizes;
  DType operands, result;
  bool is_scaled;  // by a scale for each row of x and of W
  bool has_c;      // y = A B + C
  std::uint32_t epilogue;

  auto Key() const {
    return std::make_tuple(sizes.m, sizes.n, sizes.k, sizes.is_kn, operands, result, is_scaled,
                           has_c, epilogue);
  }
};

// An algorithm, and the layouts of its matrices.
struct Plan {
  explicit Plan(const CublasLt& lt)
      : weight(lt.LayoutDestroy), x(lt.LayoutDestroy), y(lt.LayoutDestroy) {}

  bool found = false;
  LtHeuristicResult heuristic{};
  Owned<LtLayout> weight, x, y;
};

inline LtType LtTypeOf(DType dtype) {
  return dtype == DType::kFloat64      ? kLtFloat64
         : dtype == DType::kFloat16    ? kLtFloat16
         : dtype == DType::kBFloat16   ? kLtBFloat16
         : dtype == DType::kFloat8E4M3 ? kLtFloat8E4M3
                                       : kLtFloat32;
}

// TWINOP_TF32=1 lets products in fp32 round their operands to TF32.
inline LtCompute ComputeOf(DType dtype) {
  static const bool tf32 = [] {
    const char* const value = std::getenv("TWINOP_TF32");
    return value != nullptr && std::string_view(value) == "1";
  }();
  if (dtype == DType::kFloat64) return kLtCompute64;
  return dtype == DType::kFloat32 && tf32 ? kLtComputeTf32 : kLtCompute32;
}

inline Status Describe(const CublasLt& lt, const GemmKey& key, const GemmBuffers& at,
                       Owned<LtProduct>* product) {
  const LtType scale = key.result == DType::kFloat64 ? kLtFloat64 : kLtFloat32;
  TWINOP_RETURN_IF_LT_ERROR(lt, ProductCreate(&product->value, ComputeOf(key.operands), scale));
  const auto set = [&](LtProductAttribute attribute, auto value) {
    return LtResult(lt, lt.ProductSet(product->value, attribute, &value, sizeof(value)),
                    "an attribute");
  };
  TWINOP_RETURN_IF_ERROR(set(kLtTransposeA, std::int32_t{key.sizes.is_kn ? 0 : 1}));
  TWINOP_RETURN_IF_ERROR(set(kLtEpilogue, key.epilogue));
  if ((key.epilogue & kLtBias) != 0) TWINOP_RETURN_IF_ERROR(set(kLtBiasPointer, at.bias.data));
  if (key.operands != DType::kFloat8E4M3) return {};
  // Its error in fp16 is 5.8e-4 instead of 2.4e-4; that of the operands' rounding is 3.7e-2.
  TWINOP_RETURN_IF_ERROR(set(kLtFastAccumulation, std::int8_t{1}));
  if (!key.is_scaled) return {};
  TWINOP_RETURN_IF_ERROR(set(kLtBiasType, std::int32_t{LtTypeOf(key.result)}));
  TWINOP_RETURN_IF_ERROR(set(kLtScaleModeA, kLtOuterVector));
  TWINOP_RETURN_IF_ERROR(set(kLtScaleModeB, kLtOuterVector));
  TWINOP_RETURN_IF_ERROR(set(kLtScalePointerA, at.weight_scale.data));
  return set(kLtScalePointerB, at.x_scale.data);
}

// The plans of one device. A plan is made when its key first occurs.
class Plans {
 public:
  static constexpr std::size_t kMaxPlans = 2048;

  Status Find(const CublasLt& lt, const GemmKey& key, LtProduct product, LtHandle* handle,
              std::shared_ptr<const Plan>* plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (handle_ == nullptr) TWINOP_RETURN_IF_LT_ERROR(lt, Create(&handle_));
    *handle = handle_;
    const auto known = plans_.find(key.Key());
    if (known != plans_.end()) {
      *plan = known->second;
      return {};
    }
    auto fresh = std::make_shared<Plan>(lt);
    TWINOP_RETURN_IF_ERROR(Choose(lt, key, product, fresh.get()));
    if (plans_.size() >= kMaxPlans) plans_.clear();
    *plan = plans_[key.Key()] = std::move(fresh);
    return {};
  }

 private:
  // Makes the layout of a column-major matrix.
  static Status Layout(const CublasLt& lt, DType dtype, std::int64_t rows, std::int64_t columns,
                       Owned<LtLayout>* layout) {
    TWINOP_RETURN_IF_LT_ERROR(
        lt, LayoutCreate(&layout->value, LtTypeOf(dtype), static_cast<std::uint64_t>(rows),
                         static_cast<std::uint64_t>(columns), rows));
    return {};
  }

  Status Choose(const CublasLt& lt, const GemmKey& key, LtProduct product, Plan* plan) const {
    const auto [m, n, k, is_kn] = key.sizes;
    TWINOP_RETURN_IF_ERROR(Layout(lt, key.operands, is_kn ? n : k, is_kn ? k : n, &plan->weight));
    TWINOP_RETURN_IF_ERROR(Layout(lt, key.operands, k, m, &plan->x));
    TWINOP_RETURN_IF_ERROR(Layout(lt, key.result, n, m, &plan->y));
    Owned<LtPreference> preference(lt.PreferenceDestroy);
    TWINOP_RETURN_IF_LT_ERROR(lt, PreferenceCreate(&preference.value));
    const auto set = [&](int attribute, auto value) {
      return LtResult(lt, lt.PreferenceSet(preference.value, attribute, &value, sizeof(value)),
                      "a preference");
    };
    TWINOP_RETURN_IF_ERROR(set(kLtWorkspaceBytes, static_cast<std::uint64_t>(kWorkspaceBytes)));
    TWINOP_RETURN_IF_ERROR(set(kLtReductions, kLtWideReductions));
    for (int i = 0; i < kLtOperands; ++i)
      TWINOP_RETURN_IF_ERROR(set(kLtAlignments + i, static_cast<std::uint32_t>(kAlignment)));
    int count = 0;
    const LtStatus status =
        lt.Heuristic(handle_, product, plan->weight.value, plan->x.value, plan->y.value,
                     plan->y.value, preference.value, 1, &plan->heuristic, &count);
    plan->found = status == 0 && count > 0 && plan->heuristic.status == 0;
    return {};
  }

  std::mutex mutex_;
  LtHandle handle_ = nullptr;
  std::map<decltype(std::declval<GemmKey>().Key()), std::shared_ptr<const Plan>> plans_;
};

inline Plans& PlansOf(int device) {
  static auto& plans = *new std::map<int, Plans>;  // never deleted, like the CUDA context
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  return plans[device];
}

// y = activation(x W + c + bias), with the activation and the bias that `epilogue` has; `c` may be
// y or null. Sets `*done` to false, and does nothing, if cuBLASLt has no algorithm for this.
inline Status Multiply(const Call& call, const GemmBuffers& at, const Sizes& sizes, DType result,
                       const void* c, void* y, std::uint32_t epilogue, bool* done) {
  const CublasLt* found = nullptr;
  TWINOP_RETURN_IF_ERROR(GetCublasLt(&found));
  const CublasLt& lt = *found;
  const GemmKey key{sizes, at.operands, result, at.x_scale.data != nullptr, c != nullptr, epilogue};
  Owned<LtProduct> product(lt.ProductDestroy);
  TWINOP_RETURN_IF_ERROR(Describe(lt, key, at, &product));
  LtHandle handle = nullptr;
  std::shared_ptr<const Plan> plan;
  TWINOP_RETURN_IF_ERROR(
      PlansOf(call.context->device_index).Find(lt, key, product.value, &handle, &plan));
  *done = plan->found;
  if (!plan->found) return {};
  static constexpr double kScales64[] = {0, 1};
  static constexpr float kScales32[] = {0, 1};
  const auto scale = [result](bool one) {
    return result == DType::kFloat64 ? static_cast<const void*>(&kScales64[one]) : &kScales32[one];
  };
  const LtHeuristicResult& chosen = plan->heuristic;
  return LtResult(lt,
                  lt.Multiply(handle, product.value, scale(true), at.weight.data,
                              plan->weight.value, at.x.data, plan->x.value, scale(key.has_c),
                              key.has_c ? c : y, plan->y.value, y, plan->y.value, &chosen.algorithm,
                              at.workspace, chosen.workspace_bytes, call.context->stream),
                  "the product");
}

}  // namespace twinop::linear
