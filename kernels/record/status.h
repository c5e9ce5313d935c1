// The result of launches and checks: success, or a message.
#pragma once

#include <memory>
#include <string>
#include <utility>

namespace twinop {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  // Cold: the compiler moves the branches that lead here away from those of successful calls.
  [[gnu::cold]] static Status Error(std::string message) {
    Status status;
    status.message_ = std::make_unique<const std::string>(std::move(message));
    return status;
  }
  bool ok() const { return message_ == nullptr; }
  const std::string& message() const { return *message_; }  // of an error only

 private:
  // One word, because each call of an op returns several: null on success.
  std::unique_ptr<const std::string> message_;
};

}  // namespace twinop

#define TWINOP_RETURN_IF_ERROR(expression)   \
  do {                                       \
    ::twinop::Status status_ = (expression); \
    if (!status_.ok()) return status_;       \
  } while (false)
