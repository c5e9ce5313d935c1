// cuBLASLt, found at run time: torch's, ONNX Runtime's or an installed one. The types have the
// layout of those in its header, in major versions 12 and 13.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <type_traits>

#include "twinop/record/status.h"

namespace twinop::linear {

using LtStatus = int;  // cublasStatus_t; 0 is success
using LtHandle = struct LtContext*;
using LtProduct = struct LtMatmulDesc*;
using LtLayout = struct LtMatrixLayout*;
using LtPreference = struct LtMatmulPreference*;

struct LtAlgorithm {
  std::uint64_t data[8];
};
struct LtHeuristicResult {
  LtAlgorithm algorithm;
  std::size_t workspace_bytes;
  LtStatus status;
  float waves;
  int reserved[4];
};

enum LtType { kLtFloat32 = 0, kLtFloat64 = 1, kLtFloat16 = 2, kLtBFloat16 = 14 };
enum LtCompute { kLtCompute32 = 68, kLtCompute64 = 70, kLtComputeTf32 = 77 };
enum LtProductAttribute { kLtTransposeA = 3, kLtEpilogue = 7, kLtBiasPointer = 8 };
// Bits of an epilogue; kLtDefault is no epilogue.
inline constexpr std::uint32_t kLtDefault = 1, kLtRelu = 2, kLtBias = 4, kLtTanhGelu = 32;
enum LtPreferenceAttribute { kLtWorkspaceBytes = 1, kLtReductions = 3, kLtAlignments = 5 };
// Split-K reduces partial sums in the compute type, in a fixed order. Other schemes round them to
// the type of the result.
inline constexpr std::uint32_t kLtWideReductions = 2;
inline constexpr int kLtOperands = 4;  // with an alignment each: weight, x, residual, y

struct CublasLt {
  LtStatus (*Create)(LtHandle*);
  LtStatus (*ProductCreate)(LtProduct*, int compute, int scale_type);
  LtStatus (*ProductDestroy)(LtProduct);
  LtStatus (*ProductSet)(LtProduct, int attribute, const void* value, std::size_t size);
  LtStatus (*LayoutCreate)(LtLayout*, int type, std::uint64_t rows, std::uint64_t columns,
                           std::int64_t leading_dimension);
  LtStatus (*LayoutDestroy)(LtLayout);
  LtStatus (*PreferenceCreate)(LtPreference*);
  LtStatus (*PreferenceDestroy)(LtPreference);
  LtStatus (*PreferenceSet)(LtPreference, int attribute, const void* value, std::size_t size);
  LtStatus (*Heuristic)(LtHandle, LtProduct, LtLayout a, LtLayout b, LtLayout c, LtLayout d,
                        LtPreference, int wanted, LtHeuristicResult* results, int* found);
  LtStatus (*Multiply)(LtHandle, LtProduct, const void* alpha, const void* a, LtLayout,
                       const void* b, LtLayout, const void* beta, const void* c, LtLayout, void* d,
                       LtLayout, const LtAlgorithm*, void* workspace, std::size_t workspace_bytes,
                       void* stream);
  const char* (*StatusName)(LtStatus);

  Status Load() {
    void* library = nullptr;
    for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL})  // loaded ones first
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
        if (library == nullptr) library = dlopen(name, mode);
    if (library == nullptr)
      return Status::Error(
          "no cuBLASLt of major version 12 or 13 in the process, and none that the loader finds "
          "(libcublasLt.so.13, libcublasLt.so.12). Import a CUDA build of torch first, or install "
          "one: pip install nvidia-cublas (CUDA 13) or nvidia-cublas-cu12, with its lib folder in "
          "LD_LIBRARY_PATH");
    std::string missing;
    const auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
      if (*function == nullptr) missing = name;
    };
    find("cublasLtCreate", &Create);
    find("cublasLtMatmulDescCreate", &ProductCreate);
    find("cublasLtMatmulDescDestroy", &ProductDestroy);
    find("cublasLtMatmulDescSetAttribute", &ProductSet);
    find("cublasLtMatrixLayoutCreate", &LayoutCreate);
    find("cublasLtMatrixLayoutDestroy", &LayoutDestroy);
    find("cublasLtMatmulPreferenceCreate", &PreferenceCreate);
    find("cublasLtMatmulPreferenceDestroy", &PreferenceDestroy);
    find("cublasLtMatmulPreferenceSetAttribute", &PreferenceSet);
    find("cublasLtMatmulAlgoGetHeuristic", &Heuristic);
    find("cublasLtMatmul", &Multiply);
    find("cublasLtGetStatusName", &StatusName);
    if (missing.empty()) return {};
    return Status::Error("the process's cuBLASLt has no function " + missing +
                         "; install one of CUDA 12.0 or newer: pip install -U nvidia-cublas");
  }
};

// Gets the functions, which the first call loads. After an error, the next call tries again.
inline Status GetCublasLt(const CublasLt** functions) {
  static std::mutex mutex;
  static const CublasLt* loaded = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    CublasLt fresh{};
    TWINOP_RETURN_IF_ERROR(fresh.Load());
    loaded = new const CublasLt(fresh);  // as long as the process
  }
  *functions = loaded;
  return {};
}

}  // namespace twinop::linear
