// cuBLASLt, found at run time: torch's, ONNX Runtime's or an installed one. The types have the
// layout of those in its header, in major versions 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "twinop/primitives/dynamic_library.h"
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

enum LtType {
  kLtFloat32 = 0,
  kLtFloat64 = 1,
  kLtFloat16 = 2,
  kLtBFloat16 = 14,
  kLtFloat8E4M3 = 28
};
enum LtCompute { kLtCompute32 = 68, kLtCompute64 = 70, kLtComputeTf32 = 77 };
enum LtProductAttribute {
  kLtTransposeA = 3,
  kLtEpilogue = 7,
  kLtBiasPointer = 8,
  kLtScalePointerA = 17,
  kLtScalePointerB = 18,
  kLtFastAccumulation = 25,
  kLtBiasType = 26,
  kLtScaleModeA = 31,
  kLtScaleModeB = 32
};
// A scale for each row of A and of B, from this version on; on 9.0 only.
inline constexpr std::int32_t kLtOuterVector = 3;
inline constexpr std::size_t kLtHasOuterVector = 120900;
// Bits of an epilogue; kLtDefault is no epilogue.
inline constexpr std::uint32_t kLtDefault = 1, kLtRelu = 2, kLtBias = 4, kLtTanhGelu = 32;
enum LtPreferenceAttribute { kLtWorkspaceBytes = 1, kLtReductions = 3, kLtAlignments = 5 };
// Split-K reduces partial sums in the compute type, in a fixed order. Other schemes round them to
// the type of the result.
inline constexpr std::uint32_t kLtWideReductions = 2;
inline constexpr int kLtOperands = 4;  // with an alignment each: weight, x, residual, y

struct CublasLt : DynamicLibrary {
  std::size_t (*Version)() = Find("cublasLtGetVersion");
  LtStatus (*Create)(LtHandle*) = Find("cublasLtCreate");
  LtStatus (*ProductCreate)(LtProduct*, int compute,
                            int scale_type) = Find("cublasLtMatmulDescCreate");
  LtStatus (*ProductDestroy)(LtProduct) = Find("cublasLtMatmulDescDestroy");
  LtStatus (*ProductSet)(LtProduct, int attribute, const void* value,
                         std::size_t size) = Find("cublasLtMatmulDescSetAttribute");
  LtStatus (*LayoutCreate)(LtLayout*, int type, std::uint64_t rows, std::uint64_t columns,
                           std::int64_t leading_dimension) = Find("cublasLtMatrixLayoutCreate");
  LtStatus (*LayoutDestroy)(LtLayout) = Find("cublasLtMatrixLayoutDestroy");
  LtStatus (*PreferenceCreate)(LtPreference*) = Find("cublasLtMatmulPreferenceCreate");
  LtStatus (*PreferenceDestroy)(LtPreference) = Find("cublasLtMatmulPreferenceDestroy");
  LtStatus (*PreferenceSet)(LtPreference, int attribute, const void* value,
                            std::size_t size) = Find("cublasLtMatmulPreferenceSetAttribute");
  LtStatus (*Heuristic)(LtHandle, LtProduct, LtLayout a, LtLayout b, LtLayout c, LtLayout d,
                        LtPreference, int wanted, LtHeuristicResult* results,
                        int* found) = Find("cublasLtMatmulAlgoGetHeuristic");
  LtStatus (*Multiply)(LtHandle, LtProduct, const void* alpha, const void* a, LtLayout,
                       const void* b, LtLayout, const void* beta, const void* c, LtLayout, void* d,
                       LtLayout, const LtAlgorithm*, void* workspace, std::size_t workspace_bytes,
                       void* stream) = Find("cublasLtMatmul");
  const char* (*StatusName)(LtStatus) = Find("cublasLtGetStatusName");
};

// Gets the functions, which the first call loads. After an error, the next call tries again.
inline Status GetCublasLt(const CublasLt** functions) {
  static std::mutex mutex;
  static const CublasLt* loaded = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
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
    const CublasLt fresh{{library}};
    if (fresh.missing != nullptr)
      return Status::Error(std::string("the process's cuBLASLt has no function ") + fresh.missing +
                           "; install one of CUDA 12.0 or newer: pip install -U nvidia-cublas");
    loaded = new const CublasLt(fresh);  // as long as the process
  }
  *functions = loaded;
  return {};
}

}  // namespace twinop::linear
