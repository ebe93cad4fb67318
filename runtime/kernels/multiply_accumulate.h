// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace arm_runtime {

// Sum of (first[i] + first_offset) * (second[i] + second_offset), modulo 2^32. The offsets are negative zero points.
inline uint32_t multiply_accumulate(const int8_t* first, int32_t first_offset, const int8_t* second,
                                    int32_t second_offset, int32_t count) {
  uint32_t sum = 0;
  for (int32_t i = 0; i < count; ++i) {
    sum += static_cast<uint32_t>((first[i] + first_offset) * (second[i] + second_offset));
  }
  return sum;
}

}  // namespace arm_runtime
