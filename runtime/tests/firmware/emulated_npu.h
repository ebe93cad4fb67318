// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Replaces the NPU of the fake driver by the emulator. The device then has the given NPU: its product (0: Ethos-U55,
// 1: U65, 2: U85) and log2 of its MACs.
void init_npu(uint32_t product, uint32_t log2_macs);
