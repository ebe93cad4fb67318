// SPDX-License-Identifier: Apache-2.0
#include "kernels/convolution_arguments.h"

namespace arm_runtime {
namespace {

// CMSIS-NN stores the sizes and parameters of a spatial axis in 16 bits.
constexpr int64_t kMaxExtent = UINT16_MAX;

ConvolutionAxis make_axis(const ConvolutionArguments& arguments, int32_t input, size_t axis) {
  return {input, static_cast<int32_t>(arguments.weight.size(static_cast<int>(axis) + 1)),
          static_cast<int32_t>(arguments.stride[axis]), static_cast<int32_t>(arguments.padding[axis]),
          static_cast<int32_t>(arguments.dilation[axis])};
}

bool is_int8_image(ArgumentChecker& check, const char* name, const Tensor& tensor, bool is_nhwc) {
  if (!check.has_type(name, tensor, ScalarType::Char) || !check.has_rank(name, tensor, 4) ||
      !(is_nhwc ? check.is_contiguous(name, tensor) : check.is_channels_last(name, tensor))) {
    return false;
  }
  const ImageSize size = image_size(tensor, is_nhwc);
  return check.require(size.height <= kMaxExtent && size.width <= kMaxExtent, name,
                       "must have a height and a width of at most 65535") &&
         check.require(size.channels > 0, name, "must have a channel");
}

bool is_int32_vector(ArgumentChecker& check, const char* name, const Tensor& tensor, int64_t length) {
  return check.has_type(name, tensor, ScalarType::Int) && check.has_shape(name, tensor, {length});
}

bool has_valid_requantization(ArgumentChecker& check, const ConvolutionArguments& arguments, int64_t channels) {
  if (!is_int32_vector(check, "requantize_multipliers", arguments.requantize_multipliers, channels) ||
      !is_int32_vector(check, "requantize_shifts", arguments.requantize_shifts, channels)) {
    return false;
  }
  const auto* multipliers = arguments.requantize_multipliers.const_data_ptr<int32_t>();
  const auto* shifts = arguments.requantize_shifts.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < channels; ++i) {
    if (!check.is_multiplier("requantize_multipliers", multipliers[i]) ||
        !check.is_shift("requantize_shifts", shifts[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace

ImageSize image_size(const Tensor& tensor, bool is_nhwc) {
  const auto sizes = tensor.sizes();
  return is_nhwc ? ImageSize{sizes[0], sizes[1], sizes[2], sizes[3]}
                 : ImageSize{sizes[0], sizes[2], sizes[3], sizes[1]};
}

bool check_convolution(ArgumentChecker& check, const ConvolutionArguments& arguments, const Tensor& out, bool is_nhwc,
                       int output_channel_axis, Convolution& convolution) {
  const Tensor& weight = arguments.weight;
  if (!is_int8_image(check, "input", arguments.input, is_nhwc) || !is_int8_image(check, "out", out, is_nhwc) ||
      !check.has_type("weight", weight, ScalarType::Char) || !check.has_rank("weight", weight, 4) ||
      !check.is_contiguous("weight", weight) || !check.require(weight.numel() > 0, "weight", "must not be empty") ||
      !check.is_list("stride", arguments.stride, 2, 1, kMaxExtent) ||
      !check.is_list("padding", arguments.padding, 2, 0, kMaxExtent) ||
      !check.is_list("dilation", arguments.dilation, 2, 1, kMaxExtent) ||
      !check.is_offset("input_offset", arguments.input_offset) ||
      !check.is_zero_point("output_offset", arguments.output_offset) ||
      !check.is_activation_range(arguments.activation_min, arguments.activation_max)) {
    return false;
  }
  const int64_t channels = weight.size(output_channel_axis);
  if (!has_valid_requantization(check, arguments, channels) ||
      (arguments.bias.has_value() && !is_int32_vector(check, "bias", *arguments.bias, channels))) {
    return false;
  }
  convolution.input = image_size(arguments.input, is_nhwc);
  convolution.rows = make_axis(arguments, convolution.input.height, 0);
  convolution.columns = make_axis(arguments, convolution.input.width, 1);
  convolution.kernel_channels = static_cast<int32_t>(weight.size(3));
  convolution.input_offset = static_cast<int32_t>(arguments.input_offset);
  convolution.requantization = {arguments.bias.has_value() ? arguments.bias->const_data_ptr<int32_t>() : nullptr,
                                arguments.requantize_multipliers.const_data_ptr<int32_t>(),
                                arguments.requantize_shifts.const_data_ptr<int32_t>(),
                                static_cast<int32_t>(arguments.output_offset),
                                static_cast<int32_t>(arguments.activation_min),
                                static_cast<int32_t>(arguments.activation_max)};
  return true;
}

bool resize_result(ArgumentChecker& check, Tensor& out, bool is_nhwc, int64_t height, int64_t width, int64_t channels,
                   Convolution& convolution) {
  const int64_t batch = convolution.input.batch;
  if (!check.require(height > 0 && width > 0, "weight", "must not be larger than the padded input") ||
      !check.require(height <= kMaxExtent && width <= kMaxExtent, "out",
                     "must have a height and a width of at most 65535") ||
      !(is_nhwc ? check.resize("out", out, {batch, height, width, channels})
                : check.resize("out", out, {batch, channels, height, width}))) {
    return false;
  }
  convolution.output = image_size(out, is_nhwc);
  return true;
}

}  // namespace arm_runtime
