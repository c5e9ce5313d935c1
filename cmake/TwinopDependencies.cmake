# What the adapters compile against: ORT's headers (a custom-op library does not link ORT) and LibTorch's
# stable ABI. Python is the interpreter whose torch is used.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)

# ---- ONNX Runtime headers: cmake/ort_sdk.py finds or fetches them and prints the include folder. Asked at
# every configure (0.1 s): ORT_ROOT may have changed, or the cache may be gone.
set(TWINOP_ORT_INCLUDE "" CACHE PATH "Folder of onnxruntime_c_api.h; found by cmake/ort_sdk.py when empty")
set(ort_include "${TWINOP_ORT_INCLUDE}")
if(NOT ort_include)
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/ort_sdk.py"
                  OUTPUT_VARIABLE ort_include RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "No ONNX Runtime headers: see the lines above.")
  endif()
endif()
message(STATUS "ONNX Runtime headers: ${ort_include}")
add_library(twinop_ort_headers INTERFACE)
target_include_directories(twinop_ort_headers SYSTEM INTERFACE "${ort_include}")

# ---- LibTorch. Not find_package(Torch): a CUDA build of torch would ask for its whole toolkit, and the
# stable ABI needs two libraries only.
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import os, importlib.util as u; \
s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s else '')"
                OUTPUT_VARIABLE torch OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch)
  message(FATAL_ERROR "PyTorch is not installed for ${Python_EXECUTABLE}. "
                      "./build.sh installs it into .venv; or: pip install torch")
endif()
add_library(twinop_torch_headers INTERFACE)
target_include_directories(twinop_torch_headers SYSTEM INTERFACE "${torch}/include")
# The stable ABI of torch 2.10: one library for that version and all later ones.
target_compile_definitions(twinop_torch_headers INTERFACE TORCH_TARGET_VERSION=0x020a000000000000 USE_CUDA)

add_library(twinop_libtorch INTERFACE)
target_link_directories(twinop_libtorch INTERFACE "${torch}/lib")
# libtorch.so brings CUDA torch's libraries in where they exist; nothing here refers to it by name.
target_link_options(twinop_libtorch INTERFACE "LINKER:--no-as-needed")
target_link_libraries(twinop_libtorch INTERFACE torch torch_cpu)
