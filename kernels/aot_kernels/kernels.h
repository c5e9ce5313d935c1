// The kernels of a library, as its generated source lists them, and what is loaded on each device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "twinop/aot_kernels/driver.h"
#include "twinop/record/call.h"

namespace twinop::aot_kernels {

// The code of a kernel for a target, and what a launch of this code needs.
struct Image {
  std::string_view target;  // "sm_90", "sm_90a" (that architecture only), or PTX: "compute_80"
  const char* code;
  unsigned threads, shared_bytes;

  bool IsPtx() const { return target[0] == 'c'; }
  bool IsSpecific() const { return target.back() == 'a'; }
  int Architecture() const;  // 90
};

struct Kernel {
  const char* name;
  const char* label;  // "mish_kernel, mish.py:7"
  const Image* images;
  std::size_t image_count;
  unsigned scratch_pointers = 0;  // that follow the parameters; Triton's kernels have 2
  unsigned cluster = 1;           // a grid counts clusters
  bool is_cooperative = false;
  bool is_dependent = false;  // starts before the kernel before it ends (PDL)

  template <std::size_t N>
  constexpr Kernel(const char* name, const char* label, const Image (&images)[N])
      : name(name), label(label), images(images), image_count(N) {}
  constexpr Kernel ScratchPointers(unsigned count) const {
    return With(&Kernel::scratch_pointers, count);
  }
  constexpr Kernel Cluster(unsigned blocks) const { return With(&Kernel::cluster, blocks); }
  constexpr Kernel Cooperative() const { return With(&Kernel::is_cooperative, true); }
  constexpr Kernel Dependent() const { return With(&Kernel::is_dependent, true); }

 private:
  template <class T>
  constexpr Kernel With(T Kernel::* member, T value) const {
    Kernel copy = *this;
    copy.*member = value;
    return copy;
  }
};

// A kernel that is loaded, or null.
struct LoadedKernel {
  Function function = nullptr;
  const Kernel* kernel = nullptr;
  const Image* image = nullptr;
};

struct Device {
  Context context = nullptr;                // the device's primary one
  int architecture = 0;                     // 90 for compute capability 9.0
  std::unique_ptr<LoadedKernel[]> kernels;  // by the index in the library's table
};

// Of an op on a device.
struct State {
  const Device* device;
};

struct Devices;  // by their number

// All kernels of a library.
class KernelTable {
 public:
  using OfDType = std::pair<std::int32_t, std::initializer_list<int>>;

  // `archs`: what they were compiled for, for messages.
  template <std::size_t N>
  constexpr KernelTable(const Kernel (&kernels)[N], const char* archs)
      : kernels_(kernels), count_(N), archs_(archs) {}

  // Loads the kernels that an op launches for a first input of this dtype (TWINOP_NONE: any), once
  // for each device, and returns the device. Thread-safe. They stay loaded until the process ends.
  // Throws std::runtime_error.
  const Device& Load(const twinop_call& call, std::initializer_list<OfDType> wanted);

 private:
  const Kernel* kernels_;
  std::size_t count_;
  const char* archs_;
  std::mutex mutex_;
  Devices* devices_ = nullptr;  // never deleted: outlives static destructors
};

}  // namespace twinop::aot_kernels
