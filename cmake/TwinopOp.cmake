# What registers an op.
set(TWINOP_MACROS "TWINOP_(OP|CPU_OP|CUDA_OP|ELEMENTWISE|ROWWISE|UNARY)[ \t]*\\(")

# twinop_add_op(relu kernels/ops/relu.h)
#
# One OBJECT library, twinop_op_<name>, for one op header: compiled by the C++ compiler for the record and
# the CPU launcher and, with CUDA, by nvcc for the CUDA launcher. Every library that links the target
# has the same object code. nvcc compiles the backward ops of a header separately (InThisPart in
# kernels/record/registry.h): inference does not load their kernels, and both parts compile at the same time.
function(twinop_add_op name header)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/ops")
  set(sources "${folder}/${name}.cpp")
  set(include "#include \"${header}\"\n")
  file(CONFIGURE OUTPUT "${sources}" CONTENT "${include}" @ONLY)
  cmake_path(ABSOLUTE_PATH header BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE path)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
  file(STRINGS "${path}" ops REGEX "${TWINOP_MACROS}")
  string(REGEX REPLACE "TWINOP_CPU_OP" "" cuda_ops "${ops}")
  if(TWINOP_CUDA AND (NOT ops OR cuda_ops MATCHES "${TWINOP_MACROS}"))
    file(STRINGS "${path}" backward_ops REGEX "_backward|TWINOP_UNARY")
    set(parts 0)
    set(macro "TWINOP_ALL_PARTS")  # and those of headers that this one includes
    if(backward_ops)
      set(parts 0 1)
      set(macro "TWINOP_BACKWARD_PART")
    endif()
    foreach(part IN LISTS parts)
      set(source "${folder}/${name}.${part}.cu")
      file(CONFIGURE OUTPUT "${source}" CONTENT "#define ${macro} ${part}\n${include}" @ONLY)
      list(PREPEND sources "${source}")  # the longer compilations begin first
    endforeach()
  endif()
  add_library(twinop_op_${name} OBJECT ${sources})
  target_link_libraries(twinop_op_${name} PUBLIC twinop_kernels_api)
  set_target_properties(twinop_op_${name} PROPERTIES CUDA_ARCHITECTURES "${TWINOP_CUDA_ARCHITECTURES}")
endfunction()

# twinop_add_library(mish DOMAIN mish [DOMAIN_VERSION 1] [OPS twinop_op_mish ...] [NO_TABLE] [mish.h ...])
#
# lib<name>.so: the ops as one file for ONNX Runtime and PyTorch. The domain is the one that ONNX models name
# and, with "_" for ".", the namespace in torch.ops. Ops are headers or sources, or targets of twinop_add_op. Sources
# without ops are compiled as they are, .cu files where there is CUDA; objects and archives, which come last, are linked.
# With NO_TABLE, one of them has the library's
# table (kernels/library.h).
macro(twinop_add_library)
  if(TWINOP_CUDA)
    enable_language(CUDA)  # in the caller's directory too: a macro, because a function cannot enable a language
  endif()
  _twinop_add_library(${ARGV})
endmacro()

function(_twinop_add_library name)
  cmake_parse_arguments(arg "NO_TABLE" "DOMAIN;DOMAIN_VERSION" "OPS" ${ARGN})
  if(NOT "${arg_DOMAIN}" MATCHES "^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z0-9_]+)*$")
    message(FATAL_ERROR "twinop_add_library(${name} DOMAIN \"${arg_DOMAIN}\"): expected a domain such as mish or "
                        "my.ops: letters, digits and _, with dots between")
  endif()
  foreach(reserved ai.onnx aten prim com.microsoft)
    if(arg_DOMAIN STREQUAL reserved OR arg_DOMAIN MATCHES "^${reserved}[.]")
      message(FATAL_ERROR "twinop_add_library(${name} DOMAIN ${arg_DOMAIN}): this domain belongs to ONNX, ONNX "
                          "Runtime or PyTorch; choose another one")
    endif()
  endforeach()
  if(NOT arg_DOMAIN_VERSION)
    set(arg_DOMAIN_VERSION 1)
  endif()
  set(plain "")
  set(objects "")
  set(number 0)
  foreach(source IN LISTS arg_UNPARSED_ARGUMENTS)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
    if(source MATCHES "[.][oa]$")
      list(APPEND objects "${source}")
      continue()
    endif()
    file(STRINGS "${source}" ops REGEX "${TWINOP_MACROS}")
    if(ops OR source MATCHES "[.](h|hpp|cuh)$")
      twinop_add_op(${name}.${number} "${source}")  # another library, or another folder, may have a file of this name
      list(APPEND arg_OPS twinop_op_${name}.${number})
    elseif(TWINOP_CUDA OR NOT source MATCHES "[.]cu$")
      list(APPEND plain "${source}")
    endif()
    math(EXPR number "${number} + 1")
  endforeach()
  if(NOT arg_NO_TABLE)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/ops/library_${name}.cpp")
    file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT
         "#include \"twinop/library.h\"\n\nTWINOP_LIBRARY(\"${arg_DOMAIN}\", ${arg_DOMAIN_VERSION})\n")
    list(PREPEND plain "${source}")
  endif()
  add_library(${name} SHARED ${plain})
  target_link_libraries(${name} PRIVATE twinop_kernels_api twinop_link_options ${arg_OPS} ${objects} twinop_ort twinop_cuda_runtime dl)
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${TWINOP_CUDA_ARCHITECTURES}")
  twinop_place_library(${name})
  # twinop loads a library from build/ of the current folder only if this file is there
  # (twinop/libraries/find.py).
  file(TOUCH "${PROJECT_BINARY_DIR}/.lib${name}.so.built")
endfunction()

function(twinop_place_library name)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
endfunction()
