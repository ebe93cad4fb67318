// SPDX-License-Identifier: Apache-2.0
// Compares Int128 with the compiler's __int128, the reference.
#include "emulator/int128.h"

#include <cstdio>
#include <random>

namespace {

using arm_runtime::npu::Int128;
__extension__ typedef __int128 Reference;
__extension__ typedef unsigned __int128 UnsignedReference;

// The same number in both types.
struct Both {
  Int128 tested;
  Reference reference;
};

Reference to_reference(Int128 value) {
  const UnsignedReference high = static_cast<uint64_t>(value >> 32 >> 32);
  return static_cast<Reference>(high << 64 | static_cast<uint64_t>(value));
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
Reference wrapped(UnsignedReference value) { return static_cast<Reference>(value); }

void compare(const Both& left, const Both& right, int shift) {
  const Int128 a = left.tested, b = right.tested;
  const Reference x = left.reference, y = right.reference;
  const auto u = static_cast<UnsignedReference>(x), v = static_cast<UnsignedReference>(y);
  CHECK(to_reference(a) == x && to_reference(b) == y);
  CHECK(to_reference(a + b) == wrapped(u + v) && to_reference(a - b) == wrapped(u - v) &&
        to_reference(-a) == wrapped(-u));
  CHECK(to_reference(a * b) == wrapped(u * v));
  CHECK(to_reference(a << shift) == wrapped(u << shift) && to_reference(a >> shift) == x >> shift);
  CHECK((a < b) == (x < y) && (a > b) == (x > y) && (a <= b) == (x <= y) && (a >= b) == (x >= y));
  CHECK(static_cast<int64_t>(a) == static_cast<int64_t>(x));
  CHECK(static_cast<uint64_t>(a) == static_cast<uint64_t>(x));
}

}  // namespace

int main() {
  std::mt19937_64 generator(0);
  const int64_t special[] = {0, 1, -1, 2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_MAX - 1, int64_t{1} << 32};
  const auto number = [&]() -> int64_t {
    const uint64_t random = generator();
    return random % 3 == 0 ? special[random / 3 % 10] : static_cast<int64_t>(generator()) >> (random / 3 % 64);
  };
  for (int i = 0; i < 200000; ++i) {
    const int64_t p = number(), q = number(), r = number();
    const Both product{Int128{p} * q + r, Reference{p} * q + r}, single{q, q};
    const int shift = static_cast<int>(generator() % 64);
    compare(product, single, shift);
    compare(single, product, 0);
    compare(product, product, shift);
  }
  CHECK(to_reference(Int128{UINT64_MAX}) == static_cast<Reference>(UINT64_MAX) && to_reference(Int128{-5}) == -5);
  if (failures == 0) {
    std::puts("ok");
  }
  return failures == 0 ? 0 : 1;
}
