// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace arm_runtime {

// Registers cortex_m::quantize_per_tensor.out and cortex_m::dequantize_per_tensor.out, which ExecuTorch has for
// firmware but not in the executorch wheel. It skips a kernel that is already registered. Returns the name of a kernel
// that the runtime refused, or null.
const char* register_cortex_m_kernels();

}  // namespace arm_runtime
