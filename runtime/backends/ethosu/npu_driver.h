// SPDX-License-Identifier: Apache-2.0
// EthosUBackend's interface to ethos-u-core-driver. The driver's versions since 2023 are supported.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/executorch.h"
#include "payload/ethosu_payload.h"

namespace arm_runtime {

// Cache line of Cortex-M processors. The driver cleans and invalidates whole lines: if the NPU's memory shares a line
// with other data, CPU writes to that data may be lost.
constexpr size_t kCacheLine = 32;

// Rounds `size` up to whole cache lines; SIZE_MAX on overflow.
constexpr size_t round_up_to_cache_lines(size_t size) {
  return size > SIZE_MAX - (kCacheLine - 1) ? SIZE_MAX : (size + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Size of Region::kFastScratch in bytes. A COP1 stream does not contain this size. Programs that arm_recipes exports
// have it in the compile spec fast_scratch_size. For programs without this compile spec, `known` is false.
struct FastScratchSize {
  bool known = false;
  uint32_t size = 0;
};

// Cleans the data cache for these bytes, so that the NPU sees the CPU's writes.
void clean_cache(const void* data, size_t size);

// Checks that the firmware or the driver has enough fast scratch. Returns Ok if the needed size is unknown, and
// MemoryAllocationFailed, with the needed and the available size in the log, if there is too little.
Error check_fast_scratch(const EthosUPayload& payload, const FastScratchSize& needed);

// Runs the commands on an NPU. `scratch` consists of whole cache lines and contains inputs and outputs. If `cycles` is
// not null and the driver can count cycles, sets `*cycles` to the NPU's cycles.
Error run_on_npu(const EthosUPayload& payload, const FastScratchSize& fast_scratch, uint8_t* scratch, uint64_t* cycles);

}  // namespace arm_runtime
