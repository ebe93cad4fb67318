// SPDX-License-Identifier: Apache-2.0
// Definition of a kernel that register_cortex_m_kernels() can register.
#pragma once

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>

// Defines make_<symbol>_kernel(), which register_cortex_m_kernels() calls to get the kernel. Use this macro in the
// namespace arm_runtime, and list `symbol` in kernels/kernel_list.h.
//
//   symbol    name of the operator without its namespace
//   name      "cortex_m::<symbol>.out", in an array with linkage, because it is a template argument
//   function  takes a KernelRuntimeContext& and the arguments of the operator's schema, the result last, and returns
//             the result
#define ARM_RUNTIME_CORTEX_M_KERNEL(symbol, name, function)                               \
  executorch::runtime::Kernel make_##symbol##_kernel();                                   \
  executorch::runtime::Kernel make_##symbol##_kernel() {                                  \
    return executorch::extension::make_boxed_kernel(name, EXECUTORCH_FN(function, name)); \
  }
