// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {

void run_resize(const Operation& op, NpuState* state) {
  const Resize& z = op.resize;
  const OutputStage output_stage(op, state);
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
      // The NPU's sums have 16 fractional bits, hence the factor 2^16. The output's scale removes them.
      for (int32_t c = 0; c < depth; ++c) {
        if (z.mode != 0) {
          out[c] = int64_t{at(2 * dy >= z.scale_y ? bottom : top, 2 * dx >= z.scale_x ? right : left)[c]} * 65536;
          continue;
        }
        const int64_t upper = int64_t{at(top, left)[c]} * (z.scale_x - dx) + int64_t{at(top, right)[c]} * dx;
        const int64_t lower = int64_t{at(bottom, left)[c]} * (z.scale_x - dx) + int64_t{at(bottom, right)[c]} * dx;
        out[c] = (upper * (z.scale_y - dy) + lower * dy) * 65536;
      }
      output_stage.write(y, x, out);
    }
  }
}

}  // namespace arm_runtime::npu
