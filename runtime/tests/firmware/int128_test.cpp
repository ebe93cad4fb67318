// SPDX-License-Identifier: Apache-2.0
// Compares Int128 with the compiler's __int128.
#include "emulator/int128.h"

#include <cstdio>
#include <random>

namespace {

using arm_runtime::npu::Int128;
__extension__ typedef __int128 Known;
__extension__ typedef unsigned __int128 Bits;

// The same number in both types.
struct Both {
  Int128 ours;
  Known theirs;
};

Known known(Int128 value) {
  const Bits high = static_cast<uint64_t>(value >> 32 >> 32);
  return static_cast<Known>(high << 64 | static_cast<uint64_t>(value));
}

int failures = 0;

void check(bool holds, int line) {
  if (!holds) {
    std::fprintf(stderr, "%s:%d\n", __FILE__, line);
    ++failures;
  }
}
#define CHECK(condition) check(condition, __LINE__)

// Converts a result of unsigned arithmetic, which wraps around. Overflow of the compiler's signed type is undefined.
Known wrapped(Bits bits) { return static_cast<Known>(bits); }

void compare(const Both& left, const Both& right, int bits) {
  const Int128 a = left.ours, b = right.ours;
  const Known x = left.theirs, y = right.theirs;
  const auto u = static_cast<Bits>(x), v = static_cast<Bits>(y);
  CHECK(known(a) == x && known(b) == y);
  CHECK(known(a + b) == wrapped(u + v) && known(a - b) == wrapped(u - v) && known(-a) == wrapped(-u));
  CHECK(known(a * b) == wrapped(u * v));
  CHECK(known(a << bits) == wrapped(u << bits) && known(a >> bits) == x >> bits);
  CHECK((a < b) == (x < y) && (a > b) == (x > y) && (a <= b) == (x <= y) && (a >= b) == (x >= y));
  CHECK(static_cast<int64_t>(a) == static_cast<int64_t>(x));
  CHECK(static_cast<uint64_t>(a) == static_cast<uint64_t>(x));
}

}  // namespace

int main() {
  std::mt19937_64 generator(0);
  const int64_t special[] = {0, 1, -1, 2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_MAX - 1, int64_t{1} << 32};
  const auto number = [&]() -> int64_t {
    const uint64_t bits = generator();
    return bits % 3 == 0 ? special[bits / 3 % 10] : static_cast<int64_t>(generator()) >> (bits / 3 % 64);
  };
  for (int i = 0; i < 200000; ++i) {
    const int64_t p = number(), q = number(), r = number();
    const Both product{Int128{p} * q + r, Known{p} * q + r}, single{q, q};
    const int bits = static_cast<int>(generator() % 64);
    compare(product, single, bits);
    compare(single, product, 0);
    compare(product, product, bits);
  }
  CHECK(known(Int128{UINT64_MAX}) == static_cast<Known>(UINT64_MAX) && known(Int128{-5}) == -5);
  if (failures == 0) {
    std::puts("ok");
  }
  return failures == 0 ? 0 : 1;
}
