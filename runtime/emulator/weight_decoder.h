// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/command_stream.h"
#include "emulator/scaling.h"

namespace arm_runtime::npu {

struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// Parameters that determine the order of weights in an encoded weight stream.
struct WeightLayout {
  int32_t ofm_depth = 0, ifm_depth = 0;
  int32_t kernel_h = 0, kernel_w = 0;  // without dilation
  int32_t stride_x = 1, stride_y = 1, dilation_x = 1, dilation_y = 1;
  int32_t ofm_block_depth = 0;
  int32_t microblock = 1;  // U85: width times height of the OFM microblock
  int32_t ifm_bits = 8;
  bool depthwise = false, part_kernel = false;
  bool fast = false, sparse = false;

  size_t count() const {
    return static_cast<size_t>(ofm_depth) * static_cast<size_t>(kernel_h * kernel_w) *
           static_cast<size_t>(depthwise ? 1 : ifm_depth);
  }
};

// Bias and scale of an output channel.
struct ChannelScale {
  int64_t bias = 0;
  Scale scale;
};

// Returns the number of channels of an IFM block. Command streams do not contain this number.
int32_t ifm_block_depth(const Configuration& npu, const WeightLayout& layout);

// Decodes the streams of all cores to [ofm][y][x][ifm], or to [y][x][channel] if depthwise. The fast encoding has one
// stream for all cores.
Status decode_weights(const Configuration& npu, const WeightLayout& layout, const Bytes* streams,
                      std::vector<int16_t>* weights);

// Decodes the bias and scale of `depth` channels, 10 bytes for each. With two streams (U65-512), stream c % 2 contains
// channel c.
Status decode_scales(const Configuration& npu, bool wide_accumulators, int32_t depth, const Bytes* streams,
                     size_t stream_count, std::vector<ChannelScale>* scales);

}  // namespace arm_runtime::npu
