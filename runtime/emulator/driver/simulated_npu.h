// SPDX-License-Identifier: Apache-2.0
// The simulated NPU behind ethosu_driver.h, for machines without an NPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace arm_runtime {

// Number of regions of the emulator.
constexpr size_t kSimulatedRegionCount = 8;

// Loads and executes a command stream with its header on the emulator. Returns false, with the reason in `text`, if the
// emulator reports an error (see npu::Error).
bool simulate(const void* commands, size_t commands_size, uint8_t* const* regions, const uint64_t* sizes, char* text,
              size_t text_size);

}  // namespace arm_runtime

extern "C" {
// Whether an NPU of this device can access the memory. The default is a weak function that returns true.
bool ethosu_simulated_can_access(const void* data, size_t size);
}
