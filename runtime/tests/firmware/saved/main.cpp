// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>

// Of the linker script: where the memory is that the NPU reaches.
extern "C" const uint8_t npu_memory[], stack_top[];
extern "C" int arm_model_self_test();

extern "C" bool ethosu_simulated_reaches(const void* data, size_t size) {
  const auto* start = static_cast<const uint8_t*>(data);
  return start >= npu_memory && start <= stack_top && size <= static_cast<size_t>(stack_top - start);
}

// Called in the place of main(), which C++ does not let others call.
extern "C" int run_firmware() { return arm_model_self_test(); }
