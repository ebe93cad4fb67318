// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {

// Visitors of the byte ranges that an operation reads and writes. They do not execute the operation.

// Region number of the NPU's internal memory for lookup tables. It follows the numbers of the program's regions.
constexpr int kTableRegion = kRegions;
constexpr int kCheckedRegions = kRegions + 1;

// kClobbered: the operation overwrites all tables, because the NPU keeps accumulators or inputs in the same memory.
enum class Operand : uint8_t { kIfm, kIfm2, kOfm, kConstants, kTable, kSource, kTarget, kIndices, kClobbered };

// A part of a feature map: half-open ranges of rows, columns and channels.
struct Box {
  int32_t y0 = 0, y1 = 0, x0 = 0, x1 = 0, c0 = 0, c1 = 0;
};

inline Box whole_box(const FeatureMap& map) { return {0, map.height, 0, map.width, 0, map.depth}; }

// Calls `visit(start, end)` for each contiguous run of bytes of `box`.
template <typename Visit>
void visit_box(const FeatureMap& map, const Box& box, Visit visit) {
  for (int32_t y = box.y0; y < box.y1; ++y) {
    int32_t c1;
    for (int32_t c = box.c0; c < box.c1; c = c1) {
      c1 = map.is_nhcwb16 ? std::min(box.c1, (c | 15) + 1) : box.c1;
      const int64_t length = int64_t{c1 - c} * map.element_size;
      int32_t count;
      for (int32_t x = box.x0; x < box.x1; x += count) {
        const int32_t tile_end = x < map.width0 ? std::min(box.x1, map.width0) : box.x1;
        count = map.stride_x == length ? tile_end - x : 1;
        const int64_t start = map.pixel_offset(y, x) + map.channel_offset(c);
        visit(start, start + count * length);
      }
    }
  }
}

// Whether a kernel reads element `at` of an axis. A stride larger than the kernel skips elements.
inline bool is_read_by_kernel(int32_t at, Upscale upscale, int32_t results, int32_t kernel, int32_t stride,
                              int32_t dilation, int32_t padding) {
  const int32_t factor = upscale == Upscale::kNone ? 1 : 2;
  for (int32_t part = 0; part < (upscale == Upscale::kNearest ? 2 : 1); ++part) {
    // `place` is the position of the element on the upscaled and padded axis. Tap i reads this element for the window
    // that starts at place - i * dilation. The window exists if its start is a multiple of the stride in [0, end).
    // Testing `stride` consecutive taps is sufficient, because the remainders of the starts repeat after `stride` taps.
    const int64_t place = int64_t{at} * factor + part + padding, end = int64_t{results} * stride;
    const int64_t first = std::max<int64_t>(0, (place - end) / dilation + (place >= end ? 1 : 0));
    const int64_t last = std::min<int64_t>({kernel - 1, place / dilation, first + stride - 1});
    for (int64_t i = first; i <= last; ++i) {
      if ((place - i * dilation) % stride == 0) {
        return true;
      }
    }
  }
  return false;
}

// Calls `visit(start, end)` for the bytes of the IFM pixels that a kernel reads.
template <typename Visit>
void visit_ifm(const Operation& op, Visit visit) {
  const FeatureMap& map = op.ifm;
  const Kernel& k = op.kernel;
  const bool slides = op.kind == Kind::kConv || op.kind == Kind::kDepthwise || op.kind == Kind::kPool;
  const bool dense = !slides || (k.stride_y * k.stride_x == 1 && k.dilation_y * k.dilation_x == 1);
  for (int32_t y = 0; y < map.height; ++y) {
    if (!dense && !is_read_by_kernel(y, op.upscale, op.ofm.height, k.height, k.stride_y, k.dilation_y, k.top)) {
      continue;
    }
    int32_t end;
    for (int32_t x = 0; x < map.width; x = end) {
      const auto is_read = [&](int32_t at) {
        return dense || is_read_by_kernel(at, op.upscale, op.ofm.width, k.width, k.stride_x, k.dilation_x, k.left);
      };
      const bool read = is_read(x);
      for (end = x + 1; end < map.width && is_read(end) == read;) {
        ++end;
      }
      if (read) {
        visit_box(map, {y, y + 1, x, end, 0, map.depth}, visit);
      }
    }
  }
}

