// SPDX-License-Identifier: Apache-2.0
#include "emulator/feature_map.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace arm_runtime::npu {
namespace {

template <typename Element>
Element read(const uint8_t* at) {
  Element value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <typename Element, typename Out>
void load_as(const FeatureMap& map, const uint8_t* at, Out* out) {
  // Unsigned arithmetic, because the difference of a 32-bit value and a zero point may overflow in a damaged program.
  using Wrapping = std::make_unsigned_t<Out>;
  const auto zero = static_cast<Wrapping>(map.zero_point);
  const int32_t run = map.is_nhcwb16 ? 16 : map.depth;
  for (int32_t c = 0; c < map.depth; c += run) {
    const uint8_t* from = at + map.channel_offset(c);
    const int32_t count = std::min(run, map.depth - c);
    for (int32_t i = 0; i < count; ++i) {
      out[c + i] = static_cast<Out>(
          static_cast<Wrapping>(read<Element>(from + static_cast<size_t>(i) * sizeof(Element))) - zero);
    }
  }
}

template <typename Out>
void load(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, Out* out) {
  const uint8_t* at = region + map.pixel_offset(y, x);
  switch (map.element_size * 2 + (map.is_signed ? 1 : 0)) {
    case 2:
      return load_as<uint8_t>(map, at, out);
    case 3:
      return load_as<int8_t>(map, at, out);
    case 4:
      return load_as<uint16_t>(map, at, out);
    case 5:
      return load_as<int16_t>(map, at, out);
    case 8:
    case 9:
      return load_as<int32_t>(map, at, out);
    default:
      return load_as<int64_t>(map, at, out);
  }
}

template <typename Element>
void store_as(const FeatureMap& map, uint8_t* at, const int64_t* values) {
  const int32_t run = map.is_nhcwb16 ? 16 : map.depth;
  for (int32_t c = 0; c < map.depth; c += run) {
    uint8_t* to = at + map.channel_offset(c);
    const int32_t count = std::min(run, map.depth - c);
    for (int32_t i = 0; i < count; ++i) {
      const auto value = static_cast<Element>(values[c + i]);
      std::memcpy(to + static_cast<size_t>(i) * sizeof(Element), &value, sizeof(value));
    }
  }
}

// Extends the range [low, high) by the bytes of the first `rows` rows and `columns` columns of a tile.
void tile_range(const FeatureMap& map, int tile, int32_t rows, int32_t columns, int64_t* low, int64_t* high) {
  if (rows <= 0 || columns <= 0) {
    return;
  }
  const int64_t y = (rows - 1) * map.stride_y, x = (columns - 1) * map.stride_x;
  const int64_t brick = map.is_nhcwb16 ? ((map.depth - 1) >> 4) * map.stride_c : 0;
  const int64_t last = (map.is_nhcwb16 ? std::min(map.depth, int32_t{16}) : map.depth) * int64_t{map.element_size};
  const int64_t start = map.base[tile];
  *low = std::min(*low, start + std::min<int64_t>(y, 0) + std::min<int64_t>(x, 0) + std::min<int64_t>(brick, 0));
  *high =
      std::max(*high, start + std::max<int64_t>(y, 0) + std::max<int64_t>(x, 0) + std::max<int64_t>(brick, 0) + last);
}

}  // namespace

void FeatureMap::range(int64_t* low, int64_t* high) const {
  *low = INT64_MAX;
  *high = INT64_MIN;
  const int32_t left = std::min(width, width0), right = width - left;
  tile_range(*this, 0, std::min(height, height0), left, low, high);
  tile_range(*this, 2, height - height0, left, low, high);
  tile_range(*this, 1, std::min(height, height1), right, low, high);
  tile_range(*this, 3, height - height1, right, low, high);
}

void load_pixel(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, int32_t* out) {
  load(map, region, y, x, out);
}

void load_pixel(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, int16_t* out) {
  load(map, region, y, x, out);
}

void load_pixel(const FeatureMap& map, const uint8_t* region, int32_t y, int32_t x, int64_t* out) {
  load(map, region, y, x, out);
}

void store_pixel(const FeatureMap& map, uint8_t* region, int32_t y, int32_t x, const int64_t* values) {
  uint8_t* at = region + map.pixel_offset(y, x);
  switch (map.element_size) {
    case 1:
      return store_as<int8_t>(map, at, values);
    case 2:
      return store_as<int16_t>(map, at, values);
    case 4:
      return store_as<int32_t>(map, at, values);
    default:
      return store_as<int64_t>(map, at, values);
  }
}

void store_element(const FeatureMap& map, uint8_t* region, int32_t y, int32_t x, int32_t c, int64_t value) {
  // The NPU's memory is little endian.
  std::memcpy(region + map.pixel_offset(y, x) + map.channel_offset(c), &value, map.element_size);
}

}  // namespace arm_runtime::npu
