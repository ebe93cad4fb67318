// SPDX-License-Identifier: Apache-2.0
#pragma once

// Declarations of ethos-u-core-driver's public header that EthosUBackend uses, for machines without the driver. With
// FAKE_DRIVER_ADDRESS_CACHE_CALLS, the cache functions take one address, as in versions of the driver before 1.0
// (2025).

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The fields that firmware may read. The real structure has more.
struct ethosu_driver {
  uint64_t fast_memory;
  size_t fast_memory_size;
  bool reserved;
};

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
  uint32_t macs_per_cc;  // log2 of the multiply-accumulates per cycle
  uint32_t cmd_stream_version;
  uint32_t custom_dma;
};

struct ethosu_hw_info {
  struct ethosu_id version;
  struct ethosu_config cfg;
};

// Cache maintenance. The driver defines weak functions that do nothing; firmware for a CPU with a data cache overrides
// them. Memory that the NPU writes must be aligned to the size of a cache line.
#ifdef FAKE_DRIVER_ADDRESS_CACHE_CALLS
void ethosu_flush_dcache(uint32_t* p, size_t bytes);  // NULL: the whole cache
void ethosu_invalidate_dcache(uint32_t* p, size_t bytes);
#else
void ethosu_flush_dcache(const uint64_t* base_addr, const size_t* base_addr_size, int num_base_addr);
void ethosu_invalidate_dcache(const uint64_t* base_addr, const size_t* base_addr_size, int num_base_addr);
#endif

// Waits for a free driver. Returns NULL if there is no driver.
struct ethosu_driver* ethosu_reserve_driver(void);
void ethosu_release_driver(struct ethosu_driver* drv);
void ethosu_get_hw_info(struct ethosu_driver* drv, struct ethosu_hw_info* hw);
// Returns 0, or a negative number on failure.
int ethosu_invoke_v3(struct ethosu_driver* drv, const void* custom_data_ptr, const int custom_data_size,
                     uint64_t* const base_addr, const size_t* base_addr_size, const int num_base_addr, void* user_arg);

#ifdef __cplusplus
}
#endif
