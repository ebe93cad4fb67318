// SPDX-License-Identifier: Apache-2.0
// simulate() for an emulator that is linked statically, as in firmware.
#include "emulator/driver/simulated_npu.h"
#include "emulator/program.h"

static_assert(arm_runtime::kSimulatedRegionCount == arm_runtime::npu::kRegions);

bool arm_runtime::simulate(const void* commands, size_t commands_size, uint8_t* const* regions, const uint64_t* sizes,
                           char* text, size_t text_size) {
  npu::Program program;
  npu::Status status = program.load(static_cast<const uint8_t*>(commands), commands_size,
                                    {regions[0], static_cast<size_t>(sizes[0])}, sizes);
  if (status.ok()) {
    status = program.execute(regions);
  }
  if (!status.ok()) {
    status.describe(text, text_size);
  }
  return status.ok();
}
