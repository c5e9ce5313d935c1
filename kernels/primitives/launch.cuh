// Launches a kernel on the call's stream.
#pragma once

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "twinop/primitives/target.h"
#include "twinop/record/op_spec.h"
#include "twinop/record/trace.h"

namespace twinop {

inline bool IsAligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Reports a failure, and takes it back from the runtime: who asks cudaGetLastError next would take
// it for their own.
inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  std::string text = std::string(what) + " failed: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    text += "; the library holds no code for this GPU (built for " TWINOP_CUDA_ARCHS
            "): rebuild with TWINOP_CUDA_ARCHS=native, or with the GPU's architecture";
  }
  return Status::Error(std::move(text));
}

// Queues a copy of a contiguous tensor to other memory of the device.
inline Status CopyTensor(const Call& call, const Tensor& tensor, void* to) {
  return CudaStatus(
      cudaMemcpyAsync(to, tensor.data, static_cast<std::size_t>(tensor.bytes()),
                      cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(call.context->stream)),
      "copying a tensor");
}

// Runs `launch(call)` with the call's device as the current one, and makes the previous one current
// again. Frameworks mostly have set it already; ONNX Runtime's CUDA plugin does not.
template <class Launch>
Status OnDevice(const Call& call, const Launch& launch) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  const int wanted = call.context->device_index;
  const bool other = error == cudaSuccess && previous != wanted;
  if (other) error = cudaSetDevice(wanted);
  if (error != cudaSuccess)
    return CudaStatus(error, ("choosing CUDA device " + std::to_string(wanted)).c_str());
  Status status = launch(call);
  if (!other) return status;
  Status back = CudaStatus(cudaSetDevice(previous), "choosing the previous CUDA device");
  return status.ok() ? std::move(back) : std::move(status);
}

// Programmatic dependent launch (PDL; CUDA C++ Programming Guide, section of that name; sm_90): a
// kernel of few blocks that begins with PdlTriggerAndWait() is launched while the kernel before
// it on the stream still runs. It lets the next kernel be launched, and waits until the one before
// is done and its memory is written: before, no result depends on anything but constants of the
// model. In larger grids the additional instruction of each block mostly costs more than the
// overlap saves (docs/tuning.md). A kernel's kMost is the `most` of its WithPdl(): in a larger
// grid it does not wait.
inline constexpr int kMaxPdlBlocks = 1024;

// A kernel that has work to do between the two calls these.
__device__ __forceinline__ void PdlTrigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void PdlWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <int kMost = kMaxPdlBlocks>
__device__ __forceinline__ void PdlTriggerAndWait() {
  if (gridDim.x > kMost) return;
  PdlTrigger();
  PdlWait();
}

struct Grid {
  std::int64_t blocks;
  dim3 threads;
  unsigned blocks_y = 1;
  int shared_bytes = 0;    // dynamic
  int cluster = 1;         // blocks; more than one needs sm_90
  int max_pdl_blocks = 0;  // PDL: up to so many blocks the kernel waits for the one before
};

// Blocks of `threads` threads, one thread for each of `count` elements.
inline Grid GridOver(std::int64_t count, int threads) {
  return {(count + threads - 1) / threads, dim3(static_cast<unsigned>(threads))};
}

// The kernel begins with PdlTriggerAndWait<most>().
inline Grid WithPdl(Grid grid, int most = kMaxPdlBlocks) {
  grid.max_pdl_blocks = most;
  return grid;
}

// Allows the kernel this much dynamic shared memory. The limit never falls, because the launch of
// another thread may be about to need it.
inline Status AllowSharedBytes(const void* kernel, int bytes) {
  constexpr int kAllowedBytes = 32 << 10;  // with static memory, of which there is less, 48 KiB
  if (bytes <= kAllowedBytes) return {};
  int device = 0;
  TWINOP_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "asking for the device"));
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{device, kernel}];
  if (bytes <= most) return {};
  TWINOP_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "asking for shared memory"));
  most = bytes;
  return {};
}

