// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace arm_runtime {

// Registers cortex_m::quantize_per_tensor.out and cortex_m::dequantize_per_tensor.out, which firmware has and
// the runtime of the executorch wheel does not. One that is registered already is left as it is.
// Returns the name of a kernel that the runtime did not take, or null.
const char* register_cortex_m_kernels();

}  // namespace arm_runtime
