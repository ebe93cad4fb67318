// SPDX-License-Identifier: Apache-2.0
// Numbers that arm_recipes stores beside a payload.
#pragma once

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/log.h>

#include <cstdint>
#include <cstring>

namespace arm_runtime {

struct RecordedNumber {
  bool found = false;
  uint32_t value = 0;
};

// Reads the compile spec `key`: 4 bytes, little endian. Not found is Ok: programs that others made have none.
// Returns InvalidProgram, with the reason in the log, where it has not 4 bytes.
inline executorch::runtime::Error read_number(const char* backend,
                                              executorch::runtime::ArrayRef<executorch::runtime::CompileSpec> specs,
                                              const char* key, RecordedNumber* number) {
  for (const auto& spec : specs) {
    if (std::strcmp(spec.key, key) != 0) {
      continue;
    }
    if (spec.value.buffer == nullptr || spec.value.nbytes != 4) {
      ET_LOG(Error, "%s: the program has a compile spec %s of %lu bytes, not 4: export or flash the program again",
             backend, key, static_cast<unsigned long>(spec.value.nbytes));
      return executorch::runtime::Error::InvalidProgram;
    }
    const auto* bytes = static_cast<const uint8_t*>(spec.value.buffer);
    number->found = true;
    number->value = uint32_t{bytes[0]} | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
    break;
  }
  return executorch::runtime::Error::Ok;
}

}  // namespace arm_runtime
