// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>

// Symbols of the linker script: bounds of the memory that the NPU can access.
extern "C" const uint8_t npu_memory[], stack_top[];
extern "C" int arm_model_self_test();

extern "C" bool ethosu_simulated_can_access(const void* data, size_t size) {
  const auto* start = static_cast<const uint8_t*>(data);
  return start >= npu_memory && start <= stack_top && size <= static_cast<size_t>(stack_top - start);
}

// QEMU does not emulate the core's cycle counter. Returns QEMU's clock in nanoseconds, through the semihosting call
// SYS_ELAPSED.
extern "C" uint64_t arm_model_cpu_cycles() {
  uint64_t elapsed = 0;
  register uint32_t operation __asm__("r0") = 0x30;
  register void* result __asm__("r1") = &elapsed;
  __asm__ volatile("bkpt 0xab" : "+r"(operation) : "r"(result) : "memory");
  return elapsed;
}

// Replacements of the driver's PMU functions. The NPU's cycles are the nanoseconds that the emulator runs.
struct ethosu_driver;
static uint64_t npu_start = 0;
extern "C" void ETHOSU_PMU_Enable(ethosu_driver*) {}
extern "C" void ETHOSU_PMU_Disable(ethosu_driver*) {}
extern "C" void ETHOSU_PMU_CYCCNT_Reset(ethosu_driver*) { npu_start = arm_model_cpu_cycles(); }
extern "C" void ETHOSU_PMU_CNTR_Enable(ethosu_driver*, uint32_t) {}
extern "C" uint64_t ETHOSU_PMU_Get_CCNTR(ethosu_driver*) { return arm_model_cpu_cycles() - npu_start; }

// Counters as firmware may add them.
struct arm_model_counter {
  const char* name;
  uint64_t value;
};
extern "C" size_t arm_model_read_counters(arm_model_counter* counters, size_t) {
  counters[0] = {"test_counter", 7};
  return 1;
}

// The startup code calls this function. Its name is not main, because C++ forbids calls of main().
extern "C" int run_firmware() { return arm_model_self_test(); }
