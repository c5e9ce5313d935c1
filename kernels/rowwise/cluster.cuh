// Rows that are too wide for the registers of one warp or block, slice by slice. On sm_90 a block,
// or a cluster of blocks that share each row, takes several rows at a time, each with a group of
// its threads. Where a row comes from changes no bit of it: the shape alone decides which thread
// adds what.
#pragma once

#include <type_traits>

#include "twinop/primitives/launch.cuh"
#include "twinop/rowwise/cluster_resident.cuh"
#include "twinop/rowwise/cluster_streamed.cuh"

namespace twinop::rowwise {

template <class F, class S, class W, Source kSource>
using SlicesFrom = std::conditional_t<
    kSource == Source::kRegisters || kSource == Source::kRegistersLong ||
        kSource == Source::kRegistersUnaligned,
    ResidentSlices<F, S, W, kSource != Source::kRegistersUnaligned,
                   VectorsPerThread(kEarlyInputs<F>, kSource == Source::kRegistersLong)>,
    StreamedRows<F, S, W, kSource>>;

template <class F, class S, class W, Source kSource>
__global__ void __launch_bounds__(kClusterThreads, 1)
    ClusterKernel(F functor, Arguments<F, S, W> arguments, ClusterSettings settings,
                  L2ReadPolicy reads, F* states, Compute<S>* partials) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kSource != Source::kGlobal) return;  // it is never launched
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ SliceStorage<F, S> storage;
  PdlTriggerAndWait();
  SlicesFrom<F, S, W, kSource>(functor, arguments, settings, reads, &storage, memory)
      .Run(states, partials);
}

}  // namespace twinop::rowwise
