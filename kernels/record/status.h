// The result of every launch and check: an empty status is success, any other carries its message.
#pragma once

#include <memory>
#include <string>
#include <utility>

namespace twinop {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  // Cold: the compiler moves what leads here out of the way of the calls that succeed.
  [[gnu::cold]] static Status Error(std::string message) {
    Status status;
    status.message_ = std::make_unique<const std::string>(std::move(message));
    return status;
  }
  bool ok() const { return message_ == nullptr; }
  const std::string& message() const { return *message_; }  // of an error

 private:
  // One word, null on success: every call of an op returns several of these.
  std::unique_ptr<const std::string> message_;
};

}  // namespace twinop

#define TWINOP_RETURN_IF_ERROR(expression)   \
  do {                                       \
    ::twinop::Status status_ = (expression); \
    if (!status_.ok()) return status_;       \
  } while (false)
