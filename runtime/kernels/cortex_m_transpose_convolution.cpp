// SPDX-License-Identifier: Apache-2.0
// int8 transposed convolutions. They do not scatter inputs to outputs: for each output, they sum the products of the
// inputs and kernel taps that contribute to this output.
#include "kernels/convolution_arguments.h"
#include "kernels/multiply_accumulate.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

constexpr const char kTransposeConv2d[] = "cortex_m::quantized_transpose_conv2d.out";
constexpr const char kTransposeConv2dNhwc[] = "cortex_m::quantized_transpose_conv2d_nhwc.out";

int64_t result_size(const ConvolutionAxis& axis, int64_t output_padding) {
  const int64_t full = (int64_t{axis.input} - 1) * axis.stride + axis.kernel;
  return full - 2 * int64_t{axis.padding} + output_padding;
}

// Returns the input position whose product with the tap contributes to the output position `output`, or -1 if the input
// position is outside of the input. Requires (output + padding - tap) to be a multiple of the stride.
int32_t input_position(const ConvolutionAxis& axis, int32_t output, int32_t tap) {
  const int32_t at = output + axis.padding - tap;
  return at >= 0 && at / axis.stride < axis.input ? at / axis.stride : -1;
}

// Returns the smallest tap for which (output + padding - tap) is a multiple of the stride.
int32_t first_tap(const ConvolutionAxis& axis, int32_t output) { return (output + axis.padding) % axis.stride; }

// Returns the sum of products for one output element. `input` points to an image of the batch, `weights` to the kernel
// of the output channel.
int32_t accumulate_output(const Convolution& convolution, const int8_t* input, const int8_t* weights, int32_t y,
                          int32_t x) {
  const ConvolutionAxis& rows = convolution.rows;
  const ConvolutionAxis& columns = convolution.columns;
  const int32_t depth = convolution.input.channels;
  uint32_t sum = 0;
  for (int32_t ky = first_tap(rows, y); ky < rows.kernel; ky += rows.stride) {
    const int32_t row = input_position(rows, y, ky);
    for (int32_t kx = first_tap(columns, x); row >= 0 && kx < columns.kernel; kx += columns.stride) {
      const int32_t column = input_position(columns, x, kx);
      if (column < 0) {
        continue;
      }
      const int8_t* pixel = input + convolution.input.index(0, row, column);
      const int8_t* kernel = weights + static_cast<ptrdiff_t>(ky * columns.kernel + kx) * depth;
      sum += multiply_accumulate(pixel, convolution.input_offset, kernel, 0, depth);
    }
  }
  return static_cast<int32_t>(sum);
}

void compute_pixel(const Convolution& convolution, const int8_t* input, const int8_t* weights, int32_t y, int32_t x,
                   int8_t* out) {
  const auto kernel_size =
      static_cast<ptrdiff_t>(convolution.rows.kernel) * convolution.columns.kernel * convolution.input.channels;
  for (int32_t channel = 0; channel < convolution.output.channels; ++channel) {
    const int32_t sum = accumulate_output(convolution, input, weights + channel * kernel_size, y, x);
    out[channel] = convolution.requantization(sum, channel);
  }
}

void convolve_transposed(KernelRuntimeContext& context, const char* name, const ConvolutionArguments& arguments,
                         Int64List output_padding, bool is_nhwc, Tensor& out) {
  ArgumentChecker check(context, name);
  Convolution convolution{};
  if (!check_convolution(check, arguments, out, is_nhwc, 0, convolution) ||
      !check.is_list("dilation", arguments.dilation, 2, 1, 1) ||
      !check.is_list("output_padding", output_padding, 2, 0, UINT16_MAX) ||
      !check.require(convolution.kernel_channels == convolution.input.channels, "weight",
                     "must have the input's channels on its last axis") ||
      !resize_result(check, out, is_nhwc, result_size(convolution.rows, output_padding[0]),
                     result_size(convolution.columns, output_padding[1]), arguments.weight.size(0), convolution)) {
    return;
  }
  const auto* weights = arguments.weight.const_data_ptr<int8_t>();
  auto* result = out.mutable_data_ptr<int8_t>();
  for (int32_t n = 0; n < convolution.output.batch; ++n) {
    const int8_t* image = arguments.input.const_data_ptr<int8_t>() + convolution.input.index(n, 0, 0);
    for (int32_t y = 0; y < convolution.output.height; ++y) {
      for (int32_t x = 0; x < convolution.output.width; ++x) {
        compute_pixel(convolution, image, weights, y, x, result + convolution.output.index(n, y, x));
      }
    }
  }
}

template <bool is_nhwc>
Tensor& transpose_conv2d_out(KernelRuntimeContext& context, const Tensor& input, const Tensor& weight,
                             const OptionalTensor& bias, Int64List stride, Int64List padding, Int64List output_padding,
                             Int64List dilation, int64_t input_offset, int64_t output_offset,
                             const Tensor& requantize_multipliers, const Tensor& requantize_shifts,
                             int64_t activation_min, int64_t activation_max, const Tensor& scratch,
                             const Tensor& output_scratch, Tensor& out) {
  convolve_transposed(context, is_nhwc ? kTransposeConv2dNhwc : kTransposeConv2d,
                      {input, weight, bias, stride, padding, dilation, input_offset, output_offset,
                       requantize_multipliers, requantize_shifts, activation_min, activation_max},
                      output_padding, is_nhwc, out);
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(quantized_transpose_conv2d, kTransposeConv2d, transpose_conv2d_out<false>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_transpose_conv2d_nhwc, kTransposeConv2dNhwc, transpose_conv2d_out<true>)

}  // namespace arm_runtime
