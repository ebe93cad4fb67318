// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__ARM_FEATURE_MVE)
#include <arm_mve.h>
#endif

namespace arm_runtime {

// Sum of (first[i] + first_offset) * (second[i] + second_offset), modulo 2^32. The offsets are negated zero points.
#if defined(__ARM_FEATURE_MVE)
// Compilers do not vectorize this sum for MVE. Expanding the product leaves only sums of bytes and sums of products of
// bytes, for which MVE has instructions.
inline uint32_t multiply_accumulate(const int8_t* first, int32_t first_offset, const int8_t* second,
                                    int32_t second_offset, int32_t count) {
  constexpr int32_t kLanes = 16;
  int32_t products = 0, first_sum = 0, second_sum = 0;
  for (int32_t i = 0; i < count; i += kLanes) {
    const mve_pred16_t active = vctp8q(static_cast<uint32_t>(count - i));  // other lanes are read as 0
    const int8x16_t a = vldrbq_z_s8(first + i, active);
    const int8x16_t b = vldrbq_z_s8(second + i, active);
    products = vmladavaq_s8(products, a, b);
    first_sum = vaddvaq_s8(first_sum, a);
    second_sum = vaddvaq_s8(second_sum, b);
  }
  const auto a = static_cast<uint32_t>(first_offset), b = static_cast<uint32_t>(second_offset);
  return static_cast<uint32_t>(products) + b * static_cast<uint32_t>(first_sum) +
         a * (static_cast<uint32_t>(second_sum) + b * static_cast<uint32_t>(count));
}
#else
inline uint32_t multiply_accumulate(const int8_t* first, int32_t first_offset, const int8_t* second,
                                    int32_t second_offset, int32_t count) {
  uint32_t sum = 0;
  for (int32_t i = 0; i < count; ++i) {
    sum += static_cast<uint32_t>((first[i] + first_offset) * (second[i] + second_offset));
  }
  return sum;
}
#endif

}  // namespace arm_runtime
