// PTX of sm_90 and later: barriers in shared memory that count bytes, bulk copies into shared
// memory, values sent to another block of the cluster, matrices stored by a warp. Names and
// meanings: PTX ISA 8.0, sections 9.7.9.25 (data movement) and 9.7.13.15 (mbarrier).
//
// Code compiled for older architectures must not reach these.
#pragma once

#include <cstdint>

namespace twinop::hopper {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TWINOP_HOPPER_ASM asm volatile
#else
#define TWINOP_HOPPER_ASM(...) __trap()
#endif

using Barrier = std::uint64_t;  // in shared memory

__device__ __forceinline__ std::uint32_t SharedAddress(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void Init(Barrier* barrier, int arrivals) {
  TWINOP_HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
                    "r"(arrivals));
}

// Makes the barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void FenceInit() {
  TWINOP_HOPPER_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
}

// One arrival, and `bytes` more to come before the barrier opens.
__device__ __forceinline__ void ArriveExpecting(Barrier* barrier, std::uint32_t bytes) {
  TWINOP_HOPPER_ASM(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes) : "memory");
}

#define TWINOP_WAIT(semantics)                                                                  \
  TWINOP_HOPPER_ASM(                                                                            \
      "{\n.reg .pred done;\nagain:\n"                                                           \
      "mbarrier.try_wait.parity" semantics                                                      \
      ".shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(SharedAddress(barrier)), \
      "r"(parity) : "memory")
// Waits for the end of the barrier's phase of this parity (0 first).
__device__ __forceinline__ void Wait(Barrier* barrier, std::uint32_t parity) { TWINOP_WAIT(""); }
// As Wait, where another block of the cluster wrote what is waited for. (Not used for the rest: it
// empties the L1 cache.)
__device__ __forceinline__ void WaitForCluster(Barrier* barrier, std::uint32_t parity) {
  TWINOP_WAIT(".acquire.cluster");
}
#undef TWINOP_WAIT

// Orders what this thread wrote to shared memory before what the copy engine writes there.
__device__ __forceinline__ void FenceAsync() {
  TWINOP_HOPPER_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

// Global to shared memory, both and the size in units of 16 bytes; the barrier counts the bytes.
// `policy`: how L2 keeps what is read.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, std::uint32_t bytes,
                                         Barrier* barrier, std::uint64_t policy) {
  TWINOP_HOPPER_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(SharedAddress(barrier)),
      "l"(policy) : "memory");
}

// Copies the box at (column, row) of a matrix, given by its tensor map, to shared memory. The
// barrier counts the bytes.
__device__ __forceinline__ void LoadBox(void* to, const void* matrix, int column, int row,
                                        Barrier* barrier) {
  TWINOP_HOPPER_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(to)),
      "l"(matrix), "r"(SharedAddress(barrier)), "r"(column), "r"(row) : "memory");
}
// To the same place in each of the cluster's first `blocks` blocks, whose barriers count the bytes.
__device__ __forceinline__ void LoadBoxForCluster(void* to, const void* matrix, int column, int row,
                                                  Barrier* barrier, int blocks) {
  TWINOP_HOPPER_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(SharedAddress(to)),
      "l"(matrix), "r"(SharedAddress(barrier)), "r"(column), "r"(row),
      "h"(static_cast<std::uint16_t>((1 << blocks) - 1)) : "memory");
}

// Arrives at the same barrier of another block of the cluster. The scope is the block, as in
// CUTLASS: at the cluster's, each arrival waits for the memory (docs/tuning.md).
__device__ __forceinline__ void ArriveAt(Barrier* barrier, int rank) {
  TWINOP_HOPPER_ASM(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(rank) : "memory");
}

// Stores four matrices of 8 x 8 elements of 16 bits. Lane 8 i + r gives the address of row r of
// matrix i; lane 4 g + t has elements 2 t and 2 t + 1 of row g.
__device__ __forceinline__ void StoreMatrices(void* row, const std::uint32_t (&words)[4]) {
  TWINOP_HOPPER_ASM(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Stores a value at the same place in block `rank` of the cluster; that block's barrier counts its
// bytes.
template <class T>
__device__ __forceinline__ void Send(const T& value, T* place, Barrier* barrier, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  [[maybe_unused]] std::uint32_t remote_place = 0, remote_barrier = 0;
  TWINOP_HOPPER_ASM(
      "mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_place) : "r"(SharedAddress(place)),
      "r"(rank));
  TWINOP_HOPPER_ASM(
      "mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(SharedAddress(barrier)),
      "r"(rank));
  if constexpr (sizeof(T) == 4) {
    TWINOP_HOPPER_ASM(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            remote_place),
        "r"(*reinterpret_cast<const std::uint32_t*>(&value)), "r"(remote_barrier) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    TWINOP_HOPPER_ASM(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
            remote_place),
        "l"(*reinterpret_cast<const std::uint64_t*>(&value)), "r"(remote_barrier) : "memory");
  } else {
    [[maybe_unused]] const auto* const words = reinterpret_cast<const std::uint32_t*>(&value);
    TWINOP_HOPPER_ASM(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(remote_place),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(remote_barrier) : "memory");
  }
}

// A barrier of the cluster's blocks that have not left.
__device__ __forceinline__ void ArriveInCluster() {
  TWINOP_HOPPER_ASM("barrier.cluster.arrive.release.aligned;" :: : "memory");
}
// The same, but what the block wrote before may not be visible to the others: it waits for no
// memory.
__device__ __forceinline__ void ArriveInClusterRelaxed() {
  TWINOP_HOPPER_ASM("barrier.cluster.arrive.relaxed.aligned;" :: : "memory");
}
__device__ __forceinline__ void WaitInCluster() {
  TWINOP_HOPPER_ASM("barrier.cluster.wait.acquire.aligned;" :: : "memory");
}
__device__ __forceinline__ void ClusterSync() {
  ArriveInCluster();
  WaitInCluster();
}

__device__ __forceinline__ int ClusterRank() {
  std::uint32_t rank = 0;
  TWINOP_HOPPER_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

#undef TWINOP_HOPPER_ASM

}  // namespace twinop::hopper
