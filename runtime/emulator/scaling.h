// SPDX-License-Identifier: Apache-2.0
// Requantization of the NPU: value * multiplier / 2^shift, rounded.
#pragma once

#include <cstdint>

#include "emulator/int128.h"

namespace arm_runtime::npu {

enum class Rounding : uint8_t {
  // kDouble (TOSA's DOUBLE_ROUND) and kDoubleAsymmetric round to nearest in two steps if the shift exceeds 31: first to
  // a multiple of 2^31, with ties rounded up, and then as the comments below say. With a shift of at most 31, both
  // modes round as kNatural.
  kDouble,            // second step: ties away from zero
  kDoubleAsymmetric,  // second step: ties up
  kNatural,           // to nearest, ties up
  kSymmetric,         // to nearest, ties away from zero
  kTowardsZero,       // truncation
  kDown,              // floor
};

struct Scale {
  uint32_t multiplier = 1;
  uint8_t shift = 0;  // below 64
};

// Returns the term that is added to the product before the shift. For the modes with two steps, one addition has the
// effect of both: 2^(shift - 1) + 2^30. For negative values, kDouble subtracts 2^30, so that halves are rounded away
// from zero.
template <typename T>
inline T rounding_term(Rounding rounding, int shift, bool negative) {
  if (shift == 0) {
    return 0;
  }
  const T half = T{1} << (shift - 1);
  const T half_step = shift > 31 ? T{1} << 30 : T{0};
  switch (rounding) {
    case Rounding::kDouble:
      return half + (negative ? -half_step : half_step);
    case Rounding::kDoubleAsymmetric:
      return half + half_step;
    case Rounding::kNatural:
      return half;
    case Rounding::kSymmetric:
      return half - (negative ? 1 : 0);
    case Rounding::kTowardsZero:
      return negative ? (T{1} << shift) - 1 : 0;
    case Rounding::kDown:
      return 0;
  }
  return 0;
}

// Saturates results at 2^60, so that sums of two results fit in 64 bits. Only damaged programs exceed this bound.
inline int64_t scale_int64(int64_t value, Scale scale, Rounding rounding) {
  constexpr int64_t kBound = int64_t{1} << 60;
  const int128_t product = int128_t{value} * int128_t{scale.multiplier};
  const int128_t result = (product + rounding_term<int128_t>(rounding, scale.shift, value < 0)) >> scale.shift;
  return result > kBound ? kBound : result < -kBound ? -kBound : static_cast<int64_t>(result);
}

// Scales a 32-bit accumulator (TOSA: apply_scale_32). With a multiplier below 2^31 and a shift of at most 61, product
// and rounding term fit in 64 bits, and the result is not saturated at 2^60. Otherwise, scale_int64() computes it.
inline int64_t scale_int32(int32_t value, Scale scale, Rounding rounding) {
  if (scale.shift > 61 || scale.multiplier > INT32_MAX) {
    return scale_int64(value, scale, rounding);
  }
  const int64_t product = static_cast<int64_t>(value) * static_cast<int64_t>(scale.multiplier);
  return (product + rounding_term<int64_t>(rounding, scale.shift, value < 0)) >> scale.shift;
}

}  // namespace arm_runtime::npu
