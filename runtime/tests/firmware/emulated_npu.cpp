// SPDX-License-Identifier: Apache-2.0
#include "emulated_npu.h"

#include <cstdio>

#include "emulator/program.h"
#include "tests/ethosu/fake_driver.h"

// Symbol of the linker script: start of the memory that the NPU can access.
extern "C" const uint8_t npu_memory[], stack_top[];

namespace {

namespace npu = arm_runtime::npu;

bool can_access(const uint8_t* base, size_t size) {
  return base >= npu_memory && base <= stack_top && size <= static_cast<size_t>(stack_top - base);
}

npu::Status run(const std::vector<uint8_t*>& bases) {
  uint8_t* regions[npu::kRegions] = {};
  uint64_t sizes[npu::kRegions] = {};
  for (size_t i = 0; i < bases.size(); ++i) {
    if (!can_access(bases[i], fake_driver.sizes[i])) {
      return npu::failure(npu::Error::kMemory, "region % of % bytes is outside the memory that the NPU can access",
                          static_cast<int64_t>(i), static_cast<int64_t>(fake_driver.sizes[i]));
    }
    regions[i] = bases[i];
    sizes[i] = fake_driver.sizes[i];
  }
  npu::Program program;
  const npu::Status status =
      program.load(static_cast<const uint8_t*>(fake_driver.commands), static_cast<size_t>(fake_driver.commands_size),
                   {bases[0], fake_driver.sizes[0]}, sizes);
  return status.ok() ? program.execute(regions) : status;
}

// Reports a fault of the NPU to the driver.
void run_or_fault(const std::vector<uint8_t*>& bases) {
  const npu::Status status = run(bases);
  if (!status.ok()) {
    char text[256];
    status.describe(text, sizeof(text));
    std::printf("the NPU stopped: %s\n", text);
    fake_driver.faults = true;
  }
}

}  // namespace

void init_npu(uint32_t product, uint32_t log2_macs) {
  fake_driver.product = product;
  fake_driver.log2_macs = log2_macs;
  fake_driver.npu = run_or_fault;
}
