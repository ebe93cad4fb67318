// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Makes the fake driver execute programs with the emulator, as an NPU of this product (0: Ethos-U55, 1: U65, 2: U85)
// and log2 of the MACs per cycle.
void init_npu(uint32_t product, uint32_t log2_macs);
