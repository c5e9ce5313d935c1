// TWINOP_TRACE=1 prints on stderr: each call of an op, and below it each kernel that it launches,
// with the reason for the choice.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace twinop {

inline const bool kIsTraced = [] {
  const char* const value = std::getenv("TWINOP_TRACE");
  return value != nullptr && std::string_view(value) == "1";
}();

// Prints a line. Callers ask kIsTraced first, because a call of this costs more than the answer.
[[gnu::format(printf, 1, 2)]] inline void Trace(const char* format, ...) {
  char line[2048];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "twinop: %s\n", line);  // one write: threads do not mix their lines
}

}  // namespace twinop
