# What every op and every library is built with, here and in projects that use twinop: the flags of TwinopFlags.cmake
# and the CUDA of TwinopCuda.cmake. Needs TWINOP_VERSION.

add_library(twinop_options INTERFACE)
target_compile_features(twinop_options INTERFACE cxx_std_17)
target_compile_options(
  twinop_options
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${TWINOP_CXX_OPTIONS}>
            $<$<COMPILE_LANG_AND_ID:CXX,GNU>:${TWINOP_GNU_OPTIONS}>
            $<$<COMPILE_LANGUAGE:CUDA>:${TWINOP_CUDA_OPTIONS};${TWINOP_CUDA_GENERATE}>
            $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<VERSION_GREATER_EQUAL:$<CUDA_COMPILER_VERSION>,12.8>>:${TWINOP_CUDA_12_8_OPTIONS}>)
target_compile_definitions(
  twinop_options INTERFACE TWINOP_VERSION="${TWINOP_VERSION}" TWINOP_CUDA_ARCHS="${TWINOP_CUDA_ARCH_LIST}"
                           TWINOP_CUDA_VERSION="${CMAKE_CUDA_COMPILER_VERSION}"
                           $<$<BOOL:${TWINOP_CUDA}>:TWINOP_WITH_CUDA>)

add_library(twinop_link_options INTERFACE)
target_link_options(twinop_link_options INTERFACE ${TWINOP_LINK_OPTIONS} $<$<NOT:$<CONFIG:Debug,RelWithDebInfo>>:-Wl,--strip-all>)

# cudart is linked statically, so that no library needs libcudart.so.
add_library(twinop_cuda_runtime INTERFACE)
if(TWINOP_CUDA)
  # By its path: CUDA::cudart_static is of find_package(CUDAToolkit), which asks nvcc again.
  find_library(TWINOP_CUDART libcudart_static.a PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} NO_DEFAULT_PATH)
  if(NOT TWINOP_CUDART)
    message(FATAL_ERROR "${CMAKE_CUDA_COMPILER}: its toolkit has no libcudart_static.a, which libraries link. Install its "
                        "cudart development package (Debian, Ubuntu: cuda-cudart-dev), or set CUDACXX to another nvcc")
  endif()
  target_link_libraries(twinop_cuda_runtime INTERFACE "${TWINOP_CUDART}" pthread dl rt)
endif()

# The sources of kernels.
add_library(twinop_kernels_api INTERFACE)
target_link_libraries(twinop_kernels_api INTERFACE twinop_options)
target_compile_options(
  twinop_kernels_api INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${TWINOP_KERNEL_OPTIONS}>
                               $<$<COMPILE_LANG_AND_ID:CXX,GNU>:${TWINOP_KERNEL_GNU_OPTIONS}>)

# What links `target` exports the names in the file `map` alone, and is linked again when that file changes.
function(twinop_link_with_exports target map)
  target_link_options(${target} INTERFACE "-Wl,--version-script=${map}" ${ARGN})
  set_property(TARGET ${target} PROPERTY INTERFACE_LINK_DEPENDS "${map}")
endfunction()
