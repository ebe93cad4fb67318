// SPDX-License-Identifier: Apache-2.0
// Numbers in compile specs, stored by arm_recipes.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/executorch.h"
#include "common/little_endian.h"
#include "common/log.h"

namespace arm_runtime {

struct CompileSpecNumber {
  bool found = false;
  uint32_t value = 0;
};

// Reads the compile spec `key`: 4 bytes, little endian. Returns Ok without setting `number` if there is no such spec,
// because programs of other exporters have none. Returns InvalidProgram, with the reason in the log, if the spec does
// not have 4 bytes.
inline Error read_spec_number(const char* backend, ArrayRef<CompileSpec> specs, const char* key,
                              CompileSpecNumber* number) {
  for (const auto& spec : specs) {
    if (std::strcmp(spec.key, key) != 0) {
      continue;
    }
    if (spec.value.buffer == nullptr || spec.value.nbytes != 4) {
      ET_LOG(Error, "%s: the program has a compile spec %s of %lu bytes, not 4: export or flash the program again",
             backend, key, static_cast<PrintfUnsigned>(spec.value.nbytes));
      return Error::InvalidProgram;
    }
    number->found = true;
    number->value = read_u32(static_cast<const uint8_t*>(spec.value.buffer));
    break;
  }
  return Error::Ok;
}

}  // namespace arm_runtime
