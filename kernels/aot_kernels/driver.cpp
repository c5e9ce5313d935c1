#include "twinop/aot_kernels/driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace twinop::aot_kernels {
namespace {

Driver Load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(
        std::string("no NVIDIA driver: libcuda.so.1 cannot be loaded (") + dlerror() +
        "). The op's GPU kernels need one; without a GPU, run the model on the CPU provider");
  const Driver driver{{library}};
  if (driver.missing != nullptr)
    throw std::runtime_error(std::string("libcuda.so.1 has no ") + driver.missing +
                             ". Install an NVIDIA driver of CUDA 11.8 or newer (520)");
  return driver;
}

CurrentContext OnContextOf(Stream stream) {
  Context context = nullptr;
  Check(GetDriver().StreamGetCtx(stream, &context), "asking for the CUDA context of a stream");
  return {GetDriver(), context};
}

}  // namespace

const Driver& GetDriver() {
  static const Driver driver = Load();  // after an exception, the next call tries again
  return driver;
}

void CopyOnDevice(void* to, const void* from, std::size_t bytes, Stream stream) {
  const CurrentContext current = OnContextOf(stream);
  Check(GetDriver().MemcpyDtoDAsync(reinterpret_cast<DevicePointer>(to),
                                    reinterpret_cast<DevicePointer>(from), bytes, stream),
        "copying a tensor");
}

void CopyToHost(void* to, const void* from, std::size_t bytes, Stream stream) {
  const CurrentContext current = OnContextOf(stream);
  Check(GetDriver().MemcpyDtoHAsync(to, reinterpret_cast<DevicePointer>(from), bytes, stream),
        "reading the sizes of outputs");
  Check(GetDriver().StreamSynchronize(stream), "waiting for the sizes of outputs");
}

void ThrowDriverError(Result result, const char* what, const char* of, const char* note) {
  const char* name = nullptr;
  const char* text = nullptr;
  GetDriver().GetErrorName(result, &name);
  GetDriver().GetErrorString(result, &text);
  throw std::runtime_error(std::string(what) + of + " failed: " +
                           (name != nullptr ? name : "error " + std::to_string(result)) + ": " +
                           (text != nullptr ? text : "unknown to this driver") + note);
}

}  // namespace twinop::aot_kernels
