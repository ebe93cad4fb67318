// SPDX-License-Identifier: Apache-2.0
//
// Macros choose the driver that this file imitates. FAKE_DRIVER_SINGLE: version 1.99 or later, built for one kind of
// NPU. FAKE_DRIVER_SEVERAL: version 1.99 or later, built for several kinds of NPUs. If neither is defined: an earlier
// version, which only has ethosu_reserve_driver(). FAKE_DRIVER_ADDRESS_CACHE_CALLS: cache functions of versions
// before 1.0, which take one address. FAKE_DRIVER_WITHOUT_COUNTERS: firmware without the performance counters.
#include "fake_driver.h"

#include <cstring>

#include "ethosu_driver.h"

FakeDriver fake_driver;

#ifdef FAKE_DRIVER_SEVERAL
const bool kDriverSupportsSeveralNpus = true;
#else
const bool kDriverSupportsSeveralNpus = false;
#endif
#if defined(FAKE_DRIVER_SINGLE) || defined(FAKE_DRIVER_SEVERAL)
const bool kDriverReservesByProduct = true;
#else
const bool kDriverReservesByProduct = false;
#endif
#ifdef FAKE_DRIVER_WITHOUT_COUNTERS
const bool kDriverHasCounters = false;
#else
const bool kDriverHasCounters = true;
#endif

namespace {

constexpr size_t kNpuAlignment = 16;
constexpr size_t kCacheLine = 32;
constexpr size_t kFastMemoryBase = 2;

ethosu_driver npu;
uint64_t cycle_counter = 77;  // of an earlier run
bool counts_cycles = false;

void record_violation(const char* violation) {
  fake_driver.violations += violation;
  fake_driver.violations += '\n';
}

ethosu_driver* reserve() {
  if (!fake_driver.has_npu) {
    return nullptr;
  }
  if (npu.reserved) {
    record_violation("the driver is reserved twice: a real driver would wait forever");
  }
  npu.fast_memory = reinterpret_cast<uintptr_t>(fake_driver.fast_memory);
  npu.fast_memory_size = fake_driver.fast_memory_size;
  npu.reserved = true;
  ++fake_driver.reserved;
  return &npu;
}

uint32_t word(const void* data, size_t index) {
  uint32_t value = 0;
  std::memcpy(&value, static_cast<const uint8_t*>(data) + 4 * index, 4);
  return value;
}

bool aligned(uint64_t address, size_t alignment) { return address % alignment == 0; }

// Returns the byte offset of the commands, or 0 if the driver refuses the stream. The stream consists of words: "COP1";
// 1, followed by the configuration and the version; 5 (NOP), any number of times; 2, followed by the commands.
size_t find_commands(const void* data, size_t size) {
  if (size < 4 || size % 4 != 0 || std::memcmp(data, "COP1", 4) != 0) {
    return 0;
  }
  for (size_t at = 1; at < size / 4;) {
    switch (word(data, at) & 0xFF) {
      case 1: {
        const uint32_t configuration = word(data, at + 1);
        if (configuration >> 28 != fake_driver.product || (configuration & 0xF) != fake_driver.log2_macs) {
          return 0;
        }
        at += 3;
        break;
      }
      case 2:
        return 4 * (at + 1);
      case 5:
        ++at;
        break;
      default:
        return 0;
    }
  }
  return 0;
}

// Records that the CPU's cache was written back to memory (cleaned) for a range of addresses. The NPU does not see data
// that was never cleaned.
void clean(uint64_t start, size_t size) {
  fake_driver.cleaned.push_back({start, size});
  fake_driver.calls += 'c';
  if (!aligned(start, kCacheLine) && !fake_driver.invoking) {
    record_violation("the backend cleans from the middle of a cache line");
  }
}

bool is_clean(uint64_t start, size_t size) {
  for (const auto& [from, bytes] : fake_driver.cleaned) {
    if (from <= start && start + size <= from + bytes) {
      return true;
    }
  }
  return false;
}

// The driver invalidates the cache lines of memory that the NPU may have written. CPU writes to other bytes of these
// lines are lost. Weights (index 0) need not be aligned to a cache line, because nothing writes to them.
void invalidate(uint64_t start, size_t size, size_t index) {
  fake_driver.calls += 'i';
  if (index == 0) {
    return;
  }
  if (start == 0) {
    record_violation("the whole cache is invalidated");
    return;
  }
  const auto lose = [](uint64_t from, uint64_t to) {
    std::memset(reinterpret_cast<void*>(static_cast<uintptr_t>(from)), 0xDD, static_cast<size_t>(to - from));
  };
  const uint64_t end = start + size;
  lose(start / kCacheLine * kCacheLine, start);
  lose(end, (end + kCacheLine - 1) / kCacheLine * kCacheLine);
}

// Before a run, old versions of the driver clean only the scratch. New versions clean all regions.
#ifdef FAKE_DRIVER_ADDRESS_CACHE_CALLS
void clean_bases(const uint64_t* base_addr, const size_t* base_addr_size, int) {
  ethosu_flush_dcache(reinterpret_cast<uint32_t*>(static_cast<uintptr_t>(base_addr[1])), base_addr_size[1]);
}

void invalidate_bases(const uint64_t* base_addr, const size_t* base_addr_size, int count) {
  for (int i = 0; i < count; ++i) {
    invalidate(base_addr[i], base_addr_size[i], static_cast<size_t>(i));
  }
}
#else
void clean_bases(const uint64_t* base_addr, const size_t* base_addr_size, int count) {
  ethosu_flush_dcache(base_addr, base_addr_size, count);
}

void invalidate_bases(const uint64_t* base_addr, const size_t* base_addr_size, int count) {
  ethosu_invalidate_dcache(base_addr, base_addr_size, count);
}
#endif

}  // namespace

