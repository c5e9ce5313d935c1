# What the adapters compile against: ORT's headers (a custom-op library does not link ORT) and LibTorch's
# stable ABI. Python is the interpreter whose torch is used.
include(OrtHeaders)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# At every configure, because ORT_ROOT may have changed or the cache may be gone.
set(TWINOP_ORT_INCLUDE "" CACHE PATH "Folder of onnxruntime_c_api.h; cmake/OrtHeaders.cmake finds it when empty")
set(ort_include "${TWINOP_ORT_INCLUDE}")
if(NOT ort_include)
  twinop_find_ort_headers(ort_include)
endif()
add_library(twinop_ort_headers INTERFACE)
target_include_directories(twinop_ort_headers SYSTEM INTERFACE "${ort_include}")

# ---- LibTorch. Not find_package(Torch): a CUDA build of torch would ask for its whole toolkit, and the
# stable ABI needs two libraries only.
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import os, importlib.util as u; \
s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s and s.origin else '')"
                OUTPUT_VARIABLE torch OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch AND DEFINED ENV{TWINOP_TORCH_COMES})  # ./build.sh demo installs it meanwhile
  set(torch "${Python_SITEARCH}/torch")
endif()
if(NOT torch)
  message(FATAL_ERROR "PyTorch is not installed for ${Python_EXECUTABLE}. "
                      "./build.sh installs it into .venv. pip hides it from what it builds: "
                      "`pip install torch scikit-build-core ninja`, then `pip install --no-build-isolation .`")
endif()
add_library(twinop_torch_headers INTERFACE)
target_include_directories(twinop_torch_headers SYSTEM INTERFACE "${torch}/include")
# The stable ABI of torch 2.10: one library for that version and all later ones.
target_compile_definitions(twinop_torch_headers INTERFACE TORCH_TARGET_VERSION=0x020a000000000000 USE_CUDA)

add_library(twinop_libtorch INTERFACE)
target_link_directories(twinop_libtorch INTERFACE "${torch}/lib")
# libtorch.so loads the CUDA libraries of torch if there are any. No symbol here refers to it.
target_link_options(twinop_libtorch INTERFACE "LINKER:--no-as-needed")
target_link_libraries(twinop_libtorch INTERFACE torch torch_cpu)
