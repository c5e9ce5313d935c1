// What the programs of this folder share: a session with custom ops, and how failures are said.
#pragma once
#include <onnxruntime_cxx_api.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

// Opens a model on the CPU, or on the first GPU. ONNX Runtime says what is wrong if it fails.
inline Ort::Session Open(const Ort::Env& env, const char* model,
                         const std::vector<std::string>& libraries, bool cuda = false) {
  Ort::SessionOptions options;
  for (const std::string& path : libraries) options.RegisterCustomOpsLibrary(path.c_str());
  if (cuda) options.AppendExecutionProvider_CUDA(OrtCUDAProviderOptions{});
  return Ort::Session(env, model, options);
}

// Calls the program's function, and returns its exit status.
template <class Function>
int Run(const char* program, Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 1;
  }
}
