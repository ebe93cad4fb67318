// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// A fake of the driver in ethosu_driver.h. It records calls. It refuses calls that the driver refuses. Errors of the
// caller that the driver does not detect are recorded in `violations`.
struct FakeDriver {
  // Behaviour. Whether ethosu_init() was called, and for which NPU.
  bool has_npu = true;
  uint32_t product = 0;  // 0: Ethos-U55, 1: U65, 2: U85
  uint32_t log2_macs = 7;
  // Fast memory that the firmware passed to ethosu_init().
  void* fast_memory = nullptr;
  size_t fast_memory_size = 0;
  // Whether the NPU stops with a fault.
  bool faults = false;
  // Computes the results instead of an NPU. The arguments are the base addresses of the regions.
  std::function<void(const std::vector<uint8_t*>&)> npu;
  uint64_t cycles = 12345678901;  // of a run

  // Recorded calls.
  int reserved = 0;
  int released = 0;
  int invoked = 0;
  int ran = 0;
  const void* commands = nullptr;
  int commands_size = 0;
  std::vector<uint8_t*> bases;  // as the NPU gets them
  std::vector<size_t> sizes;
  // Cache operations by start and size, and their order: (c)lean, (r)un, (i)nvalidate.
  std::vector<std::pair<uint64_t, size_t>> cleaned;
  std::string calls;
  bool invoking = false;
  bool counters_on = false;
  std::string violations;  // one line each
};

extern FakeDriver fake_driver;
extern const bool kDriverReservesByProduct;    // whether the driver has ethosu_reserve_driver_ex()
extern const bool kDriverSupportsSeveralNpus;  // whether the driver is built for several kinds of NPUs
extern const bool kDriverHasCounters;
