// The result of every launch and check: an empty status is success, any other carries its message.
#pragma once

#include <memory>
#include <string>
#include <utility>

namespace twinop {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  [[gnu::cold]] static Status Error(
      std::string message) {  // cold: what leads to it is kept out of the way
    Status status;
    status.message_ = std::make_unique<const std::string>(std::move(message));
    return status;
  }
  bool ok() const { return message_ == nullptr; }
  const std::string& message() const { return *message_; }  // of an error

 private:
  std::unique_ptr<const std::string>
      message_;  // one word: success costs nothing on the way of every call
};

}  // namespace twinop

#define TWINOP_RETURN_IF_ERROR(expression)                      \
  do {                                                          \
    ::twinop::Status status_ = (expression);                    \
    if (!status_.ok()) return status_;                          \
  } while (false)
