// SPDX-License-Identifier: Apache-2.0
// The functions of ethos-u-core-driver that EthosUBackend calls, implemented with the emulator, for the
// self-test of firmware on a machine without an NPU. This driver accepts programs for every NPU. Its cache functions do
// nothing, and it counts no cycles.
#include <ethosu_driver.h>

#include <cstdio>

#include "emulator/driver/simulated_npu.h"

extern "C" __attribute__((weak)) bool ethosu_simulated_can_access(const void*, size_t) { return true; }

namespace {

// Alignment of the NPU's accesses through its bus.
constexpr uint64_t kAlignment = 16;

ethosu_driver npu;
uint32_t log2_macs = 0;

int refuse(const char* reason) {
  std::fprintf(stderr, "simulated NPU: %s\n", reason);
  return -1;
}

int refuse_region(int region, const char* reason) {
  std::fprintf(stderr, "simulated NPU: region %d %s\n", region, reason);
  return -1;
}

}  // namespace

extern "C" ethosu_driver* ethosu_reserve_driver_ex(uint32_t, uint32_t program_log2_macs) {
  log2_macs = program_log2_macs;
  return ethosu_reserve_driver();
}

ethosu_driver* ethosu_reserve_driver() {
  if (npu.reserved) {
    refuse("the driver is reserved twice: a real driver would wait forever");
    return nullptr;
  }
  npu.reserved = true;
  return &npu;
}

void ethosu_release_driver(ethosu_driver* drv) { drv->reserved = false; }

void ethosu_get_hw_info(ethosu_driver*, ethosu_hw_info* hw) {
  *hw = {};
  hw->cfg.macs_per_cc = log2_macs;
}

void ethosu_flush_dcache(const uint64_t*, const size_t*, int) {}

void ethosu_invalidate_dcache(const uint64_t*, const size_t*, int) {}

int ethosu_invoke_v3(ethosu_driver*, const void* custom_data_ptr, const int custom_data_size, uint64_t* const base_addr,
                     const size_t* base_addr_size, const int num_base_addr, void*) {
  if (num_base_addr < 0 || static_cast<size_t>(num_base_addr) > arm_runtime::kSimulatedRegionCount) {
    return refuse("more base addresses than the NPU has regions");
  }
  uint8_t* regions[arm_runtime::kSimulatedRegionCount] = {};
  uint64_t sizes[arm_runtime::kSimulatedRegionCount] = {};
  for (int i = 0; i < num_base_addr; ++i) {
    regions[i] = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(base_addr[i]));
    sizes[i] = base_addr_size[i];
    if (base_addr[i] % kAlignment != 0) {
      return refuse_region(i, "does not start at a multiple of 16 bytes");
    }
    if (!ethosu_simulated_can_access(regions[i], base_addr_size[i])) {
      return refuse_region(i, "is in memory that no NPU of this device can access");
    }
  }
  char text[256] = "";
  const auto size = static_cast<size_t>(custom_data_size);
  if (!ethosu_simulated_can_access(custom_data_ptr, size)) {
    return refuse("the commands are in memory that no NPU of this device can access");
  }
  if (!arm_runtime::simulate(custom_data_ptr, size, regions, sizes, text, sizeof(text))) {
    return refuse(text);
  }
  return 0;
}
