// SPDX-License-Identifier: Apache-2.0
// Little-endian numbers at any address, on hosts of any byte order.
#pragma once

#include <cstdint>

namespace arm_runtime {

inline uint32_t read_u32(const uint8_t* at) {
  return uint32_t{at[0]} | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}

inline uint16_t read_u16(const uint8_t* at) { return static_cast<uint16_t>(at[0] | at[1] << 8); }

inline int32_t read_i32(const uint8_t* at) { return static_cast<int32_t>(read_u32(at)); }

}  // namespace arm_runtime
