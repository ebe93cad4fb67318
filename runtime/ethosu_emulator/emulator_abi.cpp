// SPDX-License-Identifier: Apache-2.0
#include "ethosu_emulator/emulator_abi.h"

#include <cstdio>
#include <exception>
#include <memory>

#include "ethosu_emulator/program.h"

using arm_runtime::npu::Bytes;
using arm_runtime::npu::Program;
using arm_runtime::npu::Status;

struct arm_npu_program {
  Program program;
};

arm_npu_program* arm_npu_load(const void* stream, uint64_t stream_size, const void* weights, const uint64_t* sizes,
                              char* message, uint64_t message_size) try {
  auto loaded = std::make_unique<arm_npu_program>();
  const Bytes constants{static_cast<const uint8_t*>(weights), static_cast<size_t>(sizes[0])};
  const Status status = loaded->program.load(static_cast<const uint8_t*>(stream), static_cast<size_t>(stream_size),
                                             constants, sizes);
  if (!status.ok()) {
    status.describe(message, static_cast<size_t>(message_size));
    return nullptr;
  }
  return loaded.release();
} catch (const std::exception& error) {  // of the C++ library, whose containers hold the program: no memory
  std::snprintf(message, static_cast<size_t>(message_size), "the program is too large: %s", error.what());
  return nullptr;
}

int32_t arm_npu_execute(arm_npu_program* program, void* const* regions, char* message, uint64_t message_size) {
  uint8_t* bases[arm_runtime::npu::kRegions];
  for (int i = 0; i < arm_runtime::npu::kRegions; ++i) {
    bases[i] = static_cast<uint8_t*>(regions[i]);
  }
  const Status status = program->program.execute(bases);
  if (!status.ok()) {
    status.describe(message, static_cast<size_t>(message_size));
  }
  return static_cast<int32_t>(status.error);
}

uint64_t arm_npu_reach(const arm_npu_program* program, int32_t region) {
  return region >= 0 && region < arm_runtime::npu::kRegions ? program->program.reach(region) : 0;
}

void arm_npu_free(arm_npu_program* program) { delete program; }
