// Runs ops without a CPU kernel on ONNX Runtime's CPU provider. The kernel of a node runs the op's
// function body in a session of its own, inside the model's session.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ort_customop/api.h"
#include "twinop/record/node_proto.h"

namespace twinop::ort {

// The body of one node.
class Body {
 public:
  // `attributes` outlive the body.
  static Status Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                       std::unique_ptr<Body>* body);
  Body(const Body&) = delete;
  Body& operator=(const Body&) = delete;
  virtual ~Body() = default;

  // Runs the body. It writes to the call's outputs, which are those of the context.
  virtual Status Run(OrtKernelContext* context, const Call& call) = 0;

 protected:
  explicit Body(const Op& op) : op_(op) {}
  // Runs a session on values in the schema's order; null inputs are absent.
  Status RunSession(OrtSession* session, const OrtValue* const* inputs, OrtValue** outputs) const;

  const Op& op_;
};

// A body that may have another model for each combination of ranks. A model is loaded when the
// first call needs it, or at creation if the ranks are known then.
class FunctionBody : public Body {
 public:
  static Status Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                       std::unique_ptr<Body>* body);
  ~FunctionBody() override;
  Status Run(OrtKernelContext* context, const Call& call) override;

 private:
  // The inputs' ranks, -1 where an input is absent, and the session that serves them.
  struct Case {
    std::int8_t ranks[kMaxArguments];
    std::shared_ptr<OrtSession> session;
    const Case* next;
  };

  FunctionBody(const Op& op, const Attribute* attributes) : Body(op), attributes_(attributes) {}
  Status Find(const Tensor* inputs, OrtSession** session);
  Status RunCounted(OrtSession* session, OrtKernelContext* context,
                    const OrtValue* const* inputs) const;
  Status RunPiece(OrtSession* session, const Call& call, const OrtMemoryInfo* memory,
                  std::int64_t begin, std::int64_t end) const;
  const Case* FindCase(const std::int8_t* ranks) const;
  Status AddCase(const Tensor* inputs, Case* added) const;

  const Attribute* attributes_;
  std::mutex mutex_;                          // held while a case is added
  std::atomic<const Case*> first_ = nullptr;  // read without the mutex
};

// A body that runs on pieces of the rows, or of a batch, on the threads of the model's session
// (twinop_op.row_body).
class RowBody : public Body {
 public:
  static Status Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                       std::unique_ptr<Body>* body);
  Status Run(OrtKernelContext* context, const Call& call) override;

 private:
  RowBody(const Op& op, const Attribute* attributes);
  // Finds or opens the session for inputs of these sizes.
  Status Open(const Tensor* inputs, OrtSession** session);
  Status Sized(const Tensor* inputs, OrtSession** session);
  Status RunRows(OrtSession* session, const Call& call, std::int64_t rows, std::int64_t begin,
                 std::int64_t end) const;

  const Attribute* attributes_;
  const bool is_batch_;
  bool has_rows_[kMaxArguments] = {};     // the input has a row for each row of the first
  bool is_constant_[kMaxArguments] = {};  // an initializer of the session
  Tensor described_[kMaxArguments];       // data of constants; sizes as far as they are known
  std::int64_t sizes_[kMaxArguments][kMaxRank];
  Message graph_;  // the inputs and initializers
  std::shared_ptr<OrtMemoryInfo> memory_;
  std::vector<std::shared_ptr<OrtValue>> constants_;
  std::vector<const char*> names_;  // of the constants
  OrtSession* session_ = nullptr;   // for all calls; null: each call's sizes decide
  std::mutex mutex_;                // of `sessions_`
  std::map<const void*, std::shared_ptr<OrtSession>> sessions_;  // by the address of the model
  std::atomic<int> runs_alone_{0};  // the last runs in which one thread did everything
};

// Returns an error of a body's session, with a prefix that says so.
Status InBody(const Status& error);

// Makes a session without threads of its own: the thread that runs it does the work.
Status OpenSession(const OrtApi* api, const std::string& model, OrtSessionOptions* options,
                   std::shared_ptr<OrtSession>* session);

}  // namespace twinop::ort
