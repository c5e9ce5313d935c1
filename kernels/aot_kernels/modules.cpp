#include "twinop/aot_kernels/modules.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "twinop/aot_kernels/lz4.h"

namespace twinop::aot_kernels {
namespace {

// Whether the device can run the code. "90a" serves one architecture; other cubins serve later
// devices of their generation, PTX all later ones.
bool Serves(const Image& image, int device) {
  if (image.is_specific) return image.architecture == device;
  if (image.is_ptx) return image.architecture <= device;
  return image.architecture / 10 == device / 10 && image.architecture <= device;
}

// The best code for the device: a cubin rather than PTX, then the newest, then the most specific.
const Image* Choose(const Kernel& kernel, int device) {
  const auto rank = [](const Image& image) {
    return (image.is_ptx ? 0 : 100000) + image.architecture * 10 + (image.is_specific ? 1 : 0);
  };
  const Image* best = nullptr;
  for (const Image& image : kernel.images)
    if (Serves(image, device) && (best == nullptr || rank(image) > rank(*best))) best = &image;
  return best;
}

std::string CapabilityText(int architecture) {
  return std::to_string(architecture / 10) + "." + std::to_string(architecture % 10);
}

// What the driver gets, or nothing where that is the image itself.
std::string Unpack(const Image& image, const Kernel& kernel) {
  std::string code(image.size == image.unpacked ? 0 : image.unpacked, '\0');
  if (Crc32(image.data, image.size) != image.checksum ||
      (!code.empty() && !UnpackLz4(image.data, image.size, code.data(), code.size())))
    throw std::runtime_error(std::string(kernel.label) +
                             ": its code is damaged. Copy or build the library again");
  return code;
}

class Loader {
 public:
  Loader(const Payload& payload, int ordinal) : payload_(payload), driver_(GetDriver()) {
    Check(driver_.Init(0), "starting CUDA");
    Check(driver_.DeviceGet(&id_, ordinal), "finding CUDA device ",
          std::to_string(ordinal).c_str());
  }

  void Open(Device* device) const {
    device->architecture =
        10 * Attribute(kComputeCapabilityMajor) + Attribute(kComputeCapabilityMinor);
    Check(driver_.DevicePrimaryCtxRetain(&device->context, id_),
          "making the device's CUDA context");
    device->kernels = std::make_unique<LoadedKernel[]>(payload_.kernels.size());
  }

  LoadedKernel Load(const Kernel& kernel, const Device& device) const {
    const Image* image = Choose(kernel, device.architecture);
    if (image == nullptr) throw std::runtime_error(NoImage(kernel, device.architecture));
    const std::string unpacked = Unpack(*image, kernel);
    const char* code = image->size == image->unpacked ? image->data : unpacked.data();
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
        driver_.ModuleLoadDataEx(&module, code, image->is_ptx ? 2 : 0, options, values);
    if (result != 0)
      ThrowDriverError(result, "loading ", kernel.label, image->is_ptx && log[1] != 0 ? log : "");
    Function function = nullptr;
    Check(driver_.ModuleGetFunction(&function, module, kernel.name), "loading ", kernel.label);
    Check(driver_.FuncSetAttribute(function, kFunctionMaxDynamicSharedBytes,
                                   static_cast<int>(image->shared_bytes)),
          "asking for the shared memory of ", kernel.label);
    if (kernel.cluster > 8)
      Check(driver_.FuncSetAttribute(function, kFunctionNonPortableCluster, 1),
            "asking for the cluster of ", kernel.label);
    return {function, image};
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
    for (const Image& image : kernel.images) {
      std::string& list = image.is_ptx ? ptx : cubins;
      list += (list.empty() ? "" : ", ") + std::to_string(image.architecture);
      if (image.is_specific) list += 'a';
    }
    return std::string(kernel.label) + ": the library has no code for the GPU " + Name() +
           " (compute capability " + CapabilityText(device) + "). It has machine code for " +
           (cubins.empty() ? "none" : cubins) + " and PTX for " + (ptx.empty() ? "none" : ptx) +
           ". Build it with: twinop build --archs " + std::string(payload_.cuda_archs) + "," +
           std::to_string(device);
  }

  const Payload& payload_;
  const Driver& driver_;
  int id_ = 0;
};

// Whether a call may have these dtypes. The first input says it: others may be absent from calls.
bool Fits(const std::vector<std::int32_t>& dtypes, const twinop_call& call) {
  if (dtypes.empty() || call.input_count == 0) return true;
  return call.inputs[0].dtype == TWINOP_NONE || call.inputs[0].dtype == dtypes[0];
}

}  // namespace

const Device& LoadKernels(const Payload& payload, const Op& op, const twinop_call& call) {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, Device>;  // outlives static destructors
  const int ordinal = call.context->device_index;
  const std::lock_guard<std::mutex> lock(mutex);
  const Loader loader(payload, ordinal);
  Device& device = devices[ordinal];
  if (device.kernels == nullptr) loader.Open(&device);
  const CurrentContext current(loader.driver(), device.context);
  for (const Plan& plan : op.plans) {
    if (!Fits(op.combinations[plan.combination], call)) continue;
    for (const auto& step : plan.steps) {
      const auto* launch = std::get_if<Launch>(&step);
      if (launch == nullptr) continue;
      for (const Variant& variant : launch->variants) {
        LoadedKernel& loaded = device.kernels[variant.kernel];
        if (loaded.function == nullptr)
          loaded = loader.Load(payload.kernels[variant.kernel], device);
      }
    }
  }
  return device;
}

}  // namespace twinop::aot_kernels
