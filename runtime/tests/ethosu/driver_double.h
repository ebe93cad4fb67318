// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

// The driver of ethosu_driver.h on a machine without an NPU: it keeps what it was called with.
struct DriverDouble {
  // How it behaves.
  bool has_npu = true;
  int invoke_result = 0;
  uint32_t log2_macs = 7;
  // Takes the place of the NPU: gets the base addresses of a call.
  std::function<void(const std::vector<uint8_t*>&)> npu;

  // What happened.
  int reserved = 0;
  int released = 0;
  int invoked = 0;
  // Asked for; with a driver for several kinds of NPU.
  uint32_t product = 0xFF;
  uint32_t product_log2_macs = 0;
  const void* commands = nullptr;
  int commands_size = 0;
  std::vector<uint8_t*> bases;
  std::vector<size_t> sizes;
};

extern DriverDouble driver_double;
// Whether it is a driver for several kinds of NPU, which gives one only to who says which.
extern const bool kDriverIsMultiVariant;
