// Helpers over ORT's C API: statuses, and the type and shape of a tensor.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>

#include "ort_customop/op.h"
#include "twinop/math/numeric.h"

namespace twinop::ort {

// An object of ORT, and the function that releases it.
template <class T>
using Owned = std::unique_ptr<T, void(ORT_API_CALL*)(T*)>;

// Whether a call succeeded.
inline bool Ok(const OrtApi* api, OrtStatus* status) {
  return Owned<OrtStatus>(status, api->ReleaseStatus) == nullptr;
}

inline OrtStatusPtr ToOrt(const OrtApi* api, const Status& status, OrtErrorCode code = ORT_FAIL) {
  return status.ok() ? nullptr : api->CreateStatus(code, status.message().c_str());
}

// Runs `body` at the C boundary. No C++ exception enters ORT's frames.
template <class Body>
OrtStatusPtr Guard(const OrtApi* api, Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return api->CreateStatus(ORT_FAIL, "twinop: out of host memory");
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  } catch (const char* reason) {
    return api->CreateStatus(ORT_FAIL, reason);
  } catch (...) {
    return api->CreateStatus(ORT_FAIL, "twinop: an exception that is not a std::exception");
  }
}

// An error of ORT's API as a Status.
[[gnu::cold]] inline Status TakeError(const OrtApi* api, OrtStatus* error) {
  const Owned<OrtStatus> owned(error, api->ReleaseStatus);
  return Status::Error(api->GetErrorMessage(error));
}

#define TWINOP_RETURN_IF_ORT_ERROR(api, expression)   \
  do {                                                \
    OrtStatus* error_ = (expression);                 \
    if (__builtin_expect(error_ != nullptr, false))   \
      return ::twinop::ort::TakeError((api), error_); \
  } while (false)

// GetTensorElementTypeAndShapeDataReference of API 24 returns type and dimensions without a copy.
// Older headers do not declare it, so its offset in OrtApi is given here.
using TypeAndShapeReference = OrtStatusPtr(ORT_API_CALL*)(const OrtValue*,
                                                          ONNXTensorElementDataType*,
                                                          const std::int64_t**, std::size_t*);
inline TypeAndShapeReference GetTypeAndShapeReference(const OrtApi* api24) {
  constexpr std::size_t kOffset = 3312;
  if (api24 == nullptr) return nullptr;
  return *reinterpret_cast<const TypeAndShapeReference*>(reinterpret_cast<const char*>(api24) +
                                                         kOffset);
}

}  // namespace twinop::ort
