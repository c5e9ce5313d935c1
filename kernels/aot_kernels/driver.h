// The CUDA driver, from libcuda.so.1 at run time: the library loads where there is no driver, and
// compiles where there is no CUDA toolkit. The types have the layout of those in CUDA's header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "twinop/primitives/dynamic_library.h"

namespace twinop::aot_kernels {

using Result = int;  // CUresult; 0 is success
using DevicePointer = std::uint64_t;
using Context = struct ContextOfDriver*;
using Module = struct ModuleOfDriver*;
using Function = struct FunctionOfDriver*;
using Stream = void*;

inline constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;
inline constexpr int kMaxSharedBytesOptIn = 97;
inline constexpr int kFunctionMaxDynamicSharedBytes = 8, kFunctionNonPortableCluster = 14;
inline constexpr int kJitErrorLog = 5, kJitErrorLogBytes = 6;
inline constexpr int kCooperative = 2, kClusterDimension = 4, kClusterScheduling = 5,
                     kProgrammaticStreamSerialization = 6;
inline constexpr unsigned kSpreadClusters = 1;

struct LaunchAttribute {
  alignas(8) int id;
  alignas(8) unsigned value[16];  // a union of 64 bytes
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver : DynamicLibrary {
  Result (*Init)(unsigned flags) = Find("cuInit");
  Result (*DeviceGet)(int* device, int ordinal) = Find("cuDeviceGet");
  Result (*DeviceGetAttribute)(int* value, int attribute,
                               int device) = Find("cuDeviceGetAttribute");
  Result (*DeviceGetName)(char* name, int size, int device) = Find("cuDeviceGetName");
  Result (*DevicePrimaryCtxRetain)(Context* context, int device) = Find("cuDevicePrimaryCtxRetain");
  Result (*CtxGetCurrent)(Context* context) = Find("cuCtxGetCurrent");
  Result (*CtxPushCurrent)(Context context) = Find("cuCtxPushCurrent_v2");
  Result (*CtxPopCurrent)(Context* context) = Find("cuCtxPopCurrent_v2");
  Result (*StreamGetCtx)(Stream stream, Context* context) = Find("cuStreamGetCtx");
  Result (*ModuleLoadDataEx)(Module* module, const void* image, unsigned count, int* options,
                             void** values) = Find("cuModuleLoadDataEx");
  Result (*ModuleGetFunction)(Function* function, Module module,
                              const char* name) = Find("cuModuleGetFunction");
  Result (*FuncSetAttribute)(Function function, int attribute,
                             int value) = Find("cuFuncSetAttribute");
  Result (*LaunchKernelEx)(const LaunchConfig* config, Function function, void** parameters,
                           void** extra) = Find("cuLaunchKernelEx");
  Result (*MemsetD8Async)(DevicePointer destination, unsigned char value, std::size_t bytes,
                          Stream stream) = Find("cuMemsetD8Async");
  Result (*MemcpyDtoHAsync)(void* destination, DevicePointer source, std::size_t bytes,
                            Stream stream) = Find("cuMemcpyDtoHAsync_v2");
  Result (*MemcpyDtoDAsync)(DevicePointer destination, DevicePointer source, std::size_t bytes,
                            Stream stream) = Find("cuMemcpyDtoDAsync_v2");
  Result (*StreamSynchronize)(Stream stream) = Find("cuStreamSynchronize");
  Result (*StreamIsCapturing)(Stream stream, int* status) = Find("cuStreamIsCapturing");
  Result (*GetErrorName)(Result result, const char** name) = Find("cuGetErrorName");
  Result (*GetErrorString)(Result result, const char** text) = Find("cuGetErrorString");
};

// Returns the driver, which the first call loads. Throws std::runtime_error where there is none.
const Driver& GetDriver();

// Throws std::runtime_error: "<what><of> failed: CUDA_ERROR_...: ...<note>".
[[noreturn, gnu::cold]] void ThrowDriverError(Result result, const char* what, const char* of = "",
                                              const char* note = "");

inline void Check(Result result, const char* what, const char* of = "") {
  if (__builtin_expect(result != 0, false)) ThrowDriverError(result, what, of);
}

// Queues a copy between places in the memory of the stream's device.
void CopyOnDevice(void* to, const void* from, std::size_t bytes, Stream stream);
// Copies from there to the host, and waits for it.
void CopyToHost(void* to, const void* from, std::size_t bytes, Stream stream);

// Makes the context the current one, if it is not, and the previous one again at the end.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, Context wanted) : driver_(driver) {
    Context current = nullptr;
    Check(driver.CtxGetCurrent(&current), "asking for the current CUDA context");
    if (current == wanted) return;
    Check(driver.CtxPushCurrent(wanted), "making the device's CUDA context current");
    pushed_ = true;
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    Context popped = nullptr;
    if (pushed_) driver_.CtxPopCurrent(&popped);
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace twinop::aot_kernels
