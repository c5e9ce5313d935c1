// RegisterCustomOps, which ONNX Runtime calls when it loads the library.
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>

#include "ort_customop/api.h"

namespace twinop::ort {
namespace {

// 23 for "1.23.2", and more than any 1.x has for later major versions.
int RuntimeMinor(const OrtApiBase* base) {
  int major = 0, minor = 0;
  std::sscanf(base->GetVersionString(), "%d.%d", &major, &minor);
  return major > 1 ? 1000 * (major - 1) + minor : minor;
}

// The ops and their domain. Sessions point to them, so they live until the process ends.
class Library {
 public:
  Status Build(const twinop_table& table, const OrtApiBase* base, const OrtApi* api) {
    const OrtApi* api24 = RuntimeMinor(base) >= 24 ? base->GetApi(24) : nullptr;
    for (std::size_t i = 0; i < table.op_count; ++i) {
      const OpSpec& record = FromC(*table.ops[i]);
      if (record.IsBackward()) continue;
      for (std::size_t c = 0; c < record.combination_count; ++c) {
        for (bool on_cuda : {false, true}) {
          const bool runs =
              on_cuda ? record.cuda != nullptr : record.cpu != nullptr || record.body != nullptr;
          if (!runs) continue;
          ops_.push_back(
              MakeOp(record, table.domain_version, c, on_cuda, api, api24, RuntimeMinor(base)));
        }
      }
    }
    TWINOP_RETURN_IF_ORT_ERROR(api, api->CreateCustomOpDomain(table.domain, &domain_));
    for (Op& op : ops_) {
      op.domain = domain_;
      TWINOP_RETURN_IF_ORT_ERROR(api, api->CustomOpDomain_Add(domain_, &op));
    }
    return {};
  }
  OrtCustomOpDomain* domain() const { return domain_; }

 private:
  std::deque<Op> ops_;
  OrtCustomOpDomain* domain_ = nullptr;
};

OrtStatusPtr Register(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    const std::string message =
        std::string("twinop ") + TWINOP_VERSION + " needs ONNX Runtime 1.18 or newer; this is " +
        base->GetVersionString() + ". Upgrade with: pip install 'onnxruntime>=1.18'";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  return Guard(api, [&] {
    static std::mutex mutex;
    static Library* library = nullptr;  // never deleted: sessions may outlive static destructors
    std::lock_guard<std::mutex> lock(mutex);
    if (library == nullptr) {
      const twinop_table* table = twinop_library(TWINOP_ABI_VERSION);
      Status status = CheckTable(table, "its ONNX Runtime adapter");
      if (!status.ok()) return ToOrt(api, status);
      auto fresh = std::make_unique<Library>();
      status = fresh->Build(*table, base, api);
      if (!status.ok()) return ToOrt(api, status);
      library = fresh.release();
    }
    return api->AddCustomOpDomain(options, library->domain());
  });
}

}  // namespace
}  // namespace twinop::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return twinop::ort::Register(options, base);
}
