// SPDX-License-Identifier: Apache-2.0
// Checks the arguments of the int8 convolutions and converts them to plain numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/argument_checker.h"
#include "kernels/fixed_point.h"

namespace arm_runtime {

// Arguments that all convolutions share, with the names of the schema.
struct ConvolutionArguments {
  const Tensor& input;
  const Tensor& weight;
  const OptionalTensor& bias;
  Int64List stride;
  Int64List padding;
  Int64List dilation;
  int64_t input_offset;
  int64_t output_offset;
  const Tensor& requantize_multipliers;
  const Tensor& requantize_shifts;
  int64_t activation_min;
  int64_t activation_max;
};

// Sizes of a tensor whose elements lie in the order batch, height, width, channels.
struct ImageSize {
  int32_t batch;
  int32_t height;
  int32_t width;
  int32_t channels;

  // Index of the first channel of a pixel.
  size_t index(int32_t n, int32_t y, int32_t x) const {
    const auto row = static_cast<size_t>(n) * static_cast<size_t>(height) + static_cast<size_t>(y);
    return (row * static_cast<size_t>(width) + static_cast<size_t>(x)) * static_cast<size_t>(channels);
  }
};

// Sizes and parameters of a convolution along one spatial axis.
struct ConvolutionAxis {
  int32_t input;   // size of the input
  int32_t kernel;  // number of taps
  int32_t stride;
  int32_t padding;
  int32_t dilation;

  // Input position of the first tap for the output position `output`; negative if the tap is in the padding.
  int32_t origin(int32_t output) const { return output * stride - padding; }
  // If the first tap of a window is at input position `at`, the taps [first_tap(at), end_tap(at)) of the window are
  // inside the input.
  int32_t first_tap(int32_t at) const { return at < 0 ? (-at + dilation - 1) / dilation : 0; }
  int32_t end_tap(int32_t at) const {
    const int32_t inside = at < input ? (input - at + dilation - 1) / dilation : 0;
    return std::min(kernel, inside);
  }
};

// Converts an int32 accumulator of an output channel to an int8 result.
struct Requantization {
  const int32_t* bias;  // or null
  const int32_t* multipliers;
  const int32_t* shifts;
  int32_t output_offset;
  int32_t low;
  int32_t high;

  int8_t operator()(int32_t accumulator, int32_t channel) const {
    const int32_t sum = bias == nullptr ? accumulator : add_wrapping(accumulator, bias[channel]);
    return requantize_to_int8(sum, multipliers[channel], shifts[channel], output_offset, low, high);
  }
};

struct Convolution {
  ImageSize input;
  ImageSize output;
  ConvolutionAxis rows;
  ConvolutionAxis columns;
  int32_t kernel_channels;  // size of the weights' last axis: input channels of a group; depthwise: output channels
  int32_t input_offset;
  Requantization requantization;
};

// Returns the sizes of a tensor. Its shape is [N, H, W, C] if `is_nhwc` (operators whose name ends in _nhwc),
// otherwise [N, C, H, W].
ImageSize image_size(const Tensor& tensor, bool is_nhwc);

// Checks the arguments that all kinds of convolution have, and sets all members of `convolution` except `output`.
// The output channels are on axis `output_channel_axis` of the weights.
bool check_convolution(ArgumentChecker& check, const ConvolutionArguments& arguments, const Tensor& out, bool is_nhwc,
                       int output_channel_axis, Convolution& convolution);

// Checks and sets the shape of `out`, and sets `convolution.output`.
bool resize_result(ArgumentChecker& check, Tensor& out, bool is_nhwc, int64_t height, int64_t width, int64_t channels,
                   Convolution& convolution);

}  // namespace arm_runtime
