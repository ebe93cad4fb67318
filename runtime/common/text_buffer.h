// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace arm_runtime {

// Appends text to a buffer of fixed size, truncates it at the end of the buffer, and adds a NUL. It replaces the C
// library's formatting, which on small targets may allocate memory and does not print 64-bit numbers.
class TextBuffer {
 public:
  TextBuffer(char* text, size_t size) : text_(text), left_(size) {
    if (left_ > 0) {
      *text_ = '\0';
    }
  }

  void add(char character) {
    if (left_ > 1) {
      *text_++ = character;
      *text_ = '\0';
      --left_;
    }
  }

  void add(const char* characters) {
    for (; *characters != '\0'; ++characters) {
      add(*characters);
    }
  }

  void add_number(uint64_t number) {
    char digits[20];
    size_t count = 0;
    do {
      digits[count++] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    while (count > 0) {
      add(digits[--count]);
    }
  }

  void add_number(int64_t number) {
    if (number < 0) {
      add('-');
      // Negate as unsigned, because the smallest signed number has no positive counterpart.
      add_number(uint64_t{0} - static_cast<uint64_t>(number));
    } else {
      add_number(static_cast<uint64_t>(number));
    }
  }

 private:
  char* text_;
  size_t left_;
};

}  // namespace arm_runtime
