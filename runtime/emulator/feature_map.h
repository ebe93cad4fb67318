// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "emulator/status.h"

namespace arm_runtime::npu {

// A memory region of a program, which starts at a base address. The emulator accesses no memory outside of the regions.
struct Region {
  uint8_t* data = nullptr;
  uint64_t size = 0;
};

constexpr int kRegions = 8;

// Where a tensor is: in 2x2 or 3x1 tiles of memory, in a buffer inside the NPU between two operations (chained), or
// nowhere (a scalar, or no output).
enum class Storage : uint8_t { kTiles, kTiles3x1, kChained, kNone };

// An input or output feature map (IFM, IFM2 or OFM): a tensor (height, width, depth) in memory. As in the registers, it
// consists of up to four tiles: upper left, upper right, lower left and lower right.
struct FeatureMap {
  int64_t base[4] = {0, 0, 0, 0};
  int64_t stride_x = 0, stride_y = 0, stride_c = 0;
  int32_t width0 = 0, height0 = 0;  // size of the upper left tile
  int32_t height1 = 0;              // rows of the upper right tile
  int32_t height = 0, width = 0, depth = 0;
  int32_t zero_point = 0;
  uint8_t region = 0;        // for a chained tensor: the number of its buffer inside the NPU
  uint8_t element_size = 1;  // in bytes
  bool is_signed = true;
  bool is_nhcwb16 = false;  // layout NHCWB16: a row has blocks of 16 channels, each with all columns
  Storage storage = Storage::kTiles;

  int64_t elements() const { return int64_t{height} * width * depth; }

  // Returns the byte offset of the element (y, x, 0) in its region.
  int64_t pixel_offset(int32_t y, int32_t x) const {
    const bool right = x >= width0;
    const int32_t top = right ? height1 : height0;
    const bool below = y >= top;
    const int64_t start = base[(right ? 1 : 0) + (below ? 2 : 0)];
    return start + (below ? y - top : y) * stride_y + (right ? x - width0 : x) * stride_x;
  }
  // Returns the byte offset from element (y, x, 0) to element (y, x, c).
  int64_t channel_offset(int32_t c) const {
    return is_nhcwb16 ? (c >> 4) * stride_c + (c & 15) * element_size : int64_t{c} * element_size;
  }

  // Computes the range [low, high) of bytes that the tensor occupies in its region.
  void range(int64_t* low, int64_t* high) const;
};

// Loads the channels of a pixel, and subtracts the zero point.
void load_pixel(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, int32_t* out);
void load_pixel(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, int16_t* out);
void load_pixel(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, int64_t* out);

// Stores the channels of a pixel. Values outside the type's range are truncated.
void store_pixel(const FeatureMap& map, uint8_t* region, int32_t y, int32_t x, const int64_t* values);
void store_element(const FeatureMap& map, uint8_t* region, int32_t y, int32_t x, int32_t c, int64_t value);

}  // namespace arm_runtime::npu
