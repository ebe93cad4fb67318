// SPDX-License-Identifier: Apache-2.0
// Registers the kernels when the program starts; not for the host plugin, which reports failures itself.
#include "kernels/cortex_m_kernels.h"

#include <executorch/runtime/core/error.h>
#include <executorch/runtime/platform/log.h>

namespace arm_runtime {
namespace {

executorch::runtime::Error register_kernels() {
  const char* refused = register_cortex_m_kernels();
  if (refused == nullptr) {
    return executorch::runtime::Error::Ok;
  }
  ET_LOG(Error, "%s: the runtime has no room for this kernel: build ExecuTorch with a larger MAX_KERNEL_NUM", refused);
  return executorch::runtime::Error::RegistrationExceedingMaxKernels;
}

}  // namespace
}  // namespace arm_runtime

// Named so that the linker can be told to keep it.
extern "C" const executorch::runtime::Error arm_runtime_cortex_m_kernels_registered = arm_runtime::register_kernels();
