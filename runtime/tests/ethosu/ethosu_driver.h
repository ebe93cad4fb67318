// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stand-in for the public header of ethos-u-core-driver, where that is not installed: the declarations that
// EthosUBackend uses, with the driver's types and conventions.

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ethosu_driver;

struct ethosu_id {
  uint32_t version_status;
  uint32_t version_minor;
  uint32_t version_major;
  uint32_t product_major;
  uint32_t arch_patch_rev;
  uint32_t arch_minor_rev;
  uint32_t arch_major_rev;
};

struct ethosu_config {
  uint32_t macs_per_cc;  // log2 of the multiply-accumulates a cycle
  uint32_t cmd_stream_version;
  uint32_t custom_dma;
};

struct ethosu_hw_info {
  struct ethosu_id version;
  struct ethosu_config cfg;
};

// Waits for a driver that nobody uses. NULL where there is none to wait for.
struct ethosu_driver* ethosu_reserve_driver(void);
void ethosu_release_driver(struct ethosu_driver* drv);
void ethosu_get_hw_info(struct ethosu_driver* drv, struct ethosu_hw_info* hw);
// 0, or negative on failure.
int ethosu_invoke_v3(struct ethosu_driver* drv, const void* custom_data_ptr, const int custom_data_size,
                     uint64_t* const base_addr, const size_t* base_addr_size, const int num_base_addr,
                     void* user_arg);

#ifdef __cplusplus
}
#endif
