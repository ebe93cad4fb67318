// SPDX-License-Identifier: Apache-2.0
// Registers the kernels at program start. The host plugin, which reports failures itself, does not link this file.
#include "kernels/cortex_m_kernels.h"

#include <executorch/runtime/platform/log.h>

#include "common/executorch.h"

namespace arm_runtime {
namespace {

Error register_kernels() {
  const char* refused = register_cortex_m_kernels();
  if (refused == nullptr) {
    return Error::Ok;
  }
  ET_LOG(Error, "%s: the runtime has no room for this kernel: build ExecuTorch with a larger MAX_KERNEL_NUM", refused);
  return Error::RegistrationExceedingMaxKernels;
}

}  // namespace
}  // namespace arm_runtime

// Linkers keep this file if the option --undefined refers to this name.
extern "C" const executorch::runtime::Error arm_runtime_cortex_m_kernels_registered = arm_runtime::register_kernels();
