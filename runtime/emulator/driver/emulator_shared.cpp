// SPDX-License-Identifier: Apache-2.0
// simulate() for an emulator in a shared library, which exports only its C interface.
#include <cstdio>

#include "emulator/driver/simulated_npu.h"
#include "emulator/emulator_abi.h"

bool arm_runtime::simulate(const void* commands, size_t commands_size, uint8_t* const* regions, const uint64_t* sizes,
                           char* text, size_t text_size) {
  ethosu_emulator_error error = {};
  void* bases[kSimulatedRegionCount];
  for (size_t i = 0; i < kSimulatedRegionCount; ++i) {
    bases[i] = regions[i];
  }
  ethosu_emulator_program* program = ethosu_emulator_load(commands, commands_size, regions[0], sizes, &error);
  const bool done = program != nullptr && ethosu_emulator_execute(program, bases, &error) == 0;
  if (program != nullptr) {
    ethosu_emulator_free(program);
  }
  if (!done) {
    std::snprintf(text, text_size, "%s", error.text);
  }
  return done;
}
