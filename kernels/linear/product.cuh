// A product with cuBLASLt: y = activation(x W + bias + residual).
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "twinop/linear/cublaslt.h"
#include "twinop/linear/operands.h"
#include "twinop/primitives/launch.cuh"

namespace twinop::linear {

inline Status LtResult(const CublasLt& lt, LtStatus status, const char* what) {
  if (status == 0) return {};
  return Status::Error(std::string("cuBLASLt: ") + what + " failed: " + lt.StatusName(status));
}
#define TWINOP_RETURN_IF_LT_ERROR(lt, call) TWINOP_RETURN_IF_ERROR(LtResult(lt, (lt).call, #call))

// A description of cuBLASLt's, which is destroyed with the scope.
template <class Description>
struct Owned {
  LtStatus (*destroy)(Description);
  Description value = nullptr;

  ~Owned() {
    if (value != nullptr) destroy(value);
  }
};

// What decides the algorithm. Row-major matrices are column-major ones transposed, so cuBLASLt
// computes y^T = W^T x^T: W is its A, and x its B.
struct Shape3 {
  Sizes sizes;
  DType dtype;
  bool adds;  // to the product: C of y = A B + C
  std::uint32_t epilogue;

  auto Key() const {
    return std::make_tuple(sizes.m, sizes.n, sizes.k, sizes.is_kn, dtype, adds, epilogue);
  }
};

// An algorithm, and the layouts of its matrices.
struct Plan {
  explicit Plan(const CublasLt& lt) : lt(lt) {}
  Plan(const Plan&) = delete;
  ~Plan() {
    for (LtLayout layout : {weight, x, y})
      if (layout != nullptr) lt.LayoutDestroy(layout);
  }

