// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// The driver of ethosu_driver.h on a machine without an NPU. It keeps what it was called with, refuses what the
// driver refuses, and notes in `violations` what the driver takes on trust.
struct DriverDouble {
  // How it behaves: the NPU that ethosu_init() was called for.
  bool has_npu = true;
  uint32_t product = 0;  // 0: Ethos-U55, 1: U65, 2: U85
  uint32_t log2_macs = 7;
  // What ethosu_init() got.
  void* fast_memory = nullptr;
  size_t fast_memory_size = 0;
  // The NPU stops with a fault.
  bool faults = false;
  // Takes the place of the NPU: gets the base addresses of a call.
  std::function<void(const std::vector<uint8_t*>&)> npu;
  uint64_t cycles = 12345678901;  // of a run

  // What happened.
  int reserved = 0;
  int released = 0;
  int invoked = 0;
  int ran = 0;
  const void* commands = nullptr;
  int commands_size = 0;
  std::vector<uint8_t*> bases;  // as the NPU saw them
  std::vector<size_t> sizes;
  // Of the cache, by start and size, and in order: (c)lean, (r)un, (i)nvalidate.
  std::vector<std::pair<uint64_t, size_t>> cleaned;
  std::string calls;
  bool invoking = false;
  bool counters_on = false;
  std::string violations;  // a line for each
};

extern DriverDouble driver_double;
// Whether the driver can be asked for an NPU of a kind, is built for several, and has performance counters.
extern const bool kDriverKnowsKinds;
extern const bool kDriverIsForSeveral;
extern const bool kDriverCounts;