#ifdef FAKE_DRIVER_ADDRESS_CACHE_CALLS
void ethosu_flush_dcache(uint32_t* p, size_t bytes) { clean(reinterpret_cast<uintptr_t>(p), bytes); }

void ethosu_invalidate_dcache(uint32_t* p, size_t bytes) { invalidate(reinterpret_cast<uintptr_t>(p), bytes, 1); }
#else
void ethosu_flush_dcache(const uint64_t* base_addr, const size_t* base_addr_size, int num_base_addr) {
  for (int i = 0; i < num_base_addr; ++i) {
    clean(base_addr[i], base_addr_size[i]);
  }
}

void ethosu_invalidate_dcache(const uint64_t* base_addr, const size_t* base_addr_size, int num_base_addr) {
  for (int i = 0; i < num_base_addr; ++i) {
    invalidate(base_addr[i], base_addr_size[i], static_cast<size_t>(i));
  }
}
#endif

#if defined(FAKE_DRIVER_SINGLE) || defined(FAKE_DRIVER_SEVERAL)
extern "C" ethosu_driver* ethosu_reserve_driver_ex(uint32_t product, uint32_t log2_macs) {
  return product == fake_driver.product && log2_macs == fake_driver.log2_macs ? reserve() : nullptr;
}
#endif

#ifdef FAKE_DRIVER_SEVERAL
ethosu_driver* ethosu_reserve_driver() { return nullptr; }
#else
ethosu_driver* ethosu_reserve_driver() { return reserve(); }
#endif

void ethosu_release_driver(ethosu_driver* drv) {
  if (drv != &npu || !npu.reserved) {
    record_violation("a driver that is not reserved is released");
    return;
  }
  npu.reserved = false;
  ++fake_driver.released;
}

void ethosu_get_hw_info(ethosu_driver* drv, ethosu_hw_info* hw) {
  if (drv != &npu || !npu.reserved) {
    record_violation("ethosu_get_hw_info() is called for a driver that is not reserved");
  }
  hw->cfg.macs_per_cc = fake_driver.log2_macs;
}

int ethosu_invoke_v3(ethosu_driver* drv, const void* custom_data_ptr, const int custom_data_size,
                     uint64_t* const base_addr, const size_t* base_addr_size, const int num_base_addr, void*) {
  ++fake_driver.invoked;
  fake_driver.commands = custom_data_ptr;
  fake_driver.commands_size = custom_data_size;
  const auto count = static_cast<size_t>(num_base_addr);
  fake_driver.sizes.assign(base_addr_size, base_addr_size + count);
  if (drv != &npu || !npu.reserved) {
    record_violation("a driver that is not reserved is invoked");
    return -1;
  }
  if (npu.fast_memory != 0 && count > kFastMemoryBase) {
    if (base_addr_size[kFastMemoryBase] > npu.fast_memory_size) {
      return -1;
    }
    base_addr[kFastMemoryBase] = npu.fast_memory;
  }
  const size_t commands = find_commands(custom_data_ptr, static_cast<size_t>(custom_data_size));
  if (commands == 0 || !aligned(reinterpret_cast<uintptr_t>(custom_data_ptr) + commands, kNpuAlignment)) {
    return -1;
  }
  fake_driver.bases.clear();
  for (size_t i = 0; i < count; ++i) {
    if (!aligned(base_addr[i], kNpuAlignment)) {
      return -1;
    }
    if (base_addr[i] == 0) {
      record_violation("a base is a null pointer: the NPU would use address 0");
    }
    fake_driver.bases.push_back(reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(base_addr[i])));
  }
  fake_driver.invoking = true;
  clean_bases(base_addr, base_addr_size, num_base_addr);
  fake_driver.invoking = false;
  if (!is_clean(reinterpret_cast<uintptr_t>(custom_data_ptr), static_cast<size_t>(custom_data_size)) ||
      !is_clean(base_addr[0], base_addr_size[0]) || !is_clean(base_addr[1], base_addr_size[1])) {
    record_violation("the NPU reads bytes that the cache has not written to memory");
  }
  cycle_counter += fake_driver.counters_on && counts_cycles ? fake_driver.cycles : 0;
  ++fake_driver.ran;
  fake_driver.calls += 'r';
  if (fake_driver.npu && !fake_driver.faults) {
    fake_driver.npu(fake_driver.bases);
  }
  invalidate_bases(base_addr, base_addr_size, num_base_addr);
  return fake_driver.faults ? -1 : 0;
}

// The performance counters. After a run, an NPU loses power, and its counters lose their values, unless the counters
// are enabled.
#ifndef FAKE_DRIVER_WITHOUT_COUNTERS
extern "C" {

void ETHOSU_PMU_Enable(ethosu_driver* drv) {
  if (drv != &npu || !npu.reserved || fake_driver.counters_on) {
    record_violation("the counters are enabled twice, or for a driver that is not reserved");
  }
  fake_driver.counters_on = true;
}

void ETHOSU_PMU_Disable(ethosu_driver*) {
  fake_driver.counters_on = false;
  counts_cycles = false;
}

void ETHOSU_PMU_CYCCNT_Reset(ethosu_driver*) { cycle_counter = 0; }

void ETHOSU_PMU_CNTR_Enable(ethosu_driver*, uint32_t mask) { counts_cycles = mask >> 31 != 0; }

uint64_t ETHOSU_PMU_Get_CCNTR(ethosu_driver*) {
  if (!fake_driver.counters_on) {
    record_violation("the counters are read while they are disabled");
  }
  return cycle_counter;
}

}  // extern "C"
#endif
