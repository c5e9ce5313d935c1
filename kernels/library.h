// TWINOP_LIBRARY("custom_domain", 1) defines a library's table of ops (kernels/abi.h) and its
// description for tools. One source file of each library has it; cmake/TwinopOp.cmake writes that
// file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "twinop/abi.h"

#define TWINOP_TEXT_OF(token) #token
#define TWINOP_EXPANDED_TEXT_OF(token) TWINOP_TEXT_OF(token)

// The Python files of the library's kernels with their hashes (twinop/libraries/kernel_op.py), if
// it has some.
#if !defined(TWINOP_SOURCE)
#define TWINOP_SOURCE ""
#endif

#define TWINOP_LIBRARY(domain, domain_version)                                                 \
  extern "C" {                                                                                 \
  /* Bounds of the section, provided by the linker for each shared library. */                 \
  [[gnu::visibility("hidden")]] extern const twinop_op* const __start_twinop_ops[];            \
  [[gnu::visibility("hidden")]] extern const twinop_op* const __stop_twinop_ops[];             \
  [[gnu::visibility("hidden")]] extern const char twinop_domain[];                             \
  const char twinop_domain[] = domain;                                                         \
  }                                                                                            \
  [[gnu::section(".twinop"), gnu::used]] static constexpr char kTwinopLibraryText[] =          \
      "{\"twinop\":\"" TWINOP_VERSION "\",\"abi\":" TWINOP_EXPANDED_TEXT_OF(                   \
          TWINOP_ABI_VERSION) ",\"domain\":\"" domain                                          \
                              "\",\"domain_version\":" TWINOP_EXPANDED_TEXT_OF(                \
                                  domain_version) ",\"cuda_archs\":\"" TWINOP_CUDA_ARCHS       \
                                                  "\",\"cuda_version\":\"" TWINOP_CUDA_VERSION \
                                                  "\",\"source\":\"" TWINOP_SOURCE "\"}";      \
  extern "C" const twinop_table* twinop_library(std::uint32_t) {                               \
    static const twinop_table kTable = {                                                       \
        TWINOP_ABI_VERSION,                                                                    \
        sizeof(twinop_table),                                                                  \
        TWINOP_VERSION,                                                                        \
        domain,                                                                                \
        domain_version,                                                                        \
        TWINOP_CUDA_ARCHS,                                                                     \
        static_cast<std::size_t>(__stop_twinop_ops - __start_twinop_ops),                      \
        __start_twinop_ops};                                                                   \
    return &kTable;                                                                            \
  }
