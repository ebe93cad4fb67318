// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// A fake of the driver in ethosu_driver.h. It records calls, refuses what the driver refuses, and records in
// `violations` what the driver does not check.
struct FakeDriver {
  // Behaviour: the NPU that ethosu_init() was called for.
  bool has_npu = true;
  uint32_t product = 0;  // 0: Ethos-U55, 1: U65, 2: U85
  uint32_t log2_macs = 7;
  // Fast memory given to ethosu_init().
  void* fast_memory = nullptr;
  size_t fast_memory_size = 0;
  // The NPU stops with a fault.
  bool faults = false;
  // Called in place of the NPU, with the base addresses of a call.
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
// Whether the driver can reserve an NPU by its kind, is built for several kinds, and has performance counters.
extern const bool kDriverReservesByProduct;
extern const bool kDriverIsForSeveral;
extern const bool kDriverHasCounters;
