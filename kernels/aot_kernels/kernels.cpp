#include "twinop/aot_kernels/kernels.h"

#include <charconv>
#include <map>
#include <stdexcept>
#include <string>

namespace twinop::aot_kernels {

struct Devices : std::map<int, Device> {};

int Image::Architecture() const {
  int number = 0;
  const std::size_t begin = target.find('_') + 1;
  std::from_chars(target.data() + begin, target.data() + target.size(), number);
  return number;
}

namespace {

// Whether the device can run the code. "sm_90a" serves one architecture; other cubins serve later
// devices of their generation, PTX all later ones.
bool Serves(const Image& image, int device) {
  const int architecture = image.Architecture();
  if (image.IsSpecific()) return architecture == device;
  if (image.IsPtx()) return architecture <= device;
  return architecture / 10 == device / 10 && architecture <= device;
}

// The best code for the device: a cubin rather than PTX, then the newest, then the most specific.
const Image* Choose(const Kernel& kernel, int device) {
  const auto rank = [](const Image& image) {
    return (image.IsPtx() ? 0 : 100000) + image.Architecture() * 10 + (image.IsSpecific() ? 1 : 0);
  };
  const Image* best = nullptr;
  for (std::size_t i = 0; i < kernel.image_count; ++i) {
    const Image& image = kernel.images[i];
    if (Serves(image, device) && (best == nullptr || rank(image) > rank(*best))) best = &image;
  }
  return best;
}

class Loader {
 public:
  Loader(const char* archs, int ordinal) : archs_(archs), driver_(GetDriver()) {
    Check(driver_.Init(0), "starting CUDA");
    Check(driver_.DeviceGet(&id_, ordinal), "finding CUDA device ",
          std::to_string(ordinal).c_str());
  }

  void Open(Device* device, std::size_t kernels) const {
    device->architecture =
        10 * Attribute(kComputeCapabilityMajor) + Attribute(kComputeCapabilityMinor);
    Check(driver_.DevicePrimaryCtxRetain(&device->context, id_),
          "making the device's CUDA context");
    device->kernels = std::make_unique<LoadedKernel[]>(kernels);
  }

  LoadedKernel Load(const Kernel& kernel, const Device& device) const {
    const Image* image = Choose(kernel, device.architecture);
    if (image == nullptr) throw std::runtime_error(NoImage(kernel, device.architecture));
    const int shared = Attribute(kMaxSharedBytesOptIn);
    if (image->shared_bytes > static_cast<unsigned>(shared))
      throw std::runtime_error(std::string(kernel.label) + ": needs " +
                               std::to_string(image->shared_bytes) +
                               " bytes of shared memory; the GPU " + Name() + " has " +
                               std::to_string(shared) + ". Choose smaller blocks for it");
    char log[1024] = "\n";  // of the driver's compiler
    int options[] = {kJitErrorLog, kJitErrorLogBytes};
    void* values[] = {log + 1, reinterpret_cast<void*>(sizeof(log) - 2)};
    Module module = nullptr;
    const Result result =
        driver_.ModuleLoadDataEx(&module, image->code, image->IsPtx() ? 2 : 0, options, values);
    if (result != 0)
      ThrowDriverError(result, "loading ", kernel.label, image->IsPtx() && log[1] != 0 ? log : "");
    Function function = nullptr;
    Check(driver_.ModuleGetFunction(&function, module, kernel.name), "loading ", kernel.label);
    Check(driver_.FuncSetAttribute(function, kFunctionMaxDynamicSharedBytes,
                                   static_cast<int>(image->shared_bytes)),
          "asking for the shared memory of ", kernel.label);
    if (kernel.cluster > 8)
      Check(driver_.FuncSetAttribute(function, kFunctionNonPortableCluster, 1),
            "asking for the cluster of ", kernel.label);
    return {function, &kernel, image};
  }

  const Driver& driver() const { return driver_; }

 private:
  int Attribute(int attribute) const {
    int value = 0;
    Check(driver_.DeviceGetAttribute(&value, attribute, id_), "asking for a property of the GPU");
    return value;
  }

  std::string Name() const {
    char name[128] = "";
    driver_.DeviceGetName(name, sizeof(name) - 1, id_);
    return name;
  }

  std::string NoImage(const Kernel& kernel, int device) const {
    std::string cubins, ptx;
    for (std::size_t i = 0; i < kernel.image_count; ++i) {
      const Image& image = kernel.images[i];
      std::string& list = image.IsPtx() ? ptx : cubins;
      list += (list.empty() ? "" : ", ");
      list += image.target.substr(image.target.find('_') + 1);
    }
    return std::string(kernel.label) + ": the library has no code for the GPU " + Name() +
           " (compute capability " + std::to_string(device / 10) + "." +
           std::to_string(device % 10) + "). It has machine code for " +
           (cubins.empty() ? "none" : cubins) + " and PTX for " + (ptx.empty() ? "none" : ptx) +
           ". Build it with: twinop build --archs " + archs_ + "," + std::to_string(device);
  }

  const char* archs_;
  const Driver& driver_;
  int id_ = 0;
};

}  // namespace

const Device& KernelTable::Load(const twinop_call& call, std::initializer_list<OfDType> wanted) {
  const int ordinal = call.context->device_index;
  // The first input's dtype says which combination a call has: other inputs may be absent.
  const std::int32_t dtype =
      call.input_count == 0 ? TWINOP_NONE : static_cast<std::int32_t>(call.inputs[0].dtype);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Loader loader(archs_, ordinal);
  if (devices_ == nullptr) devices_ = new Devices;
  Device& device = (*devices_)[ordinal];
  if (device.kernels == nullptr) loader.Open(&device, count_);
  const CurrentContext current(loader.driver(), device.context);
  for (const auto& [of_dtype, kernels] : wanted) {
    if (dtype != TWINOP_NONE && dtype != of_dtype) continue;
    for (const int kernel : kernels) {
      LoadedKernel& loaded = device.kernels[kernel];
      if (loaded.function == nullptr) loaded = loader.Load(kernels_[kernel], device);
    }
  }
  return device;
}

}  // namespace twinop::aot_kernels
