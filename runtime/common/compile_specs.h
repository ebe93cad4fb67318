// SPDX-License-Identifier: Apache-2.0
// Numbers in compile specs, stored by arm_recipes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/executorch.h"
#include "common/little_endian.h"
#include "common/log.h"

namespace arm_runtime {

struct RecordedNumber {
  bool found = false;
  uint32_t value = 0;
};

// Finds the compile spec `key`. Programs of other exporters do not have it; the result is then null. Returns
// InvalidProgram, with the reason in the log, if it does not have `nbytes` bytes.
inline Result<const uint8_t*> find_spec(const char* backend, ArrayRef<CompileSpec> specs, const char* key,
                                        size_t nbytes) {
  for (const auto& spec : specs) {
    if (std::strcmp(spec.key, key) != 0) {
      continue;
    }
    if (spec.value.buffer == nullptr || spec.value.nbytes != nbytes) {
      ET_LOG(Error, "%s: the program has a compile spec %s of %lu bytes, not %lu: export or flash the program again",
             backend, key, static_cast<Printable>(spec.value.nbytes), static_cast<Printable>(nbytes));
      return Error::InvalidProgram;
    }
    return static_cast<const uint8_t*>(spec.value.buffer);
  }
  return nullptr;
}

// Reads the compile spec `key`: 4 bytes, little endian. The errors are those of find_spec().
inline Error read_number(const char* backend, ArrayRef<CompileSpec> specs, const char* key, RecordedNumber* number) {
  const Result<const uint8_t*> value = find_spec(backend, specs, key, 4);
  if (!value.ok()) {
    return value.error();
  }
  if (*value != nullptr) {
    *number = {true, read_u32(*value)};
  }
  return Error::Ok;
}

}  // namespace arm_runtime
