// SPDX-License-Identifier: Apache-2.0
// Average and max pooling of int8 tensors over the two spatial axes. Kernels with the suffix _nhwc take tensors of
// shape (N, H, W, C) in contiguous memory format. Kernels without this suffix take tensors of shape (N, C, H, W) in
// channels_last memory format. In both cases, the elements lie in memory in the same order. The limits and the
// arithmetic are described in arm_backend_core/cortex_m/kernels/pooling.py.
#include <algorithm>
#include <array>
#include <cstdint>

#include "common/executorch.h"
#include "kernels/argument_checker.h"
#include "kernels/fixed_point.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

constexpr const char kAvgPool[] = "cortex_m::quantized_avg_pool2d.out";
constexpr const char kAvgPoolNhwc[] = "cortex_m::quantized_avg_pool2d_nhwc.out";
constexpr const char kMaxPool[] = "cortex_m::quantized_max_pool2d.out";
constexpr const char kMaxPoolNhwc[] = "cortex_m::quantized_max_pool2d_nhwc.out";

// Windows along one spatial axis.
struct PoolingAxis {
  int64_t size;  // of the input
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t windows;

  int64_t begin(int64_t window) const { return std::max<int64_t>(window * stride - padding, 0); }
  int64_t end(int64_t window) const { return std::min(window * stride - padding + kernel, size); }
};

struct Pooling {
  int64_t batch;
  int64_t channels;
  PoolingAxis height;
  PoolingAxis width;
};

// Counts the windows as PyTorch does. With ceil_mode, the last window may extend past the padding, but must start
// before the padding on the right.
int64_t count_windows(const PoolingAxis& axis, bool ceil_mode) {
  const int64_t span = axis.size + 2 * axis.padding - axis.kernel;
  const int64_t windows = (span + (ceil_mode ? axis.stride - 1 : 0)) / axis.stride + 1;
  return ceil_mode && (windows - 1) * axis.stride >= axis.size + axis.padding ? windows - 1 : windows;
}

// Checks the windows along an axis, and sets `axis`. Each window has elements that are not padding, because the padding
// is smaller than the kernel.
bool set_axis(ArgumentChecker& check, PoolingAxis& axis, int64_t size, int64_t kernel, int64_t stride, int64_t padding,
              bool ceil_mode) {
  axis = {size, kernel, stride, padding, 0};
  if (!check.is_in("kernel_size", kernel, 1, INT32_MAX) || !check.is_in("stride", stride, 1, INT32_MAX) ||
      !check.is_in("padding", padding, 0, kernel - 1) ||
      !check.require(kernel <= size + 2 * padding, "kernel_size", "must not exceed the padded input")) {
    return false;
  }
  axis.windows = count_windows(axis, ceil_mode);
  return true;
}

// Checks the arguments that all pooling kernels have, and sets the shape of the result.
template <bool kIsNhwc>
bool prepare(ArgumentChecker& check, Pooling& pooling, const Tensor& input, Int64List kernel_size, Int64List stride,
             Int64List padding, bool ceil_mode, Tensor& out) {
  if (!check.has_type("input", input, ScalarType::Char) || !check.has_type("out", out, ScalarType::Char) ||
      !check.has_rank("input", input, 4) || !check.has_rank("out", out, 4) ||
      !check.require(input.numel() > 0, "input", "must not be empty") ||
      !check.require(kernel_size.size() == 2, "kernel_size", "must have 2 elements") ||
      !check.require(stride.size() == 2, "stride", "must have 2 elements") ||
      !check.require(padding.size() == 2, "padding", "must have 2 elements")) {
    return false;
  }
  constexpr int kHeight = kIsNhwc ? 1 : 2;
  pooling.batch = input.size(0);
  pooling.channels = input.size(kIsNhwc ? 3 : 1);
  if (!set_axis(check, pooling.height, input.size(kHeight), kernel_size[0], stride[0], padding[0], ceil_mode) ||
      !set_axis(check, pooling.width, input.size(kHeight + 1), kernel_size[1], stride[1], padding[1], ceil_mode)) {
    return false;
  }
  const int64_t height = pooling.height.windows;
  const int64_t width = pooling.width.windows;
  if (kIsNhwc) {
    return check.resize("out", out, {pooling.batch, height, width, pooling.channels}) &&
           check.is_contiguous("input", input) && check.is_contiguous("out", out);
  }
  return check.resize("out", out, {pooling.batch, pooling.channels, height, width}) &&
         check.is_channels_last("input", input) && check.is_channels_last("out", out);
}

// The elements of a window that are not padding. Their order in memory is (H, W, C).
struct Window {
  const int8_t* elements;
  ssize_t row_stride;
  ssize_t rows;
  ssize_t columns;
  ssize_t channels;

  const int8_t* pixel(ssize_t row, ssize_t column) const { return elements + row * row_stride + column * channels; }
};

// Calls reduce(window, result) for each window.
template <typename Reduce>
void for_each_window(const Pooling& pooling, const Tensor& input, Tensor& out, Reduce reduce) {
  const auto channels = static_cast<ssize_t>(pooling.channels);
  const ssize_t row_stride = static_cast<ssize_t>(pooling.width.size) * channels;
  const auto* image = input.const_data_ptr<int8_t>();
  auto* result = out.mutable_data_ptr<int8_t>();
  for (int64_t n = 0; n < pooling.batch; ++n) {
    for (int64_t y = 0; y < pooling.height.windows; ++y) {
      const auto top = static_cast<ssize_t>(pooling.height.begin(y));
      const auto bottom = static_cast<ssize_t>(pooling.height.end(y));
      for (int64_t x = 0; x < pooling.width.windows; ++x) {
        const auto left = static_cast<ssize_t>(pooling.width.begin(x));
        const auto right = static_cast<ssize_t>(pooling.width.end(x));
        const int8_t* corner = image + top * row_stride + left * channels;
        reduce(Window{corner, row_stride, bottom - top, right - left, channels}, result);
        result += channels;
      }
    }
    image += static_cast<ssize_t>(pooling.height.size) * row_stride;
  }
}

