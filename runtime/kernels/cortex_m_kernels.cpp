// SPDX-License-Identifier: Apache-2.0
#include "kernels/cortex_m_kernels.h"

#include <executorch/runtime/kernel/operator_registry.h>

#include <algorithm>
#include <cstring>

#include "common/executorch.h"
#include "kernels/kernel_list.h"

namespace arm_runtime {

using executorch::runtime::Kernel;

#define ARM_RUNTIME_DECLARE(symbol) Kernel make_##symbol##_kernel();
ARM_RUNTIME_CORTEX_M_KERNEL_LIST(ARM_RUNTIME_DECLARE)
#undef ARM_RUNTIME_DECLARE

namespace {

// The runtime aborts the process if a second kernel of the same name is registered.
bool is_registered(const char* name) {
  const auto registered = executorch::runtime::get_registered_kernels();
  return std::any_of(registered.begin(), registered.end(),
                     [name](const Kernel& other) { return std::strcmp(other.name_, name) == 0; });
}

}  // namespace

const char* register_cortex_m_kernels() {
#define ARM_RUNTIME_MAKE(symbol) make_##symbol##_kernel,
  Kernel (*const makers[])() = {ARM_RUNTIME_CORTEX_M_KERNEL_LIST(ARM_RUNTIME_MAKE)};
#undef ARM_RUNTIME_MAKE
  for (Kernel (*make)() : makers) {
    const Kernel kernel = make();
    if (!is_registered(kernel.name_) && executorch::runtime::register_kernel(kernel) != Error::Ok) {
      return kernel.name_;
    }
  }
  return nullptr;
}

}  // namespace arm_runtime
