// How a kernel's reads are kept in L2.
#pragma once

#include <cstdint>
#include <cuda/annotated_ptr>

namespace twinop {

// A kernel that moves more than L2 holds (60 MB on an H200) reads everything once, so it makes no
// difference to itself which line leaves L2 next; it does to the memory: if those that were read
// leave last, those that were written leave soon, in about the order of their addresses.
//
// Share of the copy's speed (H200), reads kept last / as usual / kept least:
//
//                       relu, 2^28            rms_norm, 32768 x 4096   add_rms_norm, 8192 x 16384
//   bfloat16            1.03 / 1.02 / 0.99    1.00 / 0.97 / 0.94       1.01 / 0.98 / 0.93
//   float32             1.02 / 1.01 / 0.99    1.02 / 0.98 / 0.95       0.99 / 0.93 / 0.93
//
// So it is whether L2 was full of other lines to write, to read, or of the kernel's own before;
// keeping what is written last or least is 1 to 3 % slower.
//
// Of little more than L2 holds it is a gain where L2 is full of lines to write, as it is behind
// another kernel (relu, bfloat16, tensors that L2 does not hold, microseconds as usual / kept last;
// after reads only):
//
//   elements   2^23          2^24          2^25          2^26          2^27
//              12.5 / 11.9   20.5 / 19.6   35.6 / 34.8   67.1 / 65.9   128.5 / 126.8
//   (reads)    10.7 / 10.7   17.7 / 17.7   32.1 / 31.7   63.0 / 62.5   124.4 / 123.6
//
// It takes from the next kernels: what is kept outlives a memset of 1 GiB. Of 32 MiB, to read the
// same takes 13.8 us then, to read others 15.6, both 15.1 without; ten copies within 40 MB right
// after it take 115 us, so 104 us. So what L2 could hold is not kept.
class Reads {
 public:
  explicit Reads(std::int64_t bytes) {
    constexpr std::int64_t kMinBytes = 64 << 20;
    if (bytes >= kMinBytes) property_ = cuda::access_property::persisting{};
  }

  // The compiler follows the pointer to the loads: they take no more registers or instructions.
  template <class T>
  __device__ __forceinline__ const T* Of(const T* place) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    return cuda::associate_access_property(place, property_);
#else
    return place;
#endif
  }

  // For bulk copies.
  __device__ __forceinline__ std::uint64_t Policy() const {
    return static_cast<std::uint64_t>(property_);
  }

 private:
  cuda::access_property property_;
};

}  // namespace twinop
