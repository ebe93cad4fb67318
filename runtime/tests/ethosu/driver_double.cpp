// SPDX-License-Identifier: Apache-2.0
#include "driver_double.h"

#include "ethosu_driver.h"

struct ethosu_driver {};

DriverDouble driver_double;

namespace {

ethosu_driver npu;

ethosu_driver* reserve() {
  if (!driver_double.has_npu) {
    return nullptr;
  }
  ++driver_double.reserved;
  return &npu;
}

}  // namespace

#ifdef MULTI_VARIANT
const bool kDriverIsMultiVariant = true;

extern "C" ethosu_driver* ethosu_reserve_driver_ex(uint32_t product, uint32_t log2_macs) {
  driver_double.product = product;
  driver_double.product_log2_macs = log2_macs;
  return reserve();
}

ethosu_driver* ethosu_reserve_driver() { return nullptr; }
#else
const bool kDriverIsMultiVariant = false;

ethosu_driver* ethosu_reserve_driver() { return reserve(); }
#endif

void ethosu_release_driver(ethosu_driver* drv) {
  if (drv == &npu) {
    ++driver_double.released;
  }
}

void ethosu_get_hw_info(ethosu_driver*, ethosu_hw_info* hw) { hw->cfg.macs_per_cc = driver_double.log2_macs; }

int ethosu_invoke_v3(ethosu_driver* drv, const void* custom_data_ptr, const int custom_data_size,
                     uint64_t* const base_addr, const size_t* base_addr_size, const int num_base_addr,
                     void*) {
  ++driver_double.invoked;
  driver_double.commands = custom_data_ptr;
  driver_double.commands_size = custom_data_size;
  driver_double.bases.clear();
  driver_double.sizes.assign(base_addr_size, base_addr_size + num_base_addr);
  for (int i = 0; i < num_base_addr; ++i) {
    driver_double.bases.push_back(reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(base_addr[i])));
  }
  if (drv == &npu && driver_double.invoke_result == 0 && driver_double.npu) {
    driver_double.npu(driver_double.bases);
  }
  return driver_double.invoke_result;
}