  const CublasLt& lt;
  bool found = false;
  LtAlgorithm algorithm{};
  std::size_t workspace_bytes = 0;
  LtLayout weight = nullptr, x = nullptr, y = nullptr;
};

inline LtType LtTypeOf(DType dtype) {
  return dtype == DType::kFloat64    ? kLtFloat64
         : dtype == DType::kFloat16  ? kLtFloat16
         : dtype == DType::kBFloat16 ? kLtBFloat16
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

inline Status Describe(const CublasLt& lt, const Shape3& shape, const void* bias,
                       Owned<LtProduct>* product) {
  const LtType scale = shape.dtype == DType::kFloat64 ? kLtFloat64 : kLtFloat32;
  const std::int32_t transpose = shape.sizes.is_kn ? 0 : 1;
  TWINOP_RETURN_IF_LT_ERROR(lt, ProductCreate(&product->value, ComputeOf(shape.dtype), scale));
  TWINOP_RETURN_IF_LT_ERROR(
      lt, ProductSet(product->value, kLtTransposeA, &transpose, sizeof(transpose)));
  TWINOP_RETURN_IF_LT_ERROR(
      lt, ProductSet(product->value, kLtEpilogue, &shape.epilogue, sizeof(shape.epilogue)));
  if ((shape.epilogue & kLtBias) != 0)
    TWINOP_RETURN_IF_LT_ERROR(lt, ProductSet(product->value, kLtBiasPointer, &bias, sizeof(bias)));
  return {};
}

// The plans of one device, each found when its shape first comes.
class Plans {
 public:
  static constexpr std::size_t kMost = 2048;

  Status Find(const CublasLt& lt, const Shape3& shape, LtProduct product, LtHandle* handle,
              std::shared_ptr<const Plan>* plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (handle_ == nullptr) TWINOP_RETURN_IF_LT_ERROR(lt, Create(&handle_));
    *handle = handle_;
    const auto known = plans_.find(shape.Key());
    if (known != plans_.end()) {
      *plan = known->second;
      return {};
    }
    auto fresh = std::make_shared<Plan>(lt);
    TWINOP_RETURN_IF_ERROR(Choose(lt, shape, product, fresh.get()));
    if (plans_.size() >= kMost) plans_.clear();
    *plan = plans_[shape.Key()] = std::move(fresh);
    return {};
  }

 private:
  // Makes the layout of a column-major matrix.
  static Status Layout(const CublasLt& lt, DType dtype, std::int64_t rows, std::int64_t columns,
                       LtLayout* layout) {
    TWINOP_RETURN_IF_LT_ERROR(
        lt, LayoutCreate(layout, LtTypeOf(dtype), static_cast<std::uint64_t>(rows),
                         static_cast<std::uint64_t>(columns), rows));
    return {};
  }

  Status Choose(const CublasLt& lt, const Shape3& shape, LtProduct product, Plan* plan) const {
    const auto [m, n, k, is_kn] = shape.sizes;
    TWINOP_RETURN_IF_ERROR(Layout(lt, shape.dtype, is_kn ? n : k, is_kn ? k : n, &plan->weight));
    TWINOP_RETURN_IF_ERROR(Layout(lt, shape.dtype, k, m, &plan->x));
    TWINOP_RETURN_IF_ERROR(Layout(lt, shape.dtype, n, m, &plan->y));
    Owned<LtPreference> preference{lt.PreferenceDestroy};
    TWINOP_RETURN_IF_LT_ERROR(lt, PreferenceCreate(&preference.value));
    const auto set = [&](int attribute, auto value) {
      return LtResult(lt, lt.PreferenceSet(preference.value, attribute, &value, sizeof(value)),
                      "a preference");
    };
    TWINOP_RETURN_IF_ERROR(set(kLtWorkspaceBytes, static_cast<std::uint64_t>(kWorkspaceBytes)));
    TWINOP_RETURN_IF_ERROR(set(kLtReductions, kLtWideReductions));
    for (int i = 0; i < kLtOperands; ++i)
      TWINOP_RETURN_IF_ERROR(set(kLtAlignments + i, static_cast<std::uint32_t>(kAlignment)));
    LtHeuristicResult result{};
    int count = 0;
    const LtStatus status = lt.Heuristic(handle_, product, plan->weight, plan->x, plan->y, plan->y,
                                         preference.value, 1, &result, &count);
    plan->found = status == 0 && count == 1 && result.status == 0;
    plan->algorithm = result.algorithm;
    plan->workspace_bytes = result.workspace_bytes;
    return {};
  }

  std::mutex mutex_;
  LtHandle handle_ = nullptr;
  std::map<decltype(std::declval<Shape3>().Key()), std::shared_ptr<const Plan>> plans_;
};

inline Plans& PlansOf(int device) {
  static auto& plans = *new std::map<int, Plans>;  // never deleted, as the CUDA context
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  return plans[device];
}

// y = epilogue(x W + bias) + c; `c` may be y or null. Sets `*done` to false, and does nothing,
// where cuBLASLt has no algorithm for the epilogue.
inline Status Multiply(const Call& call, const Operands& at, const Sizes& sizes, DType dtype,
                       const void* c, void* y, std::uint32_t epilogue, bool* done) {
  const CublasLt* found = nullptr;
  TWINOP_RETURN_IF_ERROR(GetCublasLt(&found));
  const CublasLt& lt = *found;
  const Shape3 shape{sizes, dtype, c != nullptr, epilogue};
  Owned<LtProduct> product{lt.ProductDestroy};
  TWINOP_RETURN_IF_ERROR(Describe(lt, shape, at.bias.data, &product));
  LtHandle handle = nullptr;
  std::shared_ptr<const Plan> plan;
  TWINOP_RETURN_IF_ERROR(
      PlansOf(call.context->device_index).Find(lt, shape, product.value, &handle, &plan));
  *done = plan->found;
  if (!plan->found) return {};
  struct Scale {
    double wide;
    float narrow;

    const void* Of(DType dtype) const {
      return dtype == DType::kFloat64 ? static_cast<const void*>(&wide) : &narrow;
    }
  };
  static constexpr Scale kZero{0, 0}, kOne{1, 1};
  return LtResult(lt,
                  lt.Multiply(handle, product.value, kOne.Of(dtype), at.weight.data, plan->weight,
                              at.x.data, plan->x, (shape.adds ? kOne : kZero).Of(dtype),
                              shape.adds ? c : y, plan->y, y, plan->y, &plan->algorithm,
                              at.workspace, plan->workspace_bytes, call.context->stream),
                  "the product");
}

}  // namespace twinop::linear
