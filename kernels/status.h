// The result of every launch and check: an empty status is success, any other carries its message.
#pragma once

#include <string>
#include <utility>

namespace twinop {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  static Status Error(std::string message) {
    Status status;
    status.message_ = std::move(message);
    return status;
  }
  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

}  // namespace twinop

#define TWINOP_RETURN_IF_ERROR(expression)             \
  do {                                                 \
    ::twinop::Status status_ = (expression);           \
    if (!status_.ok()) return status_;                 \
  } while (false)
