// SPDX-License-Identifier: Apache-2.0
// Softmax over the last axis of int8 tensors. The limits and the arithmetic are described in
// arm_backend_core/cortex_m/kernels/softmax.py. A number with n integer bits is an int32 in units of 2^(n - 31).
#include <algorithm>
#include <cstdint>

#include "common/executorch.h"
#include "kernels/argument_checker.h"
#include "kernels/fixed_point.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

constexpr const char kSoftmax[] = "cortex_m::softmax.out";

constexpr int32_t kOutputZeroPoint = INT8_MIN;
constexpr int32_t kInputIntegerBits = 5;
constexpr int32_t kSumIntegerBits = 12;
// In a longer row, the sum of the exponentials can overflow.
constexpr int64_t kMaxRow = (1 << kSumIntegerBits) - 1;

constexpr int32_t kQuarter = INT32_C(1) << (31 - kInputIntegerBits - 2);
// exp(-1/8) and 1/3, with 0 integer bits.
constexpr int32_t kExpMinusEighth = 1895147668;
constexpr int32_t kThird = 715827883;
// exp(-2^k) for k = -2, ..., 4, with 0 integer bits.
constexpr int32_t kExpOfPowers[] = {1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242};
// 48/17 and -32/17 with 2 integer bits: 48/17 - 32/17 * x approximates 1 / x in [1/2, 1] with the least relative error.
constexpr int32_t kNewtonConstant = 1515870810;
constexpr int32_t kNewtonSlope = -1010580540;

struct ExpParameters {
  int32_t multiplier;
  int32_t shift;
  int32_t diff_min;
};

// exp(x) for x <= 0. x has 5 integer bits, the result has 0. x is the sum of a multiple of 1/4 and a negative
// remainder, `rest`, which is at least -1/4.
int32_t exp_of_negative(int32_t x) {
  if (x == 0) {
    return INT32_MAX;
  }
  const int32_t rest = (x & (kQuarter - 1)) - kQuarter;
  const int32_t quarters = rest - x;
  // The Taylor series around -1/8, of degree 4.
  const int32_t t = rest * (1 << kInputIntegerBits) + (1 << 28);
  const int32_t t2 = doubling_high_multiply(t, t);
  const int32_t t3 = doubling_high_multiply(t2, t);
  const int32_t t4 = doubling_high_multiply(t2, t2);
  const int32_t high = doubling_high_multiply(divide_by_power_of_two(t4, 2) + t3, kThird);
  const int32_t series = t + divide_by_power_of_two(high + t2, 1);
  int32_t result = kExpMinusEighth + doubling_high_multiply(series, kExpMinusEighth);
  uint32_t bit = kQuarter;
  for (const int32_t factor : kExpOfPowers) {
    if ((static_cast<uint32_t>(quarters) & bit) != 0) {
      result = doubling_high_multiply(result, factor);
    }
    bit <<= 1;
  }
  return result;
}

// 1 / (1 + x) for x in [0, 1), by three steps of the Newton-Raphson method. x and the result have 0 integer bits.
int32_t reciprocal_of_one_plus(int32_t x) {
  const auto half = static_cast<int32_t>((static_cast<int64_t>(x) + (INT64_C(1) << 31)) >> 1);
  int32_t result = kNewtonConstant + doubling_high_multiply(half, kNewtonSlope);
  for (int i = 0; i < 3; ++i) {
    const int32_t error = (INT32_C(1) << 29) - doubling_high_multiply(half, result);
    result += doubling_high_multiply(result, error) * 4;
  }
  return static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(result) * 2, INT32_MAX));
}

int32_t count_leading_zeros(uint32_t x) {
  int32_t count = 0;
  for (; x < UINT32_C(0x80000000); x <<= 1) {
    ++count;
  }
  return count;
}

int32_t exponential(int32_t difference, const ExpParameters& parameters) {
  return exp_of_negative(doubling_high_multiply(difference * (INT32_C(1) << parameters.shift), parameters.multiplier));
}

