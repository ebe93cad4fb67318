// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {
namespace {

Region tables(NpuState* state) { return {state->tables, kTableBytes}; }

// Address of a row of bytes in a region. `at` can be outside the region, because registers and indices can have any
// value.
struct RegionAddress {
  Region region;
  int128_t at;

  uint8_t* data() const { return region.data + static_cast<int64_t>(at); }
};

bool is_inside(const RegionAddress& address, int64_t length) {
  return address.at >= 0 && length >= 0 && address.at <= int128_t{address.region.size} - length;
}

}  // namespace

Status run_dma(const Operation& op, NpuState* state) {
  const Dma& d = op.dma;
  const Region source = d.from_tables ? tables(state) : state->regions[d.source_region];
  const Region target = d.to_tables ? tables(state) : state->regions[d.target_region];
  int64_t index_at = d.index;
  for (int64_t i = 0; i < d.count1; ++i, index_at += d.index_skip) {
    for (int64_t j = 0; j < d.count0; ++j) {
      int64_t row_from = j, row_to = j;
      if (d.is_gather || d.is_scatter) {
        const int64_t row = i * d.count0 + j;
        const RegionAddress index_address{state->regions[d.index_region], index_at};
        if (!is_inside(index_address, 4)) {
          return failure(Error::kMemory, "the index of row % is at byte %, outside its region of % bytes", row,
                         index_at, static_cast<int64_t>(index_address.region.size));
        }
        int32_t index;
        std::memcpy(&index, index_address.data(), 4);
        index_at += 4;
        if (index < 0 || index > d.index_max) {
          return failure(Error::kIndex, "the index of row % is %, the largest is %", row, index, d.index_max);
        }
        (d.is_gather ? row_from : row_to) = index;
      }
      const RegionAddress from{source,
                               d.source + int128_t{i} * d.source_stride1 + int128_t{row_from} * d.source_stride0};
      const RegionAddress to{target, d.target + int128_t{i} * d.target_stride1 + int128_t{row_to} * d.target_stride0};
      if (!is_inside(from, d.length) || !is_inside(to, d.length)) {
        return failure(
            Error::kMemory,
            "a copy of % bytes from byte % of the source region to byte % of the target region exceeds a region",
            d.length, static_cast<int64_t>(from.at), static_cast<int64_t>(to.at));
      }
      if (d.length > 0) {
        std::memmove(to.data(), from.data(), static_cast<size_t>(d.length));
      }
    }
  }
  return {};
}

}  // namespace arm_runtime::npu
