// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Puts the emulator of command streams in the place of the NPU of the driver's double, which then has the one that
// is asked for: its product (0: Ethos-U55, 1: U65, 2: U85) and the logarithm of its MACs.
void init_npu(uint32_t product, uint32_t log2_macs);
