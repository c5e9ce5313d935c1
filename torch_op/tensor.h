// Helpers over torch's stable C API: checks, dtypes, devices, views, new tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <iterator>
#include <stdexcept>
#include <string>

#include "twinop/record/op_spec.h"

namespace twinop::torch_op {

using TorchTensor = torch::stable::Tensor;

inline void Check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string("twinop: torch failed in ") + what);
}
inline void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// The numbers of dtypes, which differ between versions of torch, in the order of DType from 1 on.
inline constexpr std::int32_t (*kTorchTypes[])() = {
#define TWINOP_DTYPE(name, c_name, text, ...) aoti_torch_dtype_##text,
    TWINOP_DTYPES(TWINOP_DTYPE)
#undef TWINOP_DTYPE
};

inline DType TypeOf(const TorchTensor& tensor) {
  std::int32_t number = 0;
  Check(aoti_torch_get_dtype(tensor.get(), &number), "get_dtype");
  for (std::size_t i = 0; i < std::size(kTorchTypes); ++i)
    if (kTorchTypes[i]() == number) return static_cast<DType>(i + 1);
  return DType::kNone;
}

struct Device {
  std::int32_t type = 0;
  std::int32_t index = 0;
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

inline Device DeviceOf(const TorchTensor& tensor) {
  Device device;
  Check(aoti_torch_get_device_type(tensor.get(), &device.type), "get_device_type");
  Check(aoti_torch_get_device_index(tensor.get(), &device.index), "get_device_index");
  return device;
}

inline std::string DeviceName(const Device& device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_meta()) return "meta";
  return (device.type == aoti_torch_device_type_cuda() ? "cuda:" : "device:") +
         std::to_string(device.index);
}

// A view of the tensor without its data and strides.
inline Tensor ViewOf(const TorchTensor& tensor, const char* name) {
  const auto rank = static_cast<std::size_t>(tensor.dim());
  if (rank > kMaxRank)
    throw std::runtime_error(std::string("tensor ") + name + " has " + std::to_string(rank) +
                             " dimensions, at most " + std::to_string(kMaxRank) + " are supported");
  return {nullptr, tensor.sizes().data(), rank, tensor.numel(), TypeOf(tensor)};
}

inline TorchTensor EmptyStrided(const std::int64_t* sizes, const std::int64_t* strides,
                                std::size_t rank, DType dtype, const Device& device) {
  AtenTensorHandle handle = nullptr;
  Check(aoti_torch_empty_strided(static_cast<std::int64_t>(rank), sizes, strides,
                                 kTorchTypes[static_cast<std::size_t>(dtype) - 1](), device.type,
                                 device.index, &handle),
        "empty_strided");
  return TorchTensor(handle);
}

}  // namespace twinop::torch_op
