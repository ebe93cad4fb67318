// SPDX-License-Identifier: Apache-2.0
// Activation functions that the NPU computes without a lookup table.
#pragma once

#include <cstdint>

namespace arm_runtime::npu {

enum class ActivationFunction : uint8_t { kNone, kTanh, kSigmoid };

// Evaluates the function at `value` / 12288; the result has 15 fractional bits. The function is interpolated linearly
// in the sigmoid table of TFLite Micro's int16 kernels: with this table, three LSTM networks compiled for U55 and U85
// give TFLite Micro's results bit-exactly.
int64_t evaluate(ActivationFunction function, int64_t value);

}  // namespace arm_runtime::npu