// A grid as the runtime takes it.
struct LaunchConfig : cudaLaunchConfig_t {
  LaunchConfig(const Grid& grid, void* on, bool is_pdl) : cudaLaunchConfig_t{} {
    gridDim = dim3(static_cast<unsigned>(grid.blocks), grid.blocks_y);
    blockDim = grid.threads;
    dynamicSmemBytes = static_cast<std::size_t>(grid.shared_bytes);
    stream = static_cast<cudaStream_t>(on);
    attrs = attributes;
    if (grid.cluster > 1) {
      attributes[numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    }
    if (is_pdl) {
      attributes[numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;

  cudaLaunchAttribute attributes[2] = {};
};

// Gets the number of clusters of the grid (or of blocks, without clusters) that the device holds at
// once.
inline Status ResidentClusters(const void* kernel, const Grid& grid, int multiprocessors,
                               int* count) {
  const LaunchConfig launch(grid, nullptr, false);
  TWINOP_RETURN_IF_ERROR(AllowSharedBytes(kernel, grid.shared_bytes));
  if (grid.cluster > 1)
    return CudaStatus(cudaOccupancyMaxActiveClusters(count, kernel, &launch),
                      "asking how many clusters the device holds");
  int blocks = 0;
  TWINOP_RETURN_IF_ERROR(
      CudaStatus(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                     &blocks, kernel, static_cast<int>(grid.threads.x), launch.dynamicSmemBytes),
                 "asking how many blocks the device holds"));
  *count = blocks * multiprocessors;
  return {};
}

// Tells which code the device took, and which clusters it holds.
static __global__ void CodeProbeKernel() {}

static inline Status AskDevice(int device, Target* target) {
  cudaFuncAttributes probe{};
  cudaError_t error = cudaFuncGetAttributes(&probe, CodeProbeKernel);
  const auto ask = [&](cudaDeviceAttr attribute) {
    int value = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
    return value;
  };
  const int major = ask(cudaDevAttrComputeCapabilityMajor);
  target->capability = 10 * major + ask(cudaDevAttrComputeCapabilityMinor);
  target->code = probe.ptxVersion;
  target->has_wgmma = major == 9;
  target->multiprocessors = target->clusters[0] = ask(cudaDevAttrMultiProcessorCount);
  target->block_bytes = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  target->l2_bytes = ask(cudaDevAttrL2CacheSize);
  TWINOP_RETURN_IF_ERROR(CudaStatus(error, "asking for a property of the device"));
  for (int i = 1; i < 4 && target->code >= 90; ++i) {
    const Grid grid{1 << i, dim3(32), 1, static_cast<int>(target->block_bytes), 1 << i};
    int* const count = &target->clusters[i];
    if (!ResidentClusters(reinterpret_cast<const void*>(CodeProbeKernel), grid, 0, count).ok())
      *count = 0;
  }
  const char* const name = std::getenv("TWINOP_TARGET");
  return name == nullptr ? Status() : LimitTo(name, target);
}

// Gets what kernels on the call's device are chosen for. The device is asked once.
static inline Status TargetOf(const Call& call, const Target** target) {
  static std::atomic<const Target*> known[64];
  std::atomic<const Target*>& own = known[call.context->device_index % 64];
  *target = own.load(std::memory_order_acquire);
  if (*target != nullptr) return {};
  auto asked = std::make_unique<Target>();  // it stays
  TWINOP_RETURN_IF_ERROR(AskDevice(call.context->device_index, asked.get()));
  own.store(*target = asked.release(), std::memory_order_release);
  return {};
}

// Prints the kernel and its grid.
inline void TraceKernel(const void* kernel, const Grid& grid, const Target& target) {
  const char* name = nullptr;
  if (!CudaStatus(cudaFuncGetName(&name, kernel), "asking for a name").ok()) name = nullptr;
  char* const readable =
      name == nullptr ? nullptr : abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  Trace("  %lld x %u blocks of %u x %u threads, %d bytes of shared memory, clusters of %d: %s",
        static_cast<long long>(grid.blocks), grid.blocks_y, grid.threads.x, grid.threads.y,
        grid.shared_bytes, grid.cluster,
        readable != nullptr ? readable
        : name != nullptr   ? name
                            : "(CUDA names no kernel)");
  std::free(readable);
  if (!target.IsMeasured())
    Trace("  its settings for %d.%d (code of %d.%d) are reasoned from those measured on 9.0",
          target.capability / 10, target.capability % 10, target.code / 10, target.code % 10);
}

// Adds what the device lacks for a launch that fails.
[[gnu::cold]] inline Status LaunchError(const Status& status, const void* kernel, const Grid& grid,
                                        const Target& target) {
  const int threads = static_cast<int>(grid.threads.x * grid.threads.y);
  cudaFuncAttributes has{};
  TWINOP_RETURN_IF_ERROR(CudaStatus(cudaFuncGetAttributes(&has, kernel), "a kernel launch"));
  std::string lacks;
  if (threads > has.maxThreadsPerBlock)
    lacks = std::to_string(threads) + " threads of " + std::to_string(has.numRegs) +
            " registers a block, and this GPU has registers for " +
            std::to_string(has.maxThreadsPerBlock);
  if (grid.shared_bytes > target.block_bytes)
    lacks = std::to_string(grid.shared_bytes) +
            " bytes of shared memory a block, and this GPU has " +
            std::to_string(target.block_bytes);
  if (target.ClustersOf(grid.cluster) == 0)
    lacks = "clusters of " + std::to_string(grid.cluster) + " blocks, and this GPU has none";
  return Status::Error(status.message() + (lacks.empty() ? "" : "; it needs " + lacks));
}

// Launches a kernel whose arguments lie at these places.
static inline Status LaunchUntyped(const void* kernel, const Grid& grid, const Call& call,
                                   void** arguments) {
  if (grid.blocks > INT32_MAX)
    return Status::Error("the tensor is too large for one kernel launch");
  const Target* target = nullptr;
  TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
  if (grid.shared_bytes > target->block_bytes || target->ClustersOf(grid.cluster) == 0)
    return LaunchError(Status::Error("a kernel launch failed"), kernel, grid, *target);
  TWINOP_RETURN_IF_ERROR(AllowSharedBytes(kernel, grid.shared_bytes));
  if (__builtin_expect(kIsTraced, false)) TraceKernel(kernel, grid, *target);
  const bool is_pdl = grid.blocks <= grid.max_pdl_blocks && target->code >= 90;
  const LaunchConfig config(grid, call.context->stream, is_pdl);
  const Status status =
      CudaStatus(cudaLaunchKernelExC(&config, kernel, arguments), "a kernel launch");
  return status.ok() ? Status() : LaunchError(status, kernel, grid, *target);
}

template <class... Parameters, class... Arguments>
Status LaunchKernel(void (*kernel)(Parameters...), const Grid& grid, const Call& call,
                    const Arguments&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments),
                "the kernel has another number of parameters than LaunchKernel got arguments");
  // The places are those of the converted arguments, which live until the end of the statement.
  const auto launch = [&](const Parameters&... converted) {
    void* places[sizeof...(Parameters) + 1] = {
        const_cast<void*>(static_cast<const void*>(&converted))...};
    return LaunchUntyped(reinterpret_cast<const void*>(kernel), grid, call, places);
  };
  return launch(static_cast<Parameters>(arguments)...);
}

}  // namespace twinop