// Calls `visit(operand, region, start, end)` for the indices and rows of a DMA. Stops at the first index that is
// invalid or outside its region, and at the first address that is negative or 2^62 or more: the execution of the
// DMA reports these errors.
template <typename Visit>
void visit_dma(const Dma& d, const NpuState& state, Visit visit) {
  const int source = d.from_tables ? kTableRegion : d.source_region;
  const int target = d.to_tables ? kTableRegion : d.target_region;
  const Region& indices = state.regions[d.index_region];
  int64_t index_at = d.index;
  for (int64_t i = 0; i < d.count1; ++i, index_at += d.index_skip) {
    for (int64_t j = 0; j < d.count0; ++j) {
      int64_t row_from = j, row_to = j;
      if (d.is_gather || d.is_scatter) {
        if (index_at < 0 || index_at + 4 > static_cast<int64_t>(indices.size)) {
          return;
        }
        int32_t index;
        std::memcpy(&index, indices.data + index_at, sizeof(index));
        visit(Operand::kIndices, d.index_region, index_at, index_at + 4);
        index_at += 4;
        if (index < 0 || index > d.index_max) {
          return;
        }
        (d.is_gather ? row_from : row_to) = index;
      }
      const int128_t a = d.source + int128_t{i} * d.source_stride1 + int128_t{row_from} * d.source_stride0;
      const int128_t b = d.target + int128_t{i} * d.target_stride1 + int128_t{row_to} * d.target_stride0;
      constexpr int128_t kMaxAddress = INT64_MAX / 2;
      if (a < 0 || b < 0 || a > kMaxAddress || b > kMaxAddress || d.length < 0 || d.length > kMaxAddress) {
        return;
      }
      const auto a_start = static_cast<int64_t>(a), b_start = static_cast<int64_t>(b);
      visit(Operand::kSource, source, a_start, a_start + d.length);
      visit(Operand::kTarget, target, b_start, b_start + d.length);
    }
  }
}

inline int64_t table_bytes(Table table) {
  constexpr int64_t kBytes[] = {0, 256, 512, 1024, 2048};
  return kBytes[static_cast<int>(table)];
}

// Calls `visit(operand, region, start, end)` for all memory accesses of an operation.
template <typename Visit>
void visit_accesses(const Operation& op, const NpuState& state, Visit visit) {
  if (op.kind == Kind::kDma) {
    visit_dma(op.dma, state, visit);
    return;
  }
  const auto of = [&visit](Operand operand, int region) {
    return [&visit, operand, region](int64_t start, int64_t end) { visit(operand, region, start, end); };
  };
  if (op.reads_ifm() && op.ifm.storage == Storage::kTiles) {
    visit_ifm(op, of(Operand::kIfm, op.ifm.region));
  }
  if (op.uses_ifm2 && !op.scalar2 && op.ifm2.storage == Storage::kTiles) {
    visit_box(op.ifm2, whole_box(op.ifm2), of(Operand::kIfm2, op.ifm2.region));
  }
  for (int i = 0; i < op.constant_count; ++i) {
    visit(Operand::kConstants, op.constants[i].region, op.constants[i].start, op.constants[i].end);
  }
  if (op.output.table != Table::kNone && !op.keeps_accumulators) {
    visit(Operand::kTable, kTableRegion, op.output.table_at, op.output.table_at + table_bytes(op.output.table));
  }
  if (state.clobbers_tables && op.output.table == Table::kNone) {
    visit(Operand::kClobbered, kTableRegion, 0, kTableBytes);
  }
  if (op.writes_memory()) {
    const FeatureMap stored = op.ofm_in_memory();
    visit_box(stored, whole_box(stored), of(Operand::kOfm, stored.region));
  }
}

inline bool is_write(Operand operand) {
  return operand == Operand::kOfm || operand == Operand::kTarget || operand == Operand::kClobbered;
}

}  // namespace arm_runtime::npu
