// SPDX-License-Identifier: Apache-2.0
// The activation functions that are built into the NPU: no table in its memory is read for them.
#pragma once

#include <cstdint>

namespace arm_runtime::npu {

enum class Function : uint8_t { kNone, kTanh, kSigmoid };

// The function of `value` / 12288, with 15 fractional bits: a table of 65536 * sigmoid(i / 24), and straight lines
// between its points. That the NPU computes it so is seen in three LSTM networks: with these integers, which are those
// of TFLite Micro's int16 kernels, their programs for U55 and U85 give TFLite Micro's results, to the bit.
int64_t evaluate(Function function, int64_t value);

}  // namespace arm_runtime::npu
