// Helpers over torch's stable C API: checks, dtypes, devices, strides, views, new tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#include "kernels/record/record.h"

namespace twinop::torch_op {

using TorchTensor = torch::stable::Tensor;

inline void Check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string("twinop: torch failed in ") + what);
}
inline void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// The number of a dtype differs between versions of torch.
inline std::int32_t TorchType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kFloat64:
      return aoti_torch_dtype_float64();
    case DType::kInt8:
      return aoti_torch_dtype_int8();
    case DType::kInt16:
      return aoti_torch_dtype_int16();
    case DType::kInt32:
      return aoti_torch_dtype_int32();
    case DType::kInt64:
      return aoti_torch_dtype_int64();
    case DType::kUInt8:
      return aoti_torch_dtype_uint8();
    case DType::kBool:
      return aoti_torch_dtype_bool();
    case DType::kComplex64:
      return aoti_torch_dtype_complex64();
    case DType::kComplex128:
      return aoti_torch_dtype_complex128();
    case DType::kUInt16:
      return aoti_torch_dtype_uint16();
    case DType::kUInt32:
      return aoti_torch_dtype_uint32();
    case DType::kUInt64:
      return aoti_torch_dtype_uint64();
    case DType::kNone:
      break;
  }
  throw std::runtime_error("twinop: a tensor has no dtype");
}

inline DType TypeOf(const TorchTensor& tensor) {
  std::int32_t number = 0;
  Check(aoti_torch_get_dtype(tensor.get(), &number), "get_dtype");
  for (const DTypeInfo& info : kDTypes)
    if (info.dtype != DType::kNone && TorchType(info.dtype) == number) return info.dtype;
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

inline const std::int64_t* StridesOf(const TorchTensor& tensor) {
  std::int64_t* strides = nullptr;
  Check(aoti_torch_get_strides(tensor.get(), &strides), "get_strides");
  return strides;
}

// A view of the tensor without its data and strides.
inline Tensor ViewOf(const TorchTensor& tensor, const char* name) {
  Tensor view;
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  Check(aoti_torch_get_dim(tensor.get(), &rank), "get_dim");
  if (rank > static_cast<std::int64_t>(kMaxRank))
    throw std::runtime_error(std::string("tensor ") + name + " has " + std::to_string(rank) +
                             " dimensions, at most " + std::to_string(kMaxRank) + " are supported");
  Check(aoti_torch_get_sizes(tensor.get(), &sizes), "get_sizes");
  Check(aoti_torch_get_numel(tensor.get(), &view.numel), "get_numel");
  view.rank = static_cast<std::size_t>(rank);
  view.sizes = sizes;
  view.dtype = TypeOf(tensor);
  view.present = true;
  return view;
}

inline TorchTensor EmptyStrided(const std::int64_t* sizes, const std::int64_t* strides,
                                std::size_t rank, DType dtype, const Device& device) {
  AtenTensorHandle handle = nullptr;
  Check(aoti_torch_empty_strided(static_cast<std::int64_t>(rank), sizes, strides, TorchType(dtype),
                                 device.type, device.index, &handle),
        "empty_strided");
  return TorchTensor(handle);
}

}  // namespace twinop::torch_op
