// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {
namespace {

// Returns TOSA's reciprocal_scale() of the number of elements: a 31-bit multiplier and a shift.
Scale reciprocal(int64_t count) {
  uint8_t bits = 0;
  while ((int64_t{1} << bits) < count) {
    ++bits;
  }
  Scale scale;
  scale.multiplier = static_cast<uint32_t>((((int64_t{1} << 30) + 1) << bits) / count);
  scale.shift = static_cast<uint8_t>(30 + bits);
  return scale;
}

class Pool {
 public:
  Pool(const Operation& op, NpuState* state) : op_(op), state_(*state), output_stage_(op, state), k_(op.kernel) {}

  void run() {
    int64_t* values = state_.row[0].data();
    load_input();
    for (int32_t y = 0; y < op_.ofm.height; ++y) {
      for (int32_t x = 0; x < op_.ofm.width; ++x) {
        init_accumulators(state_, op_, y, x, initial_value(), values);
        compute_pixel(y, x, values);
        output_stage_.write(y, x, values);
      }
    }
  }

 private:
  void load_input() {
    if (op_.mode == kNoPool) {
      return;
    }
    int32_t* out = state_.ifm_int32.data();
    for (int32_t y = 0; y < op_.ifm.height; ++y) {
      for (int32_t x = 0; x < op_.ifm.width; ++x, out += op_.ifm.depth) {
        fetch(state_, op_.ifm, y, x, out);
      }
    }
  }

  int64_t initial_value() const {
    return op_.mode == kMax || op_.mode == kArgmaxX || op_.mode == kArgmaxY ? INT32_MIN
           : op_.mode == kMin                                               ? INT32_MAX
                                                                            : 0;
  }

  void compute_pixel(int32_t y, int32_t x, int64_t* values) {
    if (op_.mode == kNoPool) {
      return;
    }
    const int32_t factor = op_.upscale == Upscale::kNone ? 1 : 2;
    const int32_t top = y * k_.stride_y - k_.top, left = x * k_.stride_x - k_.left;
    int64_t count = 0;
    for (int32_t i = 0; i < k_.height; ++i) {
      const int32_t row = top + i * k_.dilation_y;
      for (int32_t j = 0; j < k_.width; ++j) {
        const int32_t column = left + j * k_.dilation_x;
        if (row < 0 || column < 0 || row >= op_.ifm.height * factor || column >= op_.ifm.width * factor) {
          continue;
        }
        ++count;
        if (op_.upscale == Upscale::kZeros && ((row | column) & 1) != 0) {
          continue;
        }
        const int64_t at = int64_t{row / factor} * op_.ifm.width + column / factor;
        accumulate(state_.ifm_int32.data() + at * op_.ifm.depth, op_.mode == kArgmaxX ? j : i, values);
      }
    }
    if (op_.mode == kAverage && (state_.u85 || k_.is_padded()) && count > 1) {
      const Scale scale = reciprocal(count);
      for (int32_t c = 0; c < op_.ofm.depth; ++c) {
        values[c] = scale_int64(values[c], scale, Rounding::kNatural);
      }
    }
  }

  void accumulate(const int32_t* pixel, int32_t index, int64_t* values) {
    const int32_t depth = op_.ifm.depth;
    switch (op_.mode) {
      case kMax:
        for (int32_t c = 0; c < depth; ++c) {
          values[c] = std::max<int64_t>(values[c], pixel[c]);
        }
        return;
      case kMin:
        for (int32_t c = 0; c < depth; ++c) {
          values[c] = std::min<int64_t>(values[c], pixel[c]);
        }
        return;
      case kReduceSum:
        values[0] += std::accumulate(pixel, pixel + depth, int64_t{0});
        return;
      case kArgmaxX:
      case kArgmaxY:
        argmax(pixel, index, values);
        return;
      default:
        for (int32_t c = 0; c < depth; ++c) {
          values[c] += pixel[c];
        }
    }
  }

  // Bits 16 and up of the accumulator hold the index of the largest value. The output's scale shifts the index down.
  // `row[1]` holds the largest value so far.
  void argmax(const int32_t* pixel, int32_t index, int64_t* values) {
    int64_t* best = state_.row[1].data();
    for (int32_t c = 0; c < op_.ifm.depth; ++c) {
      if (index == 0 || pixel[c] > best[c]) {
        best[c] = pixel[c];
        values[c] = int64_t{index} << 16;
      }
    }
  }

  const Operation& op_;
  NpuState& state_;
  OutputStage output_stage_;
  const Kernel& k_;
};

}  // namespace

void run_pool(const Operation& operation, NpuState* state) { Pool(operation, state).run(); }

}  // namespace arm_runtime::npu
