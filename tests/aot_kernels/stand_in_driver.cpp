// A stand-in for libcuda.so.1 that writes down what it is asked for, one JSON object a line. A
// kernel's name ends with the bytes of its parameters: "mish|8,8,4". CUDA's own header declares the
// structures.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {
struct Module {
  int device;
  std::string image;
};
struct Function {
  Module* module;
  std::string name;
};

std::mutex mutex;
std::string text;
int capabilities[2] = {90, 80};
int contexts[2];  // their addresses are the handles
std::string failing;
int failure = 0;
thread_local std::vector<CUcontext> stack;

void Write(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex);
  text += line + "\n";
}
CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }
int DeviceOf(CUcontext context) { return int(reinterpret_cast<int*>(context) - contexts); }
int Current() { return stack.empty() ? -1 : DeviceOf(stack.back()); }
std::string Number(unsigned long long value) { return std::to_string(value); }
CUresult Outcome(const char* function) {
  return failing == function ? static_cast<CUresult>(failure) : CUDA_SUCCESS;
}
}  // namespace

extern "C" {

// What the tests set and read.
const char* stand_in_text() {
  static std::string last;
  const std::lock_guard<std::mutex> lock(mutex);
  last.swap(text);
  text.clear();
  return last.c_str();
}
void stand_in_capability(int device, int capability) { capabilities[device] = capability; }
void stand_in_fail(const char* function, int result) {
  failing = function;
  failure = result;
}
void stand_in_context(int device) {
  stack.clear();
  if (device >= 0) stack.push_back(ContextOf(device));
}
int stand_in_current() { return Current(); }

CUresult cuInit(unsigned) { return Outcome("cuInit"); }

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? capabilities[device] / 10
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? capabilities[device] % 10
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448
                                                                                : -1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  std::snprintf(name, static_cast<std::size_t>(size), "Stand-in %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = ContextOf(device);
  Write("{\"call\": \"retain\", \"device\": " + Number(device) + "}");
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return cuCtxGetCurrent(context); }

CUresult cuMemcpyDtoDAsync(CUdeviceptr, CUdeviceptr, std::size_t, CUstream) { return CUDA_SUCCESS; }

CUresult cuMemcpyDtoHAsync(void*, CUdeviceptr, std::size_t, CUstream) { return CUDA_SUCCESS; }

CUresult cuMemHostAlloc(void**, std::size_t, unsigned) { return Outcome("cuMemHostAlloc"); }

CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* data, unsigned count,
                            CUjit_option* options, void** values) {
  const CUresult result = Outcome("cuModuleLoadDataEx");
  if (result != CUDA_SUCCESS) {
    if (count == 2 && options[0] == CU_JIT_ERROR_LOG_BUFFER)
      std::strcpy(static_cast<char*>(values[0]), "ptxas: line 3");
    return result;
  }
  const char* image = static_cast<const char*>(data);  // the tests' images are texts
  *module = reinterpret_cast<CUmodule>(new Module{Current(), image});
  Write("{\"call\": \"load\", \"device\": " + Number(Current()) + ", \"image\": \"" + image +
        "\", \"misaligned\": " + Number(reinterpret_cast<std::uintptr_t>(image) % 16) + "}");
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = reinterpret_cast<CUfunction>(new Function{reinterpret_cast<Module*>(module), name});
  return Outcome("cuModuleGetFunction");
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Write("{\"call\": \"set\", \"kernel\": \"" + reinterpret_cast<Function*>(function)->name +
        "\", \"attribute\": " + Number(attribute) + ", \"value\": " + Number(value) + "}");
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** parameters,
                          void**) {
  const CUresult result = Outcome("cuLaunchKernelEx");
  if (result != CUDA_SUCCESS) return result;
  const Function& function = *reinterpret_cast<Function*>(handle);
  const auto list = [](unsigned x, unsigned y, unsigned z) {
    return "[" + Number(x) + ", " + Number(y) + ", " + Number(z) + "]";
  };
  std::string line = "{\"call\": \"launch\", \"device\": " + Number(function.module->device) +
                     ", \"current\": " + std::to_string(Current()) + ", \"image\": \"" +
                     function.module->image + "\", \"kernel\": \"" + function.name + "\"";
  line += ", \"grid\": " + list(config->gridDimX, config->gridDimY, config->gridDimZ);
  line += ", \"block\": " + list(config->blockDimX, config->blockDimY, config->blockDimZ);
  line += ", \"shared\": " + Number(config->sharedMemBytes);
  line += ", \"stream\": " + Number(reinterpret_cast<std::uintptr_t>(config->hStream));
  line += ", \"attributes\": {";
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    const auto& cluster = attribute.value.clusterDim;
    line += std::string(i ? ", " : "") + "\"" + Number(attribute.id) + "\": ";
    line += attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                ? list(cluster.x, cluster.y, cluster.z)
                : Number(static_cast<unsigned>(attribute.value.cooperative));
  }
  line += "}, \"parameters\": [";
  const char* size = std::strchr(function.name.c_str(), '|');
  for (int i = 0; size != nullptr && size[0] != 0; ++i) {
    const long bytes = std::strtol(size + 1, const_cast<char**>(&size), 10);
    line += i ? ", \"" : "\"";
    for (long b = 0; b < bytes; ++b) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char*>(parameters[i])[b]);
      line += digits;
    }
    line += "\"";
  }
  Write(line + "]}");
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr place, unsigned char value, std::size_t bytes, CUstream) {
  Write("{\"call\": \"fill\", \"place\": " + Number(place) + ", \"value\": " + Number(value) +
        ", \"bytes\": " + Number(bytes) + "}");
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == CUDA_ERROR_INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_STAND_IN";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** string) {
  *string = "as the test asked";
  return CUDA_SUCCESS;
}

}  // extern "C"
