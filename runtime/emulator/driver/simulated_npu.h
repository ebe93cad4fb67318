// SPDX-License-Identifier: Apache-2.0
// What stands behind ethosu_driver.h where there is no NPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace arm_runtime {

// Regions of base addresses that the emulator knows.
constexpr size_t kSimulatedRegions = 8;

// Executes a command stream with its header on the emulator, over regions of these sizes. Returns false, with the
// reason in `text`, where the stream is damaged or an NPU would stop.
bool simulate(const void* commands, size_t commands_size, uint8_t* const* regions, const uint64_t* sizes, char* text,
              size_t text_size);

}  // namespace arm_runtime

extern "C" {
// Whether an NPU of this device reaches the memory. The default, which is weak, says yes to all.
bool ethosu_simulated_reaches(const void* data, size_t size);
}