// sum / count, rounded to nearest, ties away from zero. The arithmetic is unsigned, because |sum| + count / 2 can
// exceed int32_t.
int32_t divide_rounded(int32_t sum, int32_t count) {
  const auto divisor = static_cast<uint32_t>(count);
  const auto magnitude = sum < 0 ? 0 - static_cast<uint32_t>(sum) : static_cast<uint32_t>(sum);
  const auto quotient = static_cast<int32_t>((magnitude + divisor / 2) / divisor);
  return sum < 0 ? -quotient : quotient;
}

void average_window(const Window& window, int8_t* result) {
  // Channels are summed in blocks of this size, because the number of channels is not limited and kernels allocate no
  // memory.
  constexpr size_t kMaxBlock = 64;
  const auto count = static_cast<int32_t>(window.rows * window.columns);
  const auto channels = static_cast<size_t>(window.channels);
  for (size_t start = 0; start < channels; start += kMaxBlock) {
    const size_t block = std::min(kMaxBlock, channels - start);
    std::array<int32_t, kMaxBlock> sums{};
    for (ssize_t row = 0; row < window.rows; ++row) {
      for (ssize_t column = 0; column < window.columns; ++column) {
        const int8_t* pixel = window.pixel(row, column) + start;
        for (size_t c = 0; c < block; ++c) {
          sums[c] += pixel[c];
        }
      }
    }
    for (size_t c = 0; c < block; ++c) {
      result[start + c] = static_cast<int8_t>(divide_rounded(sums[c], count));
    }
  }
}

// The maximum of a window, clamped to [low, high]. Starting with `low` has the same effect as clamping to it
// afterwards.
void maximum_of_window(const Window& window, int8_t low, int8_t high, int8_t* result) {
  std::fill_n(result, window.channels, low);
  for (ssize_t row = 0; row < window.rows; ++row) {
    for (ssize_t column = 0; column < window.columns; ++column) {
      const int8_t* pixel = window.pixel(row, column);
      for (ssize_t c = 0; c < window.channels; ++c) {
        result[c] = std::max(result[c], std::min(pixel[c], high));
      }
    }
  }
}

template <bool kIsNhwc>
Tensor& avg_pool2d_out(KernelRuntimeContext& context, const Tensor& input, Int64List kernel_size, Int64List stride,
                       Int64List padding, bool ceil_mode, int64_t zero_point, int64_t multiplier, int64_t shift,
                       const Tensor& scratch, Tensor& out) {
  ArgumentChecker check(context, kIsNhwc ? kAvgPoolNhwc : kAvgPool);
  Pooling pooling{};
  if (!prepare<kIsNhwc>(check, pooling, input, kernel_size, stride, padding, ceil_mode, out)) {
    return out;
  }
  // A sum of 2^24 - 1 elements fits 32 bits.
  constexpr int64_t kMaxWindow = (1 << 24) - 1;
  const int64_t rows = std::min(pooling.height.kernel, pooling.height.size);
  const int64_t columns = std::min(pooling.width.kernel, pooling.width.size);
  if (!check.require(rows * columns <= kMaxWindow, "kernel_size", "must have fewer than 2^24 elements")) {
    return out;
  }
  for_each_window(pooling, input, out, average_window);
  return out;
}

template <bool kIsNhwc>
Tensor& max_pool2d_out(KernelRuntimeContext& context, const Tensor& input, Int64List kernel_size, Int64List stride,
                       Int64List padding, Int64List dilation, bool ceil_mode, int64_t input_zero_point,
                       int64_t output_zero_point, int64_t activation_min, int64_t activation_max, Tensor& out) {
  ArgumentChecker check(context, kIsNhwc ? kMaxPoolNhwc : kMaxPool);
  Pooling pooling{};
  if (!check.require(!ceil_mode, "ceil_mode", "must be false") || !check.is_list("dilation", dilation, 2, 1, 1) ||
      !check.is_zero_point("input_zero_point", input_zero_point) ||
      !check.require(input_zero_point == output_zero_point, "output_zero_point", "must equal input_zero_point") ||
      !check.is_activation_range(activation_min, activation_max) ||
      !prepare<kIsNhwc>(check, pooling, input, kernel_size, stride, padding, false, out)) {
    return out;
  }
  const auto low = static_cast<int8_t>(activation_min);
  const auto high = static_cast<int8_t>(activation_max);
  for_each_window(pooling, input, out,
                  [low, high](const Window& window, int8_t* result) { maximum_of_window(window, low, high, result); });
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(quantized_avg_pool2d, kAvgPool, avg_pool2d_out<false>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_avg_pool2d_nhwc, kAvgPoolNhwc, avg_pool2d_out<true>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_max_pool2d, kMaxPool, max_pool2d_out<false>)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_max_pool2d_nhwc, kMaxPoolNhwc, max_pool2d_out<true>)

}  // namespace arm_runtime
