// A cursor over text, for all the small languages of a record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace twinop {

class Scanner {
 public:
  constexpr explicit Scanner(std::string_view text) : text_(text) {}

  constexpr void SkipSpace() {
    while (position_ < text_.size() && text_[position_] == ' ') ++position_;
  }
  constexpr char Peek() {
    SkipSpace();
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  constexpr bool AtEnd() { return Peek() == '\0'; }
  constexpr bool Accept(std::string_view token) {
    SkipSpace();
    if (text_.substr(position_, token.size()) != token) return false;
    position_ += token.size();
    return true;
  }
  constexpr void Expect(std::string_view token) {
    if (!Accept(token)) throw "a record's text does not parse: a token is missing";
  }
  static constexpr bool IsDigit(char c) { return c >= '0' && c <= '9'; }
  static constexpr bool IsWord(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || IsDigit(c) || c == '_';
  }
  constexpr std::string_view Word() {
    SkipSpace();
    std::size_t begin = position_;
    while (position_ < text_.size() && IsWord(text_[position_])) ++position_;
    if (begin == position_) throw "a record's text does not parse: a name is missing";
    return text_.substr(begin, position_ - begin);
  }
  constexpr std::int64_t Integer() {
    SkipSpace();
    bool negative = Accept("-");
    std::int64_t value = 0;
    std::string_view digits = Word();
    if (digits.size() > 18 || (digits.size() > 1 && digits[0] == '0'))
      throw "a record's text does not parse: a number is too long or starts with 0";
    for (char c : digits) {
      if (!IsDigit(c)) throw "a record's text does not parse: a number is wanted";
      value = value * 10 + (c - '0');
    }
    return negative ? -value : value;
  }
  // The text up to one of `stops` outside quotes and brackets, without trailing spaces.
  constexpr std::string_view Until(std::string_view stops) {
    SkipSpace();
    std::size_t begin = position_;
    int depth = 0;
    char quote = '\0';
    for (; position_ < text_.size(); ++position_) {
      char c = text_[position_];
      if (quote != '\0') {
        if (c == quote) quote = '\0';
        continue;
      }
      if (depth == 0 && stops.find(c) != std::string_view::npos) break;
      if (c == '"' || c == '\'') quote = c;
      if (c == '[' || c == '(') ++depth;
      if (c == ']' || c == ')') --depth;
    }
    std::size_t end = position_;
    while (end > begin && text_[end - 1] == ' ') --end;
    return text_.substr(begin, end - begin);
  }

 private:
  std::string_view text_;
  std::size_t position_ = 0;
};

}  // namespace twinop
