// SPDX-License-Identifier: Apache-2.0
// int8 convolutions. Sums of products have 32 bits. The padding has the value of the input's zero point, so that it
// adds nothing to a sum.
#include "kernels/convolution_arguments.h"
#include "kernels/multiply_accumulate.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

constexpr const char kConv2d[] = "cortex_m::quantized_conv2d.out";
constexpr const char kConv2dNhwc[] = "cortex_m::quantized_conv2d_nhwc.out";
constexpr const char kDepthwise[] = "cortex_m::quantized_depthwise_conv2d.out";
constexpr const char kDepthwiseNhwc[] = "cortex_m::quantized_depthwise_conv2d_nhwc.out";

// Number of channels of a depthwise convolution whose sums are computed together.
constexpr int32_t kBlock = 64;

int64_t result_size(const ConvolutionAxis& axis) {
  const int64_t window = int64_t{axis.dilation} * (axis.kernel - 1) + 1;
  const int64_t steps = int64_t{axis.input} + 2 * int64_t{axis.padding} - window;
  return steps < 0 ? 0 : steps / axis.stride + 1;
}

// Returns the sum of products for one output element. (y, x) is the input position of the first tap of its window.
// `input` points to the group's first channel in the first pixel of the image, `weights` to the kernel of the output
// channel.
int32_t convolve_window(const Convolution& convolution, const int8_t* input, const int8_t* weights, int32_t y,
                        int32_t x) {
  const ConvolutionAxis& rows = convolution.rows;
  const ConvolutionAxis& columns = convolution.columns;
  const int32_t depth = convolution.kernel_channels;
  const int32_t first = columns.first_tap(x);
  const int32_t taps = columns.end_tap(x) - first;
  if (taps <= 0) {
    return 0;
  }
  // If the taps of a kernel row are contiguous both in the input and in the weights, one call of multiply_accumulate()
  // processes the row.
  const bool is_row_contiguous = columns.dilation == 1 && depth == convolution.input.channels;
  uint32_t sum = 0;
  for (int32_t ky = rows.first_tap(y); ky < rows.end_tap(y); ++ky) {
    const int8_t* row = input + convolution.input.index(0, y + ky * rows.dilation, x + first * columns.dilation);
    const int8_t* kernel = weights + static_cast<ptrdiff_t>(ky * columns.kernel + first) * depth;
    if (is_row_contiguous) {
      sum += multiply_accumulate(row, convolution.input_offset, kernel, 0, taps * depth);
      continue;
    }
    for (int32_t kx = 0; kx < taps; ++kx) {
      const auto step = static_cast<ptrdiff_t>(kx * columns.dilation) * convolution.input.channels;
      sum += multiply_accumulate(row + step, convolution.input_offset, kernel + static_cast<ptrdiff_t>(kx) * depth, 0,
                                 depth);
    }
  }
  return static_cast<int32_t>(sum);
}

// Computes all output channels of one output pixel, whose window starts at (y, x). `input` points to an image of the
// batch.
void convolve_pixel(const Convolution& convolution, const int8_t* input, const int8_t* weights, int32_t y, int32_t x,
                    int8_t* out) {
  const int32_t depth = convolution.kernel_channels;
  const int32_t per_group = convolution.output.channels / (convolution.input.channels / depth);
  const auto kernel_size = static_cast<ptrdiff_t>(convolution.rows.kernel) * convolution.columns.kernel * depth;
  for (int32_t channel = 0; channel < convolution.output.channels; ++channel) {
    const int8_t* group = input + static_cast<ptrdiff_t>(channel / per_group) * depth;
    const int32_t sum = convolve_window(convolution, group, weights + channel * kernel_size, y, x);
    out[channel] = convolution.requantization(sum, channel);
  }
}

// For the output pixel whose window starts at (y, x), computes `count` output channels from `begin` on. Each input
// channel has `multiplier` output channels. `input` points to an image of the batch.
void convolve_depthwise_block(const Convolution& convolution, int32_t multiplier, const int8_t* input,
                              const int8_t* weights, int32_t y, int32_t x, int32_t begin, int32_t count, int8_t* out) {
  const ConvolutionAxis& rows = convolution.rows;
  const ConvolutionAxis& columns = convolution.columns;
  uint32_t sums[kBlock] = {};
  for (int32_t ky = rows.first_tap(y); ky < rows.end_tap(y); ++ky) {
    for (int32_t kx = columns.first_tap(x); kx < columns.end_tap(x); ++kx) {
      const int8_t* pixel = input + convolution.input.index(0, y + ky * rows.dilation, x + kx * columns.dilation);
      const int8_t* kernel =
          weights + static_cast<ptrdiff_t>(ky * columns.kernel + kx) * convolution.output.channels + begin;
      const auto product = [&](int32_t value, int32_t i) {
        return static_cast<uint32_t>((value + convolution.input_offset) * kernel[i]);
      };
      for (int32_t i = 0; multiplier == 1 && i < count; ++i) {
        sums[i] += product(pixel[begin + i], i);
      }
      for (int32_t i = 0; multiplier != 1 && i < count; ++i) {
        sums[i] += product(pixel[(begin + i) / multiplier], i);
      }
    }
  }
  for (int32_t i = 0; i < count; ++i) {
    out[begin + i] = convolution.requantization(static_cast<int32_t>(sums[i]), begin + i);
  }
}

