# How ops are compiled and linked, said once: CMake's targets have these flags, and twinop_write_flags writes them
# into a file for `twinop build`, which has no CMake.

# Several of these libraries share one process, so none may use another's symbols.
set(TWINOP_CXX_OPTIONS -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra)
set(TWINOP_GNU_OPTIONS -fno-gnu-unique)
set(TWINOP_CUDA_OPTIONS -Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall,-Wextra
                        --expt-relaxed-constexpr --fmad=false)
# Kernels are many instances of few templates. Compression makes them a quarter as large.
set(TWINOP_CUDA_12_8_OPTIONS --compress-mode=size)

# Without -fno-trapping-math, GCC does not vectorise a choice between two results. Without contraction into FMA, a
# result does not depend on the instruction set. The scheduler moves instructions across the registers of a block
# (kernels/elementwise/cpu.h, BlockLoop).
set(TWINOP_KERNEL_OPTIONS -O3 -ftree-vectorize -fno-trapping-math -ffp-contract=off)
set(TWINOP_KERNEL_GNU_OPTIONS -fschedule-insns -fsched-pressure)

# nodelete: a runtime may unload the library with its last session and load it again for the next one. Each time,
# the ops and the CUDA runtime, which live as long as the process, would be lost.
set(TWINOP_LINK_OPTIONS -Wl,--no-undefined -Wl,-z,nostart-stop-gc -Wl,-z,nodelete)
# Of libraries with the archive: nothing else refers to it. Each library calls its own twinop_library.
set(TWINOP_ARCHIVE_LINK_OPTIONS -Wl,--undefined=RegisterCustomOps -Wl,-Bsymbolic)

# twinop_write_flags(): compile_flags.json and exports.map, in build/ beside the libraries and the archive.
function(twinop_write_flags)
  set(standard ${CMAKE_CXX17_EXTENSION_COMPILE_OPTION})
  separate_arguments(release UNIX_COMMAND "${CMAKE_CXX_FLAGS_RELEASE}")
  set(cxx ${release} ${standard} ${TWINOP_CXX_OPTIONS} ${TWINOP_KERNEL_OPTIONS})
  set(gnu ${TWINOP_GNU_OPTIONS} ${TWINOP_KERNEL_GNU_OPTIONS})
  separate_arguments(release UNIX_COMMAND "${CMAKE_CUDA_FLAGS_RELEASE}")
  set(cuda "")
  if(TWINOP_CUDA)
    set(cuda ${release} ${CMAKE_CUDA17_EXTENSION_COMPILE_OPTION} ${TWINOP_CUDA_OPTIONS})
  endif()
  set(cuda_12_8 ${TWINOP_CUDA_12_8_OPTIONS})
  set(link ${TWINOP_LINK_OPTIONS} ${TWINOP_ARCHIVE_LINK_OPTIONS})
  set(archs ${TWINOP_ALL_ARCHS})
  set(entries "")
  foreach(key cxx gnu cuda cuda_12_8 link archs)
    list(TRANSFORM ${key} PREPEND "\"")
    list(TRANSFORM ${key} APPEND "\"")
    list(JOIN ${key} ", " values)
    list(APPEND entries "  \"${key}\": [${values}]")
  endforeach()
  list(APPEND entries "  \"version\": \"${PROJECT_VERSION}\"")
  list(JOIN entries ",\n" entries)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/compile_flags.json" CONTENT "{\n${entries}\n}\n" @ONLY)
  configure_file("${PROJECT_SOURCE_DIR}/ort_customop/exports.map" "${PROJECT_BINARY_DIR}/exports.map" COPYONLY)
endfunction()
