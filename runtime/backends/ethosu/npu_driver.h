// SPDX-License-Identifier: Apache-2.0
// What EthosUBackend asks of ethos-u-core-driver, in its versions since 2023.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/executorch.h"
#include "payload/ethosu_payload.h"

namespace arm_runtime {

// Of the data caches of Cortex-M processors. The driver cleans and invalidates whole lines: a line that the
// NPU's memory shares with other data loses what the CPU wrote there.
constexpr size_t kCacheLine = 32;

// `size` rounded up to cache lines; SIZE_MAX where that is more than there can be.
constexpr size_t round_up_to_cache_lines(size_t size) {
  return size > SIZE_MAX - (kCacheLine - 1) ? SIZE_MAX : (size + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Region::kFastScratch of a program. A COP1 stream does not tell its size; the compile spec of our exports does.
struct FastScratch {
  bool known = false;
  uint32_t size = 0;
};

// Writes back what the data cache holds of these bytes, so that the NPU sees what the CPU wrote.
void clean_cache(const void* data, size_t size);

// Checks that the firmware or the driver has the fast scratch that a program needs; the size has to be known.
// Returns MemoryAllocationFailed, with both sizes in the log.
Error check_fast_scratch(const EthosUPayload& payload, const FastScratch& needed);

// Runs the commands on an NPU, with inputs and outputs in `scratch`: whole cache lines. `cycles`, unless null, becomes
// the cycles of the NPU; it stays as it is where the driver cannot count them.
Error run_on_npu(const EthosUPayload& payload, const FastScratch& fast_scratch, uint8_t* scratch, uint64_t* cycles);

}  // namespace arm_runtime
