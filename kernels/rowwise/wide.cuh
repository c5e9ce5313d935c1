// Rows too wide for one warp's or block's registers, slice by slice: on sm_90 a block, or a cluster
// of blocks that share each row, takes several rows at a time, each by a group of threads of its
// own. Where a row comes from changes no bit of it: the shape alone decides which thread sums what.
#pragma once

#include <type_traits>

#include "kernels/primitives/launch.cuh"
#include "kernels/rowwise/wide_reread.cuh"
#include "kernels/rowwise/wide_resident.cuh"

namespace twinop::rowwise {

template <class F, class S, class W, Source kSource, bool kSums>
using WideRowsFrom =
    std::conditional_t<kSource == Source::kHeld || kSource == Source::kHeldLong ||
                           kSource == Source::kHeldMisaligned,
                       HeldWideRows<F, S, W, kSource != Source::kHeldMisaligned,
                                    WideVectors(kEarlyInputs<F>, kSource == Source::kHeldLong)>,
                       ReadWideRows<F, S, W, kSource, kSums>>;

template <class F, class S, class W, Source kSource, bool kSums>
__global__ void __launch_bounds__(kWideThreads, 1)
    WideKernel(F functor, Arguments<F, S, W> arguments, WideSettings settings, Reads reads,
               F* states, Compute<S>* partials) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kSource != Source::kGlobal) return;  // never launched
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ WideStorage<F, S> storage;
  WaitForPreviousKernel();
  WideRowsFrom<F, S, W, kSource, kSums>(functor, arguments, settings, reads, &storage, memory)
      .Run(states, partials);
}

}  // namespace twinop::rowwise
