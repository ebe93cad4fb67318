// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {
namespace {

template <typename T>
T table_entry(const uint8_t* table, int64_t index) {
  T value;
  std::memcpy(&value, table + index * static_cast<int64_t>(sizeof(T)), sizeof(value));
  return value;
}

// Interpolates linearly in a table of 512 pairs of base and slope. Pair i covers 128 inputs, the first of which is
// (i - 256) * 128.
int64_t interpolate(const uint8_t* table, int64_t value, bool full_precision) {
  const int64_t index = (value >> 7) + 256;
  const int64_t fraction = value & 127;
  const int64_t base = table_entry<int16_t>(table, index * 2);
  const int64_t slope = table_entry<int16_t>(table, index * 2 + 1);
  const int64_t line = base * 128 + slope * fraction;
  return full_precision ? line : (line + 64) >> 7;
}

// Position of an output element, in the OFM or in memory.
struct Place {
  int32_t y, x, c;
};

Place transpose_place(int order, Place from) {
  switch (order) {
    case 1:  // WHC
      return {from.x, from.y, from.c};
    case 2:  // HCW
      return {from.y, from.c, from.x};
    case 3:  // WCH
      return {from.x, from.c, from.y};
    case 6:  // CHW
      return {from.c, from.y, from.x};
    case 7:  // CWH
      return {from.c, from.x, from.y};
    default:
      return from;
  }
}

Place reverse_place(int axis, const FeatureMap& map, Place from) {
  switch (axis) {
    case 1:
      return {map.height - 1 - from.y, from.x, from.c};
    case 2:
      return {from.y, map.width - 1 - from.x, from.c};
    case 3:
      return {from.y, from.x, map.depth - 1 - from.c};
    default:
      return from;
  }
}

}  // namespace

void init_accumulators(const NpuState& state, const Operation& op, int32_t y, int32_t x, int64_t start, int64_t* out) {
  const int32_t depth = op.ofm.depth;
  if (op.continues_accumulators) {
    const int64_t at = (int64_t{y} * op.ofm.width + x) * depth;
    std::copy_n(state.accumulators.data() + at, depth, out);
    return;
  }
  if (!op.starts_from_ifm2) {
    std::fill_n(out, depth, start);
    return;
  }
  fetch(state, op.ifm2, y, x, out);
  for (int32_t c = 0; c < depth; ++c) {
    out[c] = static_cast<int64_t>(static_cast<uint64_t>(out[c]) << 16) >> 16;
  }
}

void OutputStage::write(int32_t y, int32_t x, int64_t* values) const {
  if (op_.keeps_accumulators) {
    const int64_t at = (int64_t{y} * op_.ofm.width + x) * op_.ofm.depth;
    std::copy_n(values, op_.ofm.depth, state_.accumulators.data() + at);
    return;
  }
  scale(values);
  apply_activation(values);
  store(y, x, values);
}

void OutputStage::scale(int64_t* values) const {
  const OutputParameters& out = op_.output;
  const int32_t depth = op_.ofm.depth;
  if (op_.scales != nullptr && out.per_channel) {
    const ChannelScale* channel = op_.scales->data();
    for (int32_t c = 0; c < depth; ++c) {
      const int64_t value = values[c] + channel[c].bias;
      values[c] = op_.wide_accumulators ? scale_int64(value, channel[c].scale, out.rounding)
                                        : scale_int32(static_cast<int32_t>(value), channel[c].scale, out.rounding);
    }
    return;
  }
  if (out.per_channel || (out.scale.multiplier == 1 && out.scale.shift == 0)) {
    return;
  }
  for (int32_t c = 0; c < depth; ++c) {
    values[c] = scale_int64(values[c], out.scale, out.rounding);
  }
}

void OutputStage::apply_activation(int64_t* values) const {
  const OutputParameters& out = op_.output;
  const int32_t depth = op_.ofm.depth;
  const int64_t zero = op_.ofm.zero_point;
  for (int32_t c = 0; c < depth; ++c) {
    values[c] += zero;
  }
  if (out.clip) {
    for (int32_t c = 0; c < depth; ++c) {
      values[c] = std::min(std::max(values[c], out.low), out.high);
    }
  }
  for (int32_t c = 0; c < depth && out.function != ActivationFunction::kNone; ++c) {
    values[c] = evaluate(out.function, values[c]);
  }
  const uint8_t* table = state_.tables + out.table_at;
  const int64_t first = out.table_signed ? -128 : 0;
  for (int32_t c = 0; c < depth && out.table != Table::kNone; ++c) {
    const int64_t index = (values[c] - first) & 255;
    switch (out.table) {
      case Table::k8to8:
        values[c] = int64_t{table_entry<int8_t>(table, index)};
        break;
      case Table::k8to16:
        values[c] = table_entry<int16_t>(table, index);
        break;
      case Table::k8to32:
        values[c] = table_entry<int32_t>(table, index);
        break;
      default:
        values[c] = interpolate(table, static_cast<int16_t>(values[c]), out.table_full_precision);
    }
  }
}

void OutputStage::store(int32_t y, int32_t x, const int64_t* values) const {
  const FeatureMap& ofm = op_.ofm;
  if (ofm.storage == Storage::kChained) {
    int32_t* to = state_.chains[ofm.region].data() + (int64_t{y} * ofm.width + x) * ofm.depth;
    for (int32_t c = 0; c < ofm.depth; ++c) {
      to[c] = static_cast<int32_t>(values[c]);
    }
    return;
  }
  uint8_t* region = state_.regions[ofm.region].data;
  if (op_.output.transpose == 0 && op_.output.reverse == 0) {
    store_pixel(ofm, region, y, x, values);
    return;
  }
  for (int32_t c = 0; c < ofm.depth; ++c) {
    const Place place = transpose_place(op_.output.transpose, reverse_place(op_.output.reverse, ofm, {y, x, c}));
    store_element(ofm, region, place.y, place.x, place.c, values[c]);
  }
}

}  // namespace arm_runtime::npu
