// SPDX-License-Identifier: Apache-2.0
// Fixed-point arithmetic of the int8 kernels, bit-equal to CMSIS-NN's. The same functions in Python:
// arm_backend_core/cortex_m/fixed_point.py.
//
// Sums and left shifts wrap at 32 bits, as on the CPU. Exported programs do not overflow; damaged ones must not have
// undefined behavior.
#pragma once

#include <algorithm>
#include <cstdint>

namespace arm_runtime {

// Limits of the arguments of requantize().
constexpr int64_t kMinMultiplier = -INT64_C(0x7fffffff);
constexpr int64_t kMaxMultiplier = INT64_C(0x7fffffff);
constexpr int64_t kMinShift = -31;
constexpr int64_t kMaxShift = 30;

inline int32_t add_wrapping(int32_t first, int32_t second) {
  return static_cast<int32_t>(static_cast<uint32_t>(first) + static_cast<uint32_t>(second));
}

inline int32_t multiply_wrapping(int32_t first, int32_t second) {
  return static_cast<int32_t>(static_cast<uint32_t>(first) * static_cast<uint32_t>(second));
}

// x * 2^count. `count` is in [0, 31].
inline int32_t shift_left_wrapping(int32_t x, int32_t count) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) << count);
}

// floor((x * multiplier + 2^30) / 2^31): the rounded high half of 2 * x * multiplier, ties upwards
// (arm_nn_doubling_high_mult_no_sat).
inline int32_t doubling_high_multiply(int32_t x, int32_t multiplier) {
  return static_cast<int32_t>((static_cast<int64_t>(x) * multiplier + (INT64_C(1) << 30)) >> 31);
}

// x / 2^exponent, rounded to nearest, ties away from zero (arm_nn_divide_by_power_of_two). `exponent` is in [0, 31].
inline int32_t divide_by_power_of_two(int32_t x, int32_t exponent) {
  const auto mask = static_cast<int32_t>((UINT32_C(1) << exponent) - 1);
  const int32_t quotient = x >> exponent;
  const int32_t threshold = (mask >> 1) + (x < 0 ? 1 : 0);
  return quotient + ((x & mask) > threshold ? 1 : 0);
}

// x * multiplier * 2^(shift - 31), rounded after the product and again after a right shift (arm_nn_requantize).
// `multiplier` is in [kMinMultiplier, kMaxMultiplier], `shift` in [kMinShift, kMaxShift]; a positive shift is to the
// left.
inline int32_t requantize(int32_t x, int32_t multiplier, int32_t shift) {
  const int32_t scaled = shift_left_wrapping(x, std::max<int32_t>(shift, 0));
  return divide_by_power_of_two(doubling_high_multiply(scaled, multiplier), std::max<int32_t>(-shift, 0));
}

// Saturates to [low, high], which is a part of [-128, 127].
inline int8_t clamp_to_int8(int32_t x, int32_t low, int32_t high) {
  return static_cast<int8_t>(std::min(std::max(x, low), high));
}

// Requantizes an accumulator, adds the zero point `offset` and saturates to [low, high].
inline int8_t requantize_to_int8(int32_t accumulator, int32_t multiplier, int32_t shift, int32_t offset, int32_t low,
                                 int32_t high) {
  return clamp_to_int8(add_wrapping(requantize(accumulator, multiplier, shift), offset), low, high);
}

}  // namespace arm_runtime
