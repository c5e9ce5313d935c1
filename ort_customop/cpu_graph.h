// Runs ops without a CPU kernel on ONNX Runtime's CPU provider. The kernel of a node runs a graph
// of ops that have one, in a session of its own, inside the model's session.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ort_customop/api.h"
#include "twinop/record/node_proto.h"

namespace twinop::ort {

// The graph of one node: the op's function body, or the graph that it writes for these inputs and
// attributes (twinop_op.row_body).
class CpuGraph {
 public:
  // `attributes` outlive the graph.
  static Status Create(const Op& op, const Attribute* attributes, const OrtKernelInfo* info,
                       std::unique_ptr<CpuGraph>* graph);

  // Runs the graph. It writes to the call's outputs, which are those of the context.
  Status Run(OrtKernelContext* context, const Call& call);

 private:
  // What the pieces of a call are made of: elements in large calls of elementwise ops, otherwise
  // what twinop_op.row_body says, whose numbers these are.
  enum class Cut { kWhole, kRows, kBatch, kElements };
  // The intermediate tensors of so many elements fit in a cache.
  static constexpr std::int64_t kPieceElements = 1 << 16;

  struct Work {
    OrtKernelContext* context;
    const Call& call;
    OrtSession* session;
    Cut cut;
    std::int64_t units;  // rows, parts of the batch, or elements
    std::int64_t pieces;

    // The first unit of a piece.
    std::int64_t Begin(std::int64_t i) const {
      return cut == Cut::kElements ? std::min(i * kPieceElements, units) : units * i / pieces;
    }
  };

  CpuGraph(const Op& op, const Attribute* attributes)
      : op_(op), attributes_(attributes), cut_(static_cast<Cut>(op.record->row_body)) {}
  Status ReadNode(const OrtKernelInfo* info);
  Status AddConstant(std::size_t i, const OrtValue* value, Message* graph);

  // Finds or opens the session for inputs of these ranks and sizes.
  Status Find(const Tensor* inputs, OrtSession** session);
  Status Open(std::string_view model, std::shared_ptr<OrtSession>* session) const;
  Status OpenOwn(std::string_view model, std::shared_ptr<OrtSession>* session) const;

  Work Divide(OrtKernelContext* context, const Call& call) const;
  Status RunPiece(const Work& work, std::int64_t begin, std::int64_t end) const;
  Status FindValue(const Work& work, std::size_t i, std::int64_t begin, std::int64_t end,
                   OrtValue** value, std::shared_ptr<OrtValue>* owned) const;

  const Op& op_;
  const Attribute* attributes_;
  const Cut cut_;
  OrtAllocator* allocator_ = nullptr;  // ONNX Runtime's own, and where its memory is
  const OrtMemoryInfo* memory_ = nullptr;
  std::shared_ptr<OrtSessionOptions> options_;  // with the data of constants

  Tensor inputs_[kMaxArguments];  // data of constants; ranks and sizes as far as they are known
  std::int64_t sizes_[kMaxArguments][kMaxRank];
  bool has_rows_[kMaxArguments] = {};     // has a row for each row of the first input
  bool is_constant_[kMaxArguments] = {};  // an initializer of the session
  bool has_constants_ = false;
  std::string added_;  // behind the op's model: the node, or the inputs of the graph

  std::mutex mutex_;                                             // of `sessions_`
  std::map<const void*, std::shared_ptr<OrtSession>> sessions_;  // by the address of the model
  OrtSession* session_ = nullptr;   // of all calls; null: the ranks or sizes of a call decide
  std::atomic<int> runs_alone_{0};  // the last runs in which one thread did everything
};

}  // namespace twinop::ort
