// Runs an op without a CPU kernel on ONNX Runtime's CPU provider: its function body, in a session
// inside the model's.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "ort_customop/api.h"

namespace twinop::ort {

// The body of one node. The body may have a model for each combination of ranks, so a model is
// loaded when the first call needs it, and at creation where the ranks are known then.
class Body {
 public:
  // `attributes` outlive the body.
  static Status Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                       std::unique_ptr<Body>* body);
  Body(const Body&) = delete;
  Body& operator=(const Body&) = delete;
  ~Body();

  // Runs the body. It writes to the call's outputs, which are those of the context.
  Status Run(OrtKernelContext* context, const Call& call);

 private:
  // The inputs' ranks, -1 where an input is absent, and the session that serves them.
  struct Case {
    std::int8_t ranks[kMaxArguments];
    std::shared_ptr<OrtSession> session;
    const Case* next;
  };

  Body(const Op& op, const Attribute* attributes) : op_(op), attributes_(attributes) {}
  Status Find(const Tensor* inputs, OrtSession** session);
  Status RunPiece(OrtSession* session, const Call& call, const OrtMemoryInfo* memory,
                  std::int64_t begin, std::int64_t end) const;
  Status RunSession(OrtSession* session, const OrtValue* const* inputs, OrtValue** outputs) const;
  const Case* FindCase(const std::int8_t* ranks) const;
  Status AddCase(const Tensor* inputs, Case* added) const;

  const Op& op_;
  const Attribute* attributes_;
  std::mutex mutex_;                          // of those who add a case
  std::atomic<const Case*> first_ = nullptr;  // read without the mutex
};

}  // namespace twinop::ort
