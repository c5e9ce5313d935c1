// Helpers over torch's stable C API: checks, dtypes, devices, views, new tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <iterator>
#include <stdexcept>
#include <string>

#include "twinop/record/record.h"

namespace twinop::torch_op {

using TorchTensor = torch::stable::Tensor;

inline void Check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string("twinop: torch failed in ") + what);
}
inline void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// The numbers of dtypes, which differ between versions of torch, in the order of DType.
inline constexpr std::int32_t (*kTorchTypes[])() = {
    nullptr,
    aoti_torch_dtype_float32,
    aoti_torch_dtype_float16,
    aoti_torch_dtype_bfloat16,
    aoti_torch_dtype_float64,
    aoti_torch_dtype_int8,
    aoti_torch_dtype_int16,
    aoti_torch_dtype_int32,
    aoti_torch_dtype_int64,
    aoti_torch_dtype_uint8,
    aoti_torch_dtype_bool,
    aoti_torch_dtype_complex64,
    aoti_torch_dtype_complex128,
    aoti_torch_dtype_uint16,
    aoti_torch_dtype_uint32,
    aoti_torch_dtype_uint64,
    aoti_torch_dtype_float8_e4m3fn,
    aoti_torch_dtype_float8_e5m2,
};
static_assert(std::size(kTorchTypes) == std::size(kDTypes));

inline DType TypeOf(const TorchTensor& tensor) {
  std::int32_t number = 0;
  Check(aoti_torch_get_dtype(tensor.get(), &number), "get_dtype");
  for (std::size_t i = 1; i < std::size(kTorchTypes); ++i)
    if (kTorchTypes[i]() == number) return static_cast<DType>(i);
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
  Tensor view;
  view.rank = static_cast<std::size_t>(tensor.dim());
  if (view.rank > kMaxRank)
    throw std::runtime_error(std::string("tensor ") + name + " has " + std::to_string(view.rank) +
                             " dimensions, at most " + std::to_string(kMaxRank) + " are supported");
  view.sizes = tensor.sizes().data();
  view.numel = tensor.numel();
  view.dtype = TypeOf(tensor);
  view.present = true;
  return view;
}

inline TorchTensor EmptyStrided(const std::int64_t* sizes, const std::int64_t* strides,
                                std::size_t rank, DType dtype, const Device& device) {
  AtenTensorHandle handle = nullptr;
  Check(aoti_torch_empty_strided(static_cast<std::int64_t>(rank), sizes, strides,
                                 kTorchTypes[static_cast<std::size_t>(dtype)](), device.type,
                                 device.index, &handle),
        "empty_strided");
  return TorchTensor(handle);
}

}  // namespace twinop::torch_op
