// SPDX-License-Identifier: Apache-2.0
// Activation functions that the NPU computes itself, without a table in its memory.
#pragma once

#include <cstdint>

namespace arm_runtime::npu {

enum class Function : uint8_t { kNone, kTanh, kSigmoid };

// Evaluates the function at `value` / 12288, with 15 fractional bits: piecewise linear interpolation of 65536 *
// sigmoid(i / 24). Three LSTM networks prove the integers: they are those of TFLite Micro's int16 kernels, and with
// them the programs for U55 and U85 give TFLite Micro's results bit-exactly.
int64_t evaluate(Function function, int64_t value);

}  // namespace arm_runtime::npu
