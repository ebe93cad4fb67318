// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "emulator/access.h"

namespace arm_runtime::npu {

// Blocks of an operation: the parts of its OFM that the NPU computes one after another. Blocks are numbered in
// this order: channels vary fastest, then columns, then rows.

inline int32_t ceil_div(int32_t length, int32_t part) { return (length + part - 1) / part; }

inline int32_t block_count(const Operation& op) {
  const int32_t* block = op.scheduling.ofm_block;
  const int64_t count =
      int64_t{ceil_div(op.ofm.height, block[0])} * ceil_div(op.ofm.width, block[1]) * ceil_div(op.ofm.depth, block[2]);
  return static_cast<int32_t>(std::min<int64_t>(count, INT32_MAX));
}

inline Box ofm_block(const Operation& op, int32_t number) {
  const int32_t* block = op.scheduling.ofm_block;
  const int32_t blocks_x = ceil_div(op.ofm.width, block[1]), blocks_c = ceil_div(op.ofm.depth, block[2]);
  const int32_t y = number / blocks_c / blocks_x * block[0], x = number / blocks_c % blocks_x * block[1];
  const int32_t c = number % blocks_c * block[2];
  return {y, std::min(y + block[0], op.ofm.height), x, std::min(x + block[1], op.ofm.width),
          c, std::min(c + block[2], op.ofm.depth)};
}

// Computes the part of an IFM axis that the results [first, last) depend on.
inline void compute_receptive_field(int32_t first, int32_t last, int32_t stride, int32_t padding, int32_t taps,
                                    int32_t dilation, Upscale upscale, int32_t size, int32_t* from, int32_t* to) {
  const int32_t factor = upscale == Upscale::kNone ? 1 : 2;
  const int32_t start = std::max<int32_t>(0, first * stride - padding);
  const int32_t end = std::max<int32_t>(0, (last - 1) * stride - padding + (taps - 1) * dilation + 1);
  *from = std::min(start / factor, size);
  *to = std::min(ceil_div(end, factor), size);
}

// Computes the part of an IFM axis that the results [first, last) of a RESIZE depend on: two neighbours per result.
inline void compute_resize_receptive_field(int32_t first, int32_t last, int32_t scale, int32_t offset, int32_t step,
                                           int32_t size, int32_t* from, int32_t* to) {
  const auto pixel = [&](int32_t at, int32_t after) {
    const int32_t place = at * step + offset;
    return std::clamp<int32_t>((place >= 0 ? place / scale : -1) + after, 0, size - 1);
  };
  *from = pixel(first, 0);
  *to = pixel(last - 1, 1) + 1;
}

inline Box broadcast_box(Box box, uint8_t broadcast) {
  const auto set_to_one = [](int32_t* first, int32_t* last) {
    *first = 0;
    *last = 1;
  };
  if ((broadcast & kBroadcastH) != 0) {
    set_to_one(&box.y0, &box.y1);
  }
  if ((broadcast & kBroadcastW) != 0) {
    set_to_one(&box.x0, &box.x1);
  }
  if ((broadcast & kBroadcastC) != 0) {
    set_to_one(&box.c0, &box.c1);
  }
  return box;
}

// Calls `visit(region, start, end)` for the byte ranges of IFM and IFM2 that one step of an operation reads. If the
// operation does not sum channels, a step computes one OFM block. If it sums channels, a step adds the products of one
// block of IFM channels to an OFM block, so that an OFM block takes several steps. A `step` beyond the last one reads
// nothing.
template <typename Visit>
void visit_block_reads(const Operation& op, int32_t step, Visit visit) {
  const int32_t steps_per_block = op.sums_channels() ? ceil_div(op.ifm.depth, op.scheduling.ifm_block) : 1;
  if (step / steps_per_block >= block_count(op)) {
    return;
  }
  const Box out = ofm_block(op, step / steps_per_block);
  Box in = out;
  if (op.kind == Kind::kElementwise) {
    in = broadcast_box(out, op.broadcast);
  } else if (op.kind == Kind::kResize) {
    const Resize& z = op.resize;
    compute_resize_receptive_field(out.y0, out.y1, z.scale_y, z.offset_y, z.step_y, op.ifm.height, &in.y0, &in.y1);
    compute_resize_receptive_field(out.x0, out.x1, z.scale_x, z.offset_x, z.step_x, op.ifm.width, &in.x0, &in.x1);
  } else {
    const Kernel& k = op.kernel;
    compute_receptive_field(out.y0, out.y1, k.stride_y, k.top, k.height, k.dilation_y, op.upscale, op.ifm.height,
                            &in.y0, &in.y1);
    compute_receptive_field(out.x0, out.x1, k.stride_x, k.left, k.width, k.dilation_x, op.upscale, op.ifm.width, &in.x0,
                            &in.x1);
  }
  if (op.sums_channels()) {
    in.c0 = step % steps_per_block * op.scheduling.ifm_block;
    in.c1 = std::min(in.c0 + op.scheduling.ifm_block, op.ifm.depth);
  }
  if (op.reads_ifm() && op.ifm.storage == Storage::kTiles) {
    visit_box(op.ifm, in, [&](int64_t start, int64_t end) { visit(op.ifm.region, start, end); });
  }
  if (op.uses_ifm2 && !op.scalar2 && op.ifm2.storage == Storage::kTiles) {
    const Box second = op.dynamic_weights ? Box{0, 1, out.c0, out.c1, in.c0, in.c1} : broadcast_box(out, op.broadcast2);
    visit_box(op.ifm2, second, [&](int64_t start, int64_t end) { visit(op.ifm2.region, start, end); });
  }
}

}  // namespace arm_runtime::npu
