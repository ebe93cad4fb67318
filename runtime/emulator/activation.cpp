// SPDX-License-Identifier: Apache-2.0
#include "emulator/activation.h"

#include <cmath>

namespace arm_runtime::npu {
namespace {

constexpr int kPoints = 256;

// 65536 * sigmoid(i / 24), the table of TFLite Micro's kernels. With the step h = 1/24, linear interpolation gives
// values that are too low by up to |sigmoid''| * h^2 / 8. Half of this error is added to each point. The last point is
// the largest 16-bit number.
struct SigmoidTable {
  int64_t points[kPoints];

  SigmoidTable() {
    for (int i = 0; i < kPoints; ++i) {
      const double value = 1.0 / (1.0 + std::exp(-i / 24.0));
      const double curvature = value * (1.0 - value) * (2.0 * value - 1.0) / (24.0 * 24.0);
      points[i] = std::lround(65536.0 * (value + curvature / 16.0));
    }
    points[kPoints - 1] = 65535;
  }
};

const SigmoidTable kTable;

// Returns 65536 * 2^bits * sigmoid(magnitude / 2^bits / 24), or `top` beyond the end of the table.
int64_t interpolated_sigmoid(int64_t magnitude, int bits, int64_t top) {
  const int64_t index = magnitude >> bits;
  if (index >= kPoints - 1) {
    return top;
  }
  const int64_t base = kTable.points[index], slope = kTable.points[index + 1] - base;
  return base * (int64_t{1} << bits) + slope * (magnitude & ((int64_t{1} << bits) - 1));
}

// Returns 2^15 * sigmoid(value / 12288), rounded to nearest. Halves are rounded up for a positive argument, and down
// for a negative one.
int64_t sigmoid(int64_t value) {
  constexpr int64_t kOne = int64_t{1} << 25;
  const int64_t line = interpolated_sigmoid(value < 0 ? -value : value, 9, int64_t{0x7FFF} << 10);
  return (value < 0 ? kOne - line + 511 : line + 512) >> 10;
}

// Computes tanh(value) as 2 * sigmoid(2 * value) - 1, with the same rounding.
int64_t hyperbolic_tangent(int64_t value) {
  constexpr int64_t kHalf = int64_t{1} << 23;
  const int64_t line = interpolated_sigmoid(value < 0 ? -value : value, 8, int64_t{0xFFFF} << 8);
  return (value < 0 ? kHalf - line + 127 : line - kHalf + 128) >> 8;
}

}  // namespace

int64_t evaluate(ActivationFunction function, int64_t value) {
  switch (function) {
    case ActivationFunction::kTanh:
      return hyperbolic_tangent(value);
    case ActivationFunction::kSigmoid:
      return sigmoid(value);
    default:
      return value;
  }
}

}  // namespace arm_runtime::npu
