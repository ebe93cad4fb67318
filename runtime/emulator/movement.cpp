// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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
      if (d.gathers || d.scatters) {
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
        (d.gathers ? row_from : row_to) = index;
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

void run_resize(const Operation& op, NpuState* state) {
  const Resize& z = op.resize;
  const Writer writer(op, state);
  const FeatureMap& ifm = op.ifm;
  const int32_t depth = op.ofm.depth;
  int32_t* pixels = state->ifm_int32.data();
  for (int32_t y = 0; y < ifm.height; ++y) {
    for (int32_t x = 0; x < ifm.width; ++x) {
      fetch(*state, ifm, y, x, pixels + (int64_t{y} * ifm.width + x) * depth);
    }
  }
  const auto row = [&ifm](int32_t y) { return std::clamp<int32_t>(y, 0, ifm.height - 1); };
  const auto column = [&ifm](int32_t x) { return std::clamp<int32_t>(x, 0, ifm.width - 1); };
  int64_t* out = state->row[0].data();
  for (int32_t y = 0; y < op.ofm.height; ++y) {
    const int32_t place_y = y * z.step_y + z.offset_y;
    const int32_t y0 = place_y >= 0 ? place_y / z.scale_y : -1;
    const int32_t dy = place_y - y0 * z.scale_y;
    const int32_t top = row(y0), bottom = row(y0 + 1);
    for (int32_t x = 0; x < op.ofm.width; ++x) {
      const int32_t place_x = x * z.step_x + z.offset_x;
      const int32_t x0 = place_x >= 0 ? place_x / z.scale_x : -1;
      const int32_t dx = place_x - x0 * z.scale_x;
      const int32_t left = column(x0), right = column(x0 + 1);
      const auto at = [&](int32_t pixel_y, int32_t pixel_x) {
        return pixels + (int64_t{pixel_y} * ifm.width + pixel_x) * depth;
      };
      // The factor 2^16 belongs to the format of the sums; the output's scale removes it.
      for (int32_t c = 0; c < depth; ++c) {
        if (z.mode != 0) {
          out[c] = int64_t{at(2 * dy >= z.scale_y ? bottom : top, 2 * dx >= z.scale_x ? right : left)[c]} * 65536;
          continue;
        }
        const int64_t upper = int64_t{at(top, left)[c]} * (z.scale_x - dx) + int64_t{at(top, right)[c]} * dx;
        const int64_t lower = int64_t{at(bottom, left)[c]} * (z.scale_x - dx) + int64_t{at(bottom, right)[c]} * dx;
        out[c] = (upper * (z.scale_y - dy) + lower * dy) * 65536;
      }
      writer.write(y, x, out);
    }
  }
}

}  // namespace arm_runtime::npu
