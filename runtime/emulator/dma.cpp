// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {
namespace {

Region tables(NpuState* state) { return {state->tables, kTableBytes}; }

// Start of a row of bytes in a region. `at` is not checked yet; registers and indices can give any address.
struct Range {
  Region region;
  int128_t at;

  uint8_t* data() const { return region.data + static_cast<int64_t>(at); }
};

bool inside(const Range& range, int64_t length) {
  return range.at >= 0 && length >= 0 && range.at <= int128_t{range.region.size} - length;
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
        const Range range{state->regions[d.index_region], index_at};
        if (!inside(range, 4)) {
          return failure(Error::kMemory, "index % lies outside its region of % bytes", j,
                         static_cast<int64_t>(range.region.size));
        }
        int32_t index;
        std::memcpy(&index, range.region.data + index_at, 4);
        index_at += 4;
        if (index < 0 || index > d.index_max) {
          return failure(Error::kIndex, "index % of the row is %, the largest is %", j, index, d.index_max);
        }
        (d.is_gather ? row_from : row_to) = index;
      }
      const Range a{source, d.source + int128_t{i} * d.source_stride1 + int128_t{row_from} * d.source_stride0};
      const Range b{target, d.target + int128_t{i} * d.target_stride1 + int128_t{row_to} * d.target_stride0};
      if (!inside(a, d.length) || !inside(b, d.length)) {
        return failure(Error::kMemory, "% bytes from % to % are not all in their regions", d.length,
                       static_cast<int64_t>(a.at), static_cast<int64_t>(b.at));
      }
      if (d.length > 0) {
        std::memmove(b.data(), a.data(), static_cast<size_t>(d.length));
      }
    }
  }
  return {};
}

}  // namespace arm_runtime::npu
