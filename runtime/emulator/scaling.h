// SPDX-License-Identifier: Apache-2.0
// Requantization of the NPU: value * multiplier / 2^shift, rounded.
#pragma once

#include <cstdint>

#include "emulator/int128.h"

namespace arm_runtime::npu {

enum class Rounding : uint8_t {
  kDouble,            // to nearest; halves go away from zero in a first step to 31 bits
  kDoubleAsymmetric,  // the same, but the first step rounds halves up
  kNatural,           // to nearest, halves up
  kSymmetric,         // to nearest, halves away from zero
  kTowardsZero,
  kDown,
};

struct Scale {
  uint32_t multiplier = 1;
  uint8_t shift = 0;  // below 64
};

// Returns the term that is added before the shift. If the shift exceeds 31 bits, double rounding first rounds to a step
// of 2^-31 of the result's unit. Its term is then half a unit plus half a step.
template <typename T>
inline T rounding_term(Rounding rounding, int shift, bool negative) {
  if (shift == 0) {
    return 0;
  }
  const T half = T{1} << (shift - 1);
  const T step = shift > 31 ? T{1} << 30 : T{0};
  switch (rounding) {
    case Rounding::kDouble:
      return half + (negative ? -step : step);
    case Rounding::kDoubleAsymmetric:
      return half + step;
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

// The same for 32-bit accumulators. With a multiplier below 2^31, product and rounding term fit in 64 bits.
inline int64_t scale_int32(int32_t value, Scale scale, Rounding rounding) {
  if (scale.shift > 61 || scale.multiplier > INT32_MAX) {
    return scale_int64(value, scale, rounding);
  }
  const int64_t product = static_cast<int64_t>(value) * static_cast<int64_t>(scale.multiplier);
  return (product + rounding_term<int64_t>(rounding, scale.shift, value < 0)) >> scale.shift;
}

}  // namespace arm_runtime::npu
