# twinop_add_op(relu kernels/ops/relu.h)
#
# One OBJECT library, twinop_op_<name>, for one op header: compiled by the C++ compiler for the record and
# the CPU launcher and, with CUDA, by nvcc for the CUDA launcher. Every library that links the target
# carries the very same object code.
function(twinop_add_op name header)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/ops")
  set(sources "${folder}/${name}.cpp")
  if(TWINOP_CUDA)
    list(APPEND sources "${folder}/${name}.cu")
  endif()
  foreach(source IN LISTS sources)
    file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${header}\"\n" @ONLY)
  endforeach()
  add_library(twinop_op_${name} OBJECT ${sources})
  target_link_libraries(twinop_op_${name} PUBLIC twinop_kernels_api)
endfunction()

# twinop_add_ort_library(custom_relu OPS relu): lib<name>.so, an ONNX Runtime custom-op library of these ops.
function(twinop_add_ort_library name)
  cmake_parse_arguments(arg "" "" "OPS" ${ARGN})
  add_library(${name} SHARED)
  target_link_libraries(${name} PRIVATE twinop_ort_adapter twinop_core ${arg_OPS} twinop_cuda_runtime)
  twinop_finish_library(${name} ort_customop/exports.map)
endfunction()

# twinop_add_torch_library(twinop_torch OPS relu): lib<name>.so, the same ops for PyTorch.
function(twinop_add_torch_library name)
  cmake_parse_arguments(arg "" "" "OPS" ${ARGN})
  add_library(${name} SHARED)
  target_link_libraries(${name} PRIVATE twinop_torch_adapter twinop_core ${arg_OPS} twinop_cuda_runtime
                                        twinop_libtorch)
  twinop_finish_library(${name} torch_op/exports.map)
endfunction()

function(twinop_finish_library name exports)
  set(map "${PROJECT_SOURCE_DIR}/${exports}")
  # nodelete: a runtime may unload the library with its last session and load it again for the next one, and what
  # the library set up for the life of the process (the ops, the CUDA runtime) would be lost every time.
  target_link_options(${name} PRIVATE "LINKER:--version-script=${map}" "LINKER:--no-undefined"
                                      "LINKER:-z,nostart-stop-gc" "LINKER:-z,nodelete")
  set_target_properties(${name} PROPERTIES LINK_DEPENDS "${map}" LINKER_LANGUAGE CXX
                                           LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
endfunction()
