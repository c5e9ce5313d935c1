# CUDA or not: sets TWINOP_CUDA, enables the language and chooses the architectures.
#
# TWINOP_CUDA_ARCHS (variable or environment): `native` (default: this machine's GPUs; 90 without a GPU), `all`
# (what wheels use), or a list like `80;90`. Only the last of a list has PTX, which newer GPUs compile for
# themselves; `-real` leaves it out. `80:90` compiles the code of 8.0 for a GPU of 9.0: kernels and choices of 8.0 run
# there, for tests.

set(TWINOP_OLDEST_ARCH 80)  # bf16 and cp.async need it
set(TWINOP_OLDEST_NVCC 12.4)  # the first with __maxnreg__
set(TWINOP_ALL_ARCHS 80 86 89 90 100 120)  # what `all` is, as far as nvcc knows them
set(TWINOP_CUDA_ARCHS "native" CACHE STRING "CUDA architectures: native, all, or a list such as 80,90")
if(DEFINED ENV{TWINOP_CUDA_ARCHS})
  set(TWINOP_CUDA_ARCHS "$ENV{TWINOP_CUDA_ARCHS}" CACHE STRING "" FORCE)
endif()
option(TWINOP_WITH_CUDA "Build the CUDA kernels where nvcc is found" ON)

# In the cache, for projects that have this one as a subdirectory.
set(TWINOP_CUDA OFF CACHE INTERNAL "Whether the CUDA kernels are built")
if(TWINOP_WITH_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)  # not check_language, which configures a project of its own: seconds
    find_program(TWINOP_NVCC NAMES $ENV{CUDACXX} nvcc PATHS ENV PATH ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda
                 PATH_SUFFIXES bin NO_DEFAULT_PATH)
    if(TWINOP_NVCC)
      set(CMAKE_CUDA_COMPILER "${TWINOP_NVCC}" CACHE FILEPATH "")
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(TWINOP_CUDA ON CACHE INTERNAL "")
  endif()
endif()
if(NOT TWINOP_CUDA)
  set(why "TWINOP_WITH_CUDA is off")
  if(TWINOP_WITH_CUDA)
    set(why "no nvcc found (PATH, CUDACXX)")
  endif()
  message(STATUS "CUDA: ${why}: building the CPU part only")
  set(TWINOP_CUDA_ARCH_LIST "none")
  return()
endif()

execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE version ERROR_QUIET)
if(version MATCHES "V([0-9]+[.][0-9]+[.][0-9]+)" AND CMAKE_MATCH_1 VERSION_LESS TWINOP_OLDEST_NVCC)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_MATCH_1}; twinop's kernels need CUDA "
                      "${TWINOP_OLDEST_NVCC} or later. Install a newer CUDA toolkit and set CUDACXX to its nvcc.")
endif()
# The architectures that this nvcc knows, for `all` and for a clear error.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
string(REGEX MATCHALL "compute_([0-9]+)" known "${known}")
list(TRANSFORM known REPLACE "compute_" "")
set(new_enough "^([89][0-9]|[0-9][0-9][0-9]+)$")  # from 80 on
list(FILTER known INCLUDE REGEX "${new_enough}")

string(REPLACE "," ";" wanted "${TWINOP_CUDA_ARCHS}")
if(wanted STREQUAL "native")
  find_program(TWINOP_NVIDIA_SMI nvidia-smi)
  set(gpus "")
  if(TWINOP_NVIDIA_SMI)
    execute_process(COMMAND "${TWINOP_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE gpus ERROR_QUIET)
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" gpus "${gpus}")
  list(TRANSFORM gpus REPLACE "\\." "")
  list(REMOVE_DUPLICATES gpus)
  set(wanted ${gpus})
  list(FILTER wanted INCLUDE REGEX "${new_enough}")
  if(gpus AND NOT wanted)
    list(GET gpus 0 wanted)  # refused below
  elseif(NOT gpus)
    set(wanted 90)
    message(STATUS "CUDA: no GPU here to ask; building for sm_90 (TWINOP_CUDA_ARCHS chooses)")
  endif()
  list(TRANSFORM wanted APPEND "-real")
elseif(wanted STREQUAL "all")
  set(wanted "")
  foreach(arch IN LISTS TWINOP_ALL_ARCHS)
    if(arch IN_LIST known)
      list(APPEND wanted ${arch})
    endif()
  endforeach()
  list(GET wanted -1 newest)
  list(TRANSFORM wanted APPEND "-real")
  list(APPEND wanted "${newest}-virtual")
endif()

set(TWINOP_CUDA_GENERATE "" CACHE INTERNAL "The option of nvcc for one architecture's code on another GPU")
if(wanted MATCHES "^([0-9]+):([0-9]+)$")  # CMAKE_CUDA_ARCHITECTURES cannot say it
  set(TWINOP_CUDA_GENERATE "--generate-code=arch=compute_${CMAKE_MATCH_1},code=sm_${CMAKE_MATCH_2}" CACHE INTERNAL "")
  set(wanted ${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
endif()
foreach(arch IN LISTS wanted)
  set(number "")
  if(arch MATCHES "^([0-9]+)[af]?(-real|-virtual)?$")
    set(number ${CMAKE_MATCH_1})
  endif()
  if(number AND number LESS TWINOP_OLDEST_ARCH)
    message(FATAL_ERROR "TWINOP_CUDA_ARCHS=${TWINOP_CUDA_ARCHS}: compute capability ${number} is too old; twinop's CUDA "
                        "kernels need ${TWINOP_OLDEST_ARCH} (8.0) or later. Build for the CPU (./build.sh build --cpu, "
                        "twinop build --cpu, -DTWINOP_WITH_CUDA=OFF), or for another GPU.")
  elseif(NOT number IN_LIST known)
    string(REPLACE ";" " " list "${known}")
    message(FATAL_ERROR "TWINOP_CUDA_ARCHS=${TWINOP_CUDA_ARCHS}: this nvcc (${CMAKE_CUDA_COMPILER}) does not know "
                        "architecture ${arch}; it knows ${list}. Choose one of these, or install a newer CUDA "
                        "toolkit and set CUDACXX to its nvcc.")
  endif()
endforeach()
# PTX, which newer GPUs compile for themselves, for the newest architecture of a list only.
list(LENGTH wanted count)
if(count GREATER 1)
  list(SORT wanted COMPARE NATURAL)
  list(POP_BACK wanted newest)
  list(TRANSFORM wanted REPLACE "^[0-9]+$" "\\0-real")
  list(APPEND wanted ${newest})
endif()
string(REPLACE ";" "," TWINOP_CUDA_ARCH_LIST "${wanted}")
if(TWINOP_CUDA_GENERATE)
  set(TWINOP_CUDA_ARCH_LIST "${TWINOP_CUDA_ARCHS}")
  set(wanted OFF)
endif()
set(CMAKE_CUDA_ARCHITECTURES ${wanted})
set(TWINOP_CUDA_ARCHITECTURES ${wanted} CACHE INTERNAL "")
enable_language(CUDA)
# Of the host code, which launches kernels: -O3 makes that larger and the build longer, and no launch faster.
string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
message(STATUS "CUDA: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${TWINOP_CUDA_ARCH_LIST}")
