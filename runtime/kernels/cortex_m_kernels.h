// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace arm_runtime {

// Registers the kernels of kernels/kernel_list.h. ExecuTorch provides kernels of these operators for firmware, but not
// in the executorch wheel. If an operator already has a registered kernel, the kernel in the list is skipped. Returns
// the name of the kernel that the runtime refused, or null.
const char* register_cortex_m_kernels();

}  // namespace arm_runtime
