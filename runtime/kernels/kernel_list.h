// SPDX-License-Identifier: Apache-2.0
// Kernels that register_cortex_m_kernels() registers. With --gc-sections, the linker drops the code of all kernels that
// are not in the list.
//
// ARM_RUNTIME_CORTEX_M_KERNEL_LIST calls its argument, a macro, with the name of each kernel. To register a subset,
// define ARM_RUNTIME_CORTEX_M_SELECTED_KERNELS as the quoted path of a header that defines the list as below. If the
// CMake variable ARM_RUNTIME_CORTEX_M_KERNEL_LIST contains names of kernels, CMakeLists.txt generates such a header and
// defines ARM_RUNTIME_CORTEX_M_SELECTED_KERNELS.
#pragma once

#ifdef ARM_RUNTIME_CORTEX_M_SELECTED_KERNELS
#include ARM_RUNTIME_CORTEX_M_SELECTED_KERNELS
#else
#define ARM_RUNTIME_CORTEX_M_KERNEL_LIST(KERNEL) \
  KERNEL(dequantize_per_tensor)                  \
  KERNEL(maximum)                                \
  KERNEL(minimum)                                \
  KERNEL(pad)                                    \
  KERNEL(quantize_per_tensor)                    \
  KERNEL(quantized_activation)                   \
  KERNEL(quantized_add)                          \
  KERNEL(quantized_avg_pool2d)                   \
  KERNEL(quantized_avg_pool2d_nhwc)              \
  KERNEL(quantized_batch_matmul)                 \
  KERNEL(quantized_conv2d)                       \
  KERNEL(quantized_conv2d_nhwc)                  \
  KERNEL(quantized_depthwise_conv2d)             \
  KERNEL(quantized_depthwise_conv2d_nhwc)        \
  KERNEL(quantized_div)                          \
  KERNEL(quantized_linear)                       \
  KERNEL(quantized_max_pool2d)                   \
  KERNEL(quantized_max_pool2d_nhwc)              \
  KERNEL(quantized_mul)                          \
  KERNEL(quantized_transpose_conv2d)             \
  KERNEL(quantized_transpose_conv2d_nhwc)        \
  KERNEL(softmax)                                \
  KERNEL(transpose)
#endif