void convolve_depthwise_pixel(const Convolution& convolution, int32_t multiplier, const int8_t* input,
                              const int8_t* weights, int32_t y, int32_t x, int8_t* out) {
  const int32_t channels = convolution.output.channels;
  for (int32_t begin = 0; begin < channels; begin += kBlock) {
    convolve_depthwise_block(convolution, multiplier, input, weights, y, x, begin, std::min(kBlock, channels - begin),
                             out);
  }
}

// Calls `compute(image, y, x, result)` for each output pixel of each image. The window of the pixel starts at (y, x) of
// the image.
template <typename Function>
void for_each_pixel(const Convolution& convolution, const int8_t* input, int8_t* out, Function compute) {
  for (int32_t n = 0; n < convolution.output.batch; ++n) {
    const int8_t* image = input + convolution.input.index(n, 0, 0);
    for (int32_t y = 0; y < convolution.output.height; ++y) {
      for (int32_t x = 0; x < convolution.output.width; ++x) {
        compute(image, convolution.rows.origin(y), convolution.columns.origin(x),
                out + convolution.output.index(n, y, x));
      }
    }
  }
}

void convolve(KernelRuntimeContext& context, const char* name, const ConvolutionArguments& arguments, bool is_nhwc,
              Tensor& out) {
  ArgumentChecker check(context, name);
  Convolution convolution{};
  if (!check_convolution(check, arguments, out, is_nhwc, 0, convolution)) {
    return;
  }
  const int32_t channels = convolution.input.channels;
  const int32_t depth = convolution.kernel_channels;
  const auto out_channels = static_cast<int32_t>(arguments.weight.size(0));
  if (!check.require(channels % depth == 0, "input",
                     "must have a number of channels that is a multiple of the weight's input channels") ||
      !check.require(out_channels % (channels / depth) == 0, "weight",
                     "must have a number of output channels that is a multiple of the number of groups") ||
      !resize_result(check, out, is_nhwc, result_size(convolution.rows), result_size(convolution.columns), out_channels,
                     convolution)) {
    return;
  }
  const auto* weights = arguments.weight.const_data_ptr<int8_t>();
  for_each_pixel(convolution, arguments.input.const_data_ptr<int8_t>(), out.mutable_data_ptr<int8_t>(),
                 [&](const int8_t* image, int32_t y, int32_t x, int8_t* result) {
                   convolve_pixel(convolution, image, weights, y, x, result);
                 });
}

void convolve_depthwise(KernelRuntimeContext& context, const char* name, const ConvolutionArguments& arguments,
                        int64_t depth_multiplier, bool is_nhwc, Tensor& out) {
  ArgumentChecker check(context, name);
  Convolution convolution{};
  if (!check_convolution(check, arguments, out, is_nhwc, 3, convolution) ||
      !check.is_in("depth_multiplier", depth_multiplier, 1, INT32_MAX)) {
    return;
  }
  const int32_t out_channels = convolution.kernel_channels;
  if (!check.require(convolution.input.batch == 1, "input", "must have a batch of 1") ||
      !check.require(arguments.weight.size(0) == 1, "weight", "must have shape [1, height, width, channels]") ||
      !check.require(out_channels == convolution.input.channels * depth_multiplier, "weight",
                     "must have depth_multiplier channels for each channel of the input") ||
      !resize_result(check, out, is_nhwc, result_size(convolution.rows), result_size(convolution.columns), out_channels,
                     convolution)) {
    return;
  }
  const auto* weights = arguments.weight.const_data_ptr<int8_t>();
  const auto multiplier = static_cast<int32_t>(depth_multiplier);
  for_each_pixel(convolution, arguments.input.const_data_ptr<int8_t>(), out.mutable_data_ptr<int8_t>(),
                 [&](const int8_t* image, int32_t y, int32_t x, int8_t* result) {
                   convolve_depthwise_pixel(convolution, multiplier, image, weights, y, x, result);
                 });
}

template <bool is_nhwc>
Tensor& conv2d_out(KernelRuntimeContext& context, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   Int64List stride, Int64List padding, Int64List dilation, int64_t input_offset, int64_t output_offset,
                   const Tensor& requantize_multipliers, const Tensor& requantize_shifts, int64_t activation_min,
                   int64_t activation_max, const Tensor& scratch, Tensor& out) {
  convolve(context, is_nhwc ? kConv2dNhwc : kConv2d,
           {input, weight, bias, stride, padding, dilation, input_offset, output_offset, requantize_multipliers,
            requantize_shifts, activation_min, activation_max},
           is_nhwc, out);
  return out;
}

template <bool is_nhwc>
Tensor& depthwise_conv2d_out(KernelRuntimeContext& context, const Tensor& input, const Tensor& weight,
                             const OptionalTensor& bias, Int64List stride, Int64List padding, Int64List dilation,
                             int64_t depth_multiplier, int64_t input_offset, int64_t output_offset,
                             const Tensor& requantize_multipliers, const Tensor& requantize_shifts,
                             int64_t activation_min, int64_t activation_max, const Tensor& scratch, Tensor& out) {
  convolve_depthwise(context, is_nhwc ? kDepthwiseNhwc : kDepthwise,
                     {input, weight, bias, stride, padding, dilation, input_offset, output_offset,
                      requantize_multipliers, requantize_shifts, activation_min, activation_max},
                     depth_multiplier, is_nhwc, out);
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(quantized_conv2d, kConv2d, conv2d_out<false>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_conv2d_nhwc, kConv2dNhwc, conv2d_out<true>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_depthwise_conv2d, kDepthwise, depthwise_conv2d_out<false>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_depthwise_conv2d_nhwc, kDepthwiseNhwc, depthwise_conv2d_out<true>)

}  // namespace arm_runtime
