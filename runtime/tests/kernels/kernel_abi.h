// SPDX-License-Identifier: Apache-2.0
// C interface of the tests that call kernels from Python: tests/runtime/kernel_library.py.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  ARM_TEST_NONE = 0,
  ARM_TEST_INT = 1,
  ARM_TEST_DOUBLE = 2,
  ARM_TEST_BOOL = 3,
  ARM_TEST_INT_LIST = 4,
  ARM_TEST_TENSOR = 5,
};

// An argument of an operator. Tensors use `dtype`, `length`, `data`, `sizes` and `dim_order`. Lists of integers use
// `list` and `length`.
typedef struct {
  int32_t kind;
  int32_t dtype;    // ExecuTorch's ScalarType
  int64_t integer;  // value of an int or a bool
  double real;
  const int64_t* list;
  int32_t length;  // number of elements of the list, or rank of the tensor
  int32_t reserved;
  void* data;
  const int32_t* sizes;
  const uint8_t* dim_order;
} arm_test_argument;

// Calls the kernel `name`, for example "cortex_m::quantized_add.out", with the operator's arguments; the last one is
// the result. Returns ExecuTorch's error code, or -1 if there is no such kernel. The log lines of the call are in
// `log`.
__attribute__((visibility("default"))) int32_t arm_test_call_kernel(const char* name,
                                                                    const arm_test_argument* arguments, uint64_t count,
                                                                    char* log, uint64_t log_size);

// Names of the kernels, separated by spaces.
__attribute__((visibility("default"))) const char* arm_test_list_kernels(void);

#ifdef __cplusplus
}
#endif
