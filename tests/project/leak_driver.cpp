// Loads models with a custom-op library, runs them and lets go of everything, again and again, as a
// service does that replaces its models: LeakSanitizer reports at the end what was lost
// (tests/project/test_sanitizers.py).
//
//   leak_driver <libonnxruntime.so> <custom-op library> <model> ...
//
// The models take one fp32 input; a model that fails to load or to run is fine, errors must not
// leak either.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

const OrtApi* api = nullptr;

bool Ok(OrtStatus* status) {
  if (status == nullptr) return true;
  std::printf("%s\n", api->GetErrorMessage(status));
  api->ReleaseStatus(status);
  return false;
}

void Run(OrtSession* session, OrtAllocator* allocator, OrtMemoryInfo* memory, std::int64_t rows) {
  std::vector<float> data(static_cast<std::size_t>(rows) * 3, -1.0F);
  const std::int64_t shape[] = {rows, 3};
  OrtValue* input = nullptr;
  if (!Ok(api->CreateTensorWithDataAsOrtValue(memory, data.data(), data.size() * sizeof(float),
                                              shape, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                                              &input)))
    return;
  char* input_name = nullptr;
  std::size_t count = 0;
  std::vector<char*> names;
  if (Ok(api->SessionGetInputName(session, 0, allocator, &input_name)) &&
      Ok(api->SessionGetOutputCount(session, &count))) {
    names.resize(count);
    std::vector<OrtValue*> outputs(count);
    for (std::size_t i = 0; i < count; ++i)
      Ok(api->SessionGetOutputName(session, i, allocator, &names[i]));
    Ok(api->Run(session, nullptr, &input_name, &input, 1, names.data(), count, outputs.data()));
    for (OrtValue* output : outputs) api->ReleaseValue(output);
  }
  for (char* name : names) allocator->Free(allocator, name);
  allocator->Free(allocator, input_name);
  api->ReleaseValue(input);
}

void LoadAndRun(OrtEnv* env, const char* library, const char* model) {
  OrtAllocator* allocator = nullptr;
  OrtMemoryInfo* memory = nullptr;
  OrtSessionOptions* options = nullptr;
  OrtSession* session = nullptr;
  if (Ok(api->GetAllocatorWithDefaultOptions(&allocator)) &&
      Ok(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory)) &&
      Ok(api->CreateSessionOptions(&options)) &&
      Ok(api->RegisterCustomOpsLibrary_V2(options, library)) &&
      Ok(api->CreateSession(env, model, options, &session)))
    for (std::int64_t rows : {0, 1, 70000}) Run(session, allocator, memory, rows);
  if (session != nullptr) api->ReleaseSession(session);
  if (options != nullptr) api->ReleaseSessionOptions(options);
  if (memory != nullptr) api->ReleaseMemoryInfo(memory);
}

}  // namespace

int main(int count, char** arguments) {
  void* runtime = dlopen(arguments[1], RTLD_NOW);
  auto base = runtime == nullptr
                  ? nullptr
                  : reinterpret_cast<decltype(&OrtGetApiBase)>(dlsym(runtime, "OrtGetApiBase"));
  if (base == nullptr) {
    std::printf("no onnxruntime: %s\n", dlerror());
    return 2;
  }
  api = base()->GetApi(18);
  OrtEnv* env = nullptr;
  if (!Ok(api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "leaks", &env))) return 2;
  for (int cycle = 0; cycle < 3; ++cycle)
    for (int i = 3; i < count; ++i) LoadAndRun(env, arguments[2], arguments[i]);
  api->ReleaseEnv(env);
  std::printf("done\n");
}
