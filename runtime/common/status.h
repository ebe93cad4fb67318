// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/text_buffer.h"

namespace arm_runtime {

// Noun that describe() writes before the place of an error of type `Code`. With the noun "block", a message starts with
// "block 'inputs'". Without a noun, it starts with the place alone.
template <typename Code>
inline constexpr const char* kPlaceNoun = "";

// Result of reading or executing data that may be damaged. `Code` is an enumeration whose 0 means success. All texts
// have static storage, so that a status neither allocates nor owns memory.
template <typename Code>
struct BasicStatus {
  Code error{};
  // The part of the data that is wrong, and the byte offset of the error.
  const char* place = "";
  uint64_t offset = 0;
  // Text of the error, in which each '%' is a placeholder for the next of `values`.
  const char* reason = "";
  int64_t values[3] = {0, 0, 0};

  bool ok() const { return error == Code{}; }

  // Writes "<noun> '<place>' at byte <offset>: <reason>" and a NUL, truncated to `size` bytes.
  void describe(char* text, size_t size) const {
    TextBuffer out(text, size);
    if (ok()) {
      out.add("ok");
      return;
    }
    const char* noun = kPlaceNoun<Code>;
    const bool quoted = *noun != '\0';
    out.add(noun);
    out.add(quoted ? " '" : "");
    out.add(place);
    out.add(quoted ? "'" : "");
    out.add(" at byte ");
    out.add_number(offset);
    out.add(": ");
    size_t next = 0;
    for (const char* at = reason; *at != '\0'; ++at) {
      if (*at == '%' && next < sizeof(values) / sizeof(values[0])) {
        out.add_number(values[next++]);
      } else {
        out.add(*at);
      }
    }
  }
};

template <typename Code>
BasicStatus<Code> make_failure(Code error, const char* place, uint64_t offset, const char* reason, int64_t first,
                               int64_t second, int64_t third) {
  BasicStatus<Code> status;
  status.error = error;
  status.place = place;
  status.offset = offset;
  status.reason = reason;
  status.values[0] = first;
  status.values[1] = second;
  status.values[2] = third;
  return status;
}

}  // namespace arm_runtime