// `size` is in [1, kMaxRow], so the sum of the exponentials is in [2^19, 2^31).
void softmax_row(const int8_t* input, int8_t* out, ssize_t size, const ExpParameters& parameters) {
  const int8_t largest = *std::max_element(input, input + size);
  int32_t sum = 0;
  for (ssize_t i = 0; i < size; ++i) {
    const int32_t difference = input[i] - largest;
    if (difference >= parameters.diff_min) {
      sum += divide_by_power_of_two(exponential(difference, parameters), kSumIntegerBits);
    }
  }
  const int32_t headroom = count_leading_zeros(static_cast<uint32_t>(sum));
  // sum = (1 + fraction / 2^31) * 2^(31 - headroom).
  const auto fraction = static_cast<int32_t>((static_cast<uint32_t>(sum) << headroom) - UINT32_C(0x80000000));
  const int32_t reciprocal = reciprocal_of_one_plus(fraction);
  const int32_t divisor_bits = kSumIntegerBits + 23 - headroom;
  for (ssize_t i = 0; i < size; ++i) {
    const int32_t difference = input[i] - largest;
    int32_t quotient = 0;
    // If divisor_bits is 32 or more, the quotient is less than 1/2 and rounds to 0.
    if (difference >= parameters.diff_min && divisor_bits < 32) {
      quotient =
          divide_by_power_of_two(doubling_high_multiply(exponential(difference, parameters), reciprocal), divisor_bits);
    }
    out[i] = clamp_to_int8(quotient + kOutputZeroPoint, INT8_MIN, INT8_MAX);
  }
}

// Whether all differences from `diff_min` to 0 can be shifted to the left by `shift` without overflow.
bool is_shift_safe(int64_t shift, int64_t diff_min) {
  return -std::max<int64_t>(diff_min, INT8_MIN - INT8_MAX) <= INT64_C(0x80000000) >> shift;
}

Tensor& softmax_out(KernelRuntimeContext& context, const Tensor& input, int64_t dim, int64_t input_zero_point,
                    int64_t output_zero_point, int64_t input_multiplier, int64_t input_shift, int64_t diff_min,
                    Tensor& out) {
  ArgumentChecker check(context, kSoftmax);
  const ssize_t rank = input.dim();
  if (!check.has_type("input", input, ScalarType::Char) || !check.has_type("out", out, ScalarType::Char) ||
      !check.require(rank > 0, "input", "must have an axis") ||
      !check.require(dim == -1 || dim == rank - 1, "dim", "must be the last axis") ||
      !check.require(input.numel() > 0, "input", "must not be empty") ||
      !check.is_in("size of the last axis", input.size(rank - 1), 1, kMaxRow) ||
      !check.is_zero_point("input_zero_point", input_zero_point) ||
      !check.is_in("output_zero_point", output_zero_point, kOutputZeroPoint, kOutputZeroPoint) ||
      !check.is_in("input_multiplier", input_multiplier, 0, kMaxMultiplier) ||
      !check.is_in("input_shift", input_shift, 0, kMaxShift) || !check.is_in("diff_min", diff_min, INT32_MIN, 0) ||
      !check.require(is_shift_safe(input_shift, diff_min), "diff_min", "is too low for input_shift") ||
      !check.resize_like("out", out, input) || !check.is_contiguous("input", input) ||
      !check.is_contiguous("out", out)) {
    return out;
  }
  const ExpParameters parameters{static_cast<int32_t>(input_multiplier), static_cast<int32_t>(input_shift),
                                 static_cast<int32_t>(diff_min)};
  const ssize_t size = input.size(rank - 1);
  const auto* data = input.const_data_ptr<int8_t>();
  auto* result = out.mutable_data_ptr<int8_t>();
  for (ssize_t start = 0; start < input.numel(); start += size) {
    softmax_row(data + start, result + start, size, parameters);
  }
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(softmax, kSoftmax, softmax_out)

}  // namespace arm_runtime
