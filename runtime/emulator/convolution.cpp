// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {
namespace {

// The input after upscaling and padding. at(y, x) returns null for padding and inserted zeros.
class PaddedInput {
 public:
  PaddedInput(const Operation& op, NpuState* state) : op_(op), depth_(op.ifm.depth) {
    const FeatureMap& ifm = op.ifm;
    int16_t* out = state->ifm_int16.data();
    data_ = out;
    for (int32_t y = 0; y < ifm.height; ++y) {
      for (int32_t x = 0; x < ifm.width; ++x, out += depth_) {
        fetch(*state, ifm, y, x, out);
      }
    }
  }

  const int16_t* at(int32_t y, int32_t x) const {
    if (op_.upscale != Upscale::kNone) {
      if (op_.upscale == Upscale::kZeros && ((y | x) & 1) != 0) {
        return nullptr;
      }
      y >>= 1;
      x >>= 1;
    }
    if (y < 0 || x < 0 || y >= op_.ifm.height || x >= op_.ifm.width) {
      return nullptr;
    }
    return data_ + (int64_t{y} * op_.ifm.width + x) * depth_;
  }

 private:
  const Operation& op_;
  int32_t depth_;
  const int16_t* data_ = nullptr;
};

// The 32-bit sum does not overflow for up to 2^12 products of 9 by 9 bits, or for up to 64 products of 16 by 9 bits.
int32_t dot(const int16_t* a, const int16_t* b, int32_t count) {
  int32_t sum = 0;
  for (int32_t i = 0; i < count; ++i) {
    sum += int32_t{a[i]} * b[i];
  }
  return sum;
}

// Adds dot products of `step` elements in 64 bits.
int64_t dot_blocked(const int16_t* a, const int16_t* b, int32_t count, int32_t step) {
  int64_t sum = 0;
  for (int32_t i = 0; i < count; i += step) {
    sum += dot(a + i, b + i, std::min(step, count - i));
  }
  return sum;
}

// Dot product of 16-bit by 16-bit numbers.
int64_t dot_int16(const int16_t* a, const int16_t* b, int32_t count) {
  int64_t sum = 0;
  for (int32_t i = 0; i < count; ++i) {
    sum += int32_t{a[i]} * b[i];
  }
  return sum;
}

class Convolution {
 public:
  Convolution(const Operation& op, NpuState* state)
      : op_(op), state_(*state), input_(op, state), output_stage_(op, state), k_(op.kernel) {
    patch_size_ = k_.height * k_.width * op.ifm.depth;
    weights_ = op.dynamic_weights ? load_dynamic_weights() : op.weights->data();
  }

  void run() {
    int64_t* sums = state_.row[0].data();
    for (int32_t y = 0; y < op_.ofm.height; ++y) {
      for (int32_t x = 0; x < op_.ofm.width; ++x) {
        const int16_t* patch = gather_patch(y, x);
        init_accumulators(state_, op_, y, x, 0, sums);
        accumulate(patch, sums);
        output_stage_.write(y, x, sums);
      }
    }
  }

 private:
  // Loads a matrix that an earlier operation computed, and arranges it in the order of weights.
  const int16_t* load_dynamic_weights() {
    int16_t* out = state_.dynamic_weights.data();
    for (int32_t o = 0; o < op_.ofm.depth; ++o) {
      fetch(state_, op_.ifm2, 0, o, out + int64_t{o} * op_.ifm.depth);
    }
    return state_.dynamic_weights.data();
  }

  const int16_t* gather_patch(int32_t y, int32_t x) {
    const int32_t depth = op_.ifm.depth;
    const int32_t top = y * k_.stride_y - k_.top, left = x * k_.stride_x - k_.left;
    if (patch_size_ == depth) {
      const int16_t* pixel = input_.at(top, left);
      if (pixel != nullptr) {
        return pixel;
      }
    }
    int16_t* out = state_.patch.data();
    for (int32_t i = 0; i < k_.height; ++i) {
      for (int32_t j = 0; j < k_.width; ++j, out += depth) {
        const int16_t* pixel = input_.at(top + i * k_.dilation_y, left + j * k_.dilation_x);
        const size_t bytes = static_cast<size_t>(depth) * sizeof(int16_t);
        if (pixel != nullptr) {
          std::memcpy(out, pixel, bytes);
        } else {
          std::memset(out, 0, bytes);
        }
      }
    }
    return state_.patch.data();
  }

  void accumulate(const int16_t* patch, int64_t* sums) const {
    const int16_t* weights = weights_;
    const bool is_int16_product = op_.dynamic_weights && op_.ifm.element_size == 2;
    const int32_t step = op_.ifm.element_size == 2 ? 64 : 4096;
    for (int32_t o = 0; o < op_.ofm.depth; ++o, weights += patch_size_) {
      sums[o] +=
          is_int16_product ? dot_int16(patch, weights, patch_size_) : dot_blocked(patch, weights, patch_size_, step);
    }
  }

  const Operation& op_;
  NpuState& state_;
  PaddedInput input_;
  OutputStage output_stage_;
  const Kernel& k_;
  int32_t patch_size_ = 0;
  const int16_t* weights_ = nullptr;
};

}  // namespace

void run_convolution(const Operation& operation, NpuState* state) { Convolution(operation, state).run(); }

void run_depthwise(const Operation& op, NpuState* state) {
  const PaddedInput input(op, state);
  const OutputStage output_stage(op, state);
  const Kernel& k = op.kernel;
  const int32_t depth = op.ofm.depth;
  int64_t* sums = state->row[0].data();
  for (int32_t y = 0; y < op.ofm.height; ++y) {
    for (int32_t x = 0; x < op.ofm.width; ++x) {
      init_accumulators(*state, op, y, x, 0, sums);
      const int16_t* weights = op.weights->data();
      for (int32_t i = 0; i < k.height; ++i) {
        for (int32_t j = 0; j < k.width; ++j, weights += depth) {
          const int16_t* pixel =
              input.at(y * k.stride_y - k.top + i * k.dilation_y, x * k.stride_x - k.left + j * k.dilation_x);
          for (int32_t c = 0; pixel != nullptr && c < depth; ++c) {
            sums[c] += int32_t{pixel[c]} * weights[c];
          }
        }
      }
      output_stage.write(y, x, sums);
    }
  }
}

}  // namespace arm_runtime::npu
