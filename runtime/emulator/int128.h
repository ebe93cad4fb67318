// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

namespace arm_runtime::npu {

// 128-bit two's complement integer for compilers of 32-bit processors, which do not have such a type. It has only the
// operations that the emulator needs. Sums and products wrap around. A shift must be below 64.
class Int128 {
 public:
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
  constexpr Int128(T value) : high_(sign(value)), low_(static_cast<uint64_t>(value)) {}

  explicit constexpr operator int64_t() const { return static_cast<int64_t>(low_); }
  explicit constexpr operator uint64_t() const { return low_; }

  friend constexpr Int128 operator+(Int128 a, Int128 b) {
    const uint64_t low = a.low_ + b.low_;
    return Int128(a.high_ + b.high_ + (low < a.low_ ? 1 : 0), low);
  }
  constexpr Int128 operator-() const { return Int128(~high_, ~low_) + 1; }
  friend constexpr Int128 operator-(Int128 a, Int128 b) { return a + -b; }

  // Multiplies 32-bit halves, so that no partial sum exceeds 64 bits.
  friend constexpr Int128 operator*(Int128 a, Int128 b) {
    constexpr uint64_t kMask = UINT32_MAX;
    const uint64_t a0 = a.low_ & kMask, a1 = a.low_ >> 32, b0 = b.low_ & kMask, b1 = b.low_ >> 32;
    const uint64_t first = a0 * b0;
    const uint64_t second = a1 * b0 + (first >> 32);
    const uint64_t third = a0 * b1 + (second & kMask);
    const uint64_t high = a1 * b1 + (second >> 32) + (third >> 32);
    return Int128(high + a.high_ * b.low_ + a.low_ * b.high_, third << 32 | (first & kMask));
  }

  friend constexpr Int128 operator<<(Int128 a, int bits) {
    return bits == 0 ? a : Int128(a.high_ << bits | a.low_ >> (64 - bits), a.low_ << bits);
  }
  // Rounds down.
  friend constexpr Int128 operator>>(Int128 a, int bits) {
    const auto high = static_cast<uint64_t>(static_cast<int64_t>(a.high_) >> bits);
    return bits == 0 ? a : Int128(high, a.low_ >> bits | a.high_ << (64 - bits));
  }

  friend constexpr bool operator<(Int128 a, Int128 b) {
    const auto a_high = static_cast<int64_t>(a.high_), b_high = static_cast<int64_t>(b.high_);
    return a_high != b_high ? a_high < b_high : a.low_ < b.low_;
  }
  friend constexpr bool operator>(Int128 a, Int128 b) { return b < a; }
  friend constexpr bool operator<=(Int128 a, Int128 b) { return !(b < a); }
  friend constexpr bool operator>=(Int128 a, Int128 b) { return !(a < b); }

 private:
  constexpr Int128(uint64_t high, uint64_t low) : high_(high), low_(low) {}

  template <typename T>
  static constexpr uint64_t sign(T value) {
    if constexpr (std::is_signed_v<T>) {
      return value < 0 ? UINT64_MAX : 0;
    }
    return 0;
  }

  uint64_t high_, low_;
};

// Products of 40- and 48-bit accumulators and 31-bit multipliers exceed 64 bits, and so do addresses in damaged
// programs.
#ifdef __SIZEOF_INT128__
__extension__ typedef __int128 int128_t;
#else
using int128_t = Int128;
#endif

}  // namespace arm_runtime::npu
