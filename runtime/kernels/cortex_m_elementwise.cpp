// SPDX-License-Identifier: Apache-2.0
// Elementwise kernels of int8 tensors: sum, product, quotient (also of int16 tensors), minimum, maximum, and lookup
// table. The limits and the arithmetic are described in arm_backend_core/cortex_m/kernels/elementwise.py.
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/executorch.h"
#include "kernels/argument_checker.h"
#include "kernels/fixed_point.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

using executorch::aten::SizesType;

constexpr const char kAdd[] = "cortex_m::quantized_add.out";
constexpr const char kMul[] = "cortex_m::quantized_mul.out";
constexpr const char kDiv[] = "cortex_m::quantized_div.out";
constexpr const char kMinimum[] = "cortex_m::minimum.out";
constexpr const char kMaximum[] = "cortex_m::maximum.out";
constexpr const char kActivation[] = "cortex_m::quantized_activation.out";

constexpr int32_t kAddLeftShift = 20;

// Limits of the zero points of factors: arm_elementwise_mul_s8 computes the difference of an int8 value and its zero
// point in 16 bits. In hardswish, x * relu6(x + 3) / 6, a factor can have a zero point outside of int8.
constexpr int64_t kMinFactorZeroPoint = INT16_MIN - INT8_MIN;
constexpr int64_t kMaxFactorZeroPoint = INT16_MAX - INT8_MAX;

bool has_same_shape(const Tensor& first, const Tensor& second) { return first.sizes() == second.sizes(); }

// Checks that both operands have one shape, sets the shape of the result, and checks that all have one memory format.
bool check_equal_operands(ArgumentChecker& check, const Tensor& first, const Tensor& second, Tensor& out) {
  return check.require(has_same_shape(first, second), "other", "must have the shape of self") &&
         check.resize_like("out", out, first) &&
         check.require(has_same_order(first, second), "other", "must have the memory format of self") &&
         check.require(has_same_order(first, out), "out", "must have the memory format of self");
}

// Whether a tensor of rank 4 has one element per channel.
bool has_one_element_per_channel(const Tensor& tensor) {
  return tensor.size(0) == 1 && tensor.size(2) == 1 && tensor.size(3) == 1;
}

// Whether both operands have rank 4 and the same number of channels, and one of them has one element per channel.
bool is_channel_broadcast(const Tensor& first, const Tensor& second) {
  return first.dim() == 4 && second.dim() == 4 && first.size(1) == second.size(1) &&
         (has_one_element_per_channel(first) || has_one_element_per_channel(second));
}

bool check_channel_broadcast(ArgumentChecker& check, const Tensor& first, const Tensor& second, Tensor& out) {
  // `full` is the operand that is not broadcast. Do not choose it by its number of elements: if `full` is empty, the
  // broadcast operand has more elements.
  const Tensor& full = has_one_element_per_channel(first) ? second : first;
  return check.resize_like("out", out, full) && check.is_channels_last("self", first) &&
         check.is_channels_last("other", second) && check.is_channels_last("out", out);
}

// Checks that the operands have the same shape, or that one has one element per channel. Sets the shape of the result.
bool check_operands(ArgumentChecker& check, const Tensor& first, const Tensor& second, Tensor& out) {
  if (!check.has_type("self", first, ScalarType::Char) || !check.has_type("other", second, ScalarType::Char) ||
      !check.has_type("out", out, ScalarType::Char)) {
    return false;
  }
  if (!has_same_shape(first, second) && is_channel_broadcast(first, second)) {
    return check_channel_broadcast(check, first, second, out);
  }
  return check_equal_operands(check, first, second, out);
}

// out = operation(first, second). The elements of an operand with fewer elements than the result are repeated.
template <typename Operation>
void apply(const Tensor& first, const Tensor& second, Tensor& out, Operation operation) {
  const auto count = out.numel();
  const auto inner = std::max<decltype(count)>(std::min(first.numel(), second.numel()), 1);
  const auto* a = first.const_data_ptr<int8_t>();
  const auto* b = second.const_data_ptr<int8_t>();
  auto* result = out.mutable_data_ptr<int8_t>();
  for (ssize_t start = 0; start < count; start += inner) {
    const auto* a_row = first.numel() == count ? a + start : a;
    const auto* b_row = second.numel() == count ? b + start : b;
    for (ssize_t i = 0; i < inner; ++i) {
      result[start + i] = operation(a_row[i], b_row[i]);
    }
  }
}

struct Rescale {
  int32_t zero_point;
  int32_t multiplier;
  int32_t shift;
};

Rescale to_rescale(int64_t zero_point, int64_t multiplier, int64_t shift) {
  return {static_cast<int32_t>(zero_point), static_cast<int32_t>(multiplier), static_cast<int32_t>(shift)};
}

int32_t rescale_operand(int8_t x, const Rescale& by) {
  return requantize(shift_left_wrapping(x - by.zero_point, kAddLeftShift), by.multiplier, by.shift);
}

Tensor& quantized_add_out(KernelRuntimeContext& context, const Tensor& first, int64_t first_zero_point,
                          int64_t first_multiplier, int64_t first_shift, const Tensor& second,
                          int64_t second_zero_point, int64_t second_multiplier, int64_t second_shift,
                          int64_t output_zero_point, int64_t output_multiplier, int64_t output_shift,
                          int64_t activation_min, int64_t activation_max, Tensor& out) {
  ArgumentChecker check(context, kAdd);
  if (!check.is_zero_point("self_zero_point", first_zero_point) ||
      !check.is_multiplier("self_multiplier", first_multiplier) || !check.is_shift("self_shift", first_shift) ||
      !check.is_zero_point("other_zero_point", second_zero_point) ||
      !check.is_multiplier("other_multiplier", second_multiplier) || !check.is_shift("other_shift", second_shift) ||
      !check.is_zero_point("output_zero_point", output_zero_point) ||
      !check.is_multiplier("output_multiplier", output_multiplier) || !check.is_shift("output_shift", output_shift) ||
      !check.is_activation_range(activation_min, activation_max) || !check_operands(check, first, second, out)) {
    return out;
  }
  const Rescale a = to_rescale(first_zero_point, first_multiplier, first_shift);
  const Rescale b = to_rescale(second_zero_point, second_multiplier, second_shift);
  const Rescale of_sum = to_rescale(output_zero_point, output_multiplier, output_shift);
  const auto low = static_cast<int32_t>(activation_min);
  const auto high = static_cast<int32_t>(activation_max);
  apply(first, second, out, [=](int8_t x, int8_t y) {
    const int32_t sum = add_wrapping(rescale_operand(x, a), rescale_operand(y, b));
    return requantize_to_int8(sum, of_sum.multiplier, of_sum.shift, of_sum.zero_point, low, high);
  });
  return out;
}

Tensor& quantized_mul_out(KernelRuntimeContext& context, const Tensor& first, int64_t first_zero_point,
                          const Tensor& second, int64_t second_zero_point, int64_t output_zero_point,
                          int64_t output_multiplier, int64_t output_shift, Tensor& out) {
  ArgumentChecker check(context, kMul);
  if (!check.is_in("self_zero_point", first_zero_point, kMinFactorZeroPoint, kMaxFactorZeroPoint) ||
      !check.is_in("other_zero_point", second_zero_point, kMinFactorZeroPoint, kMaxFactorZeroPoint) ||
      !check.is_zero_point("output_zero_point", output_zero_point) ||
      !check.is_multiplier("output_multiplier", output_multiplier) || !check.is_shift("output_shift", output_shift) ||
      !check_operands(check, first, second, out)) {
    return out;
  }
  const auto a = static_cast<int32_t>(first_zero_point);
  const auto b = static_cast<int32_t>(second_zero_point);
  const Rescale of_product = to_rescale(output_zero_point, output_multiplier, output_shift);
  apply(first, second, out, [=](int8_t x, int8_t y) {
    const int32_t product = (x - a) * (y - b);
    return requantize_to_int8(product, of_product.multiplier, of_product.shift, of_product.zero_point, INT8_MIN,
                              INT8_MAX);
  });
  return out;
}

template <typename T>
void divide(const Tensor& first, int32_t first_zero_point, const Tensor& second, int32_t second_zero_point, float zero,
            float scale, Tensor& out) {
  const auto* a = first.const_data_ptr<T>();
  const auto* b = second.const_data_ptr<T>();
  auto* result = out.mutable_data_ptr<T>();
  constexpr auto kLow = static_cast<float>(std::numeric_limits<T>::min());
  constexpr auto kHigh = static_cast<float>(std::numeric_limits<T>::max());
  for (ssize_t i = 0; i < out.numel(); ++i) {
    const int32_t divisor = b[i] - second_zero_point;
    const auto dividend = static_cast<float>(a[i] - first_zero_point);
    const float quotient = divisor == 0 ? 0.0F : dividend / static_cast<float>(divisor);
    const float rounded = std::round(quotient * scale) + zero;
    result[i] = static_cast<T>(std::min(std::max(rounded, kLow), kHigh));
  }
}

Tensor& quantized_div_out(KernelRuntimeContext& context, const Tensor& first, int64_t first_zero_point,
                          const Tensor& second, int64_t second_zero_point, int64_t output_zero_point,
                          double output_scale, Tensor& out) {
  ArgumentChecker check(context, kDiv);
  const bool is_int8 = out.scalar_type() == ScalarType::Char;
  const ScalarType type = is_int8 ? ScalarType::Char : ScalarType::Short;
  const int64_t low = is_int8 ? INT8_MIN : INT16_MIN;
  const int64_t high = is_int8 ? INT8_MAX : INT16_MAX;
  const auto scale = static_cast<float>(output_scale);
  if (!check.has_type("out", out, type) || !check.has_type("self", first, type) ||
      !check.has_type("other", second, type) || !check.is_in("self_zero_point", first_zero_point, low, high) ||
      !check.is_in("other_zero_point", second_zero_point, low, high) ||
      !check.is_in("output_zero_point", output_zero_point, low, high) ||
      !check.require(std::isfinite(scale), "output_scale", "must be finite") ||
      !check_equal_operands(check, first, second, out)) {
    return out;
  }
  const auto a = static_cast<int32_t>(first_zero_point);
  const auto b = static_cast<int32_t>(second_zero_point);
  const auto zero = static_cast<float>(output_zero_point);
  if (is_int8) {
    divide<int8_t>(first, a, second, b, zero, scale, out);
  } else {
    divide<int16_t>(first, a, second, b, zero, scale, out);
  }
  return out;
}

constexpr int kMaxBroadcastRank = 4;
using Sizes = std::array<SizesType, kMaxBroadcastRank>;

// Adds leading axes of size 1 up to rank 4.
Sizes pad_sizes(const Tensor& tensor) {
  Sizes sizes{1, 1, 1, 1};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes.end() - tensor.dim());
  return sizes;
}

// Whether CMSIS-NN reads wrong elements when it broadcasts `operand` to `full`. Both shapes are [n, h, w, c]. The bug
// occurs for an operand with several rows (h > 1) of one element (w = c = 1), if `full` has several columns (w > 1).
bool has_cmsis_broadcast_bug(const Sizes& operand, const Sizes& full) {
  return operand[1] > 1 && operand[2] == 1 && operand[3] == 1 && full[2] > 1;
}

// Strides in contiguous memory, in elements. An axis of size 1 has stride 0, so that its element is repeated.
std::array<ssize_t, kMaxBroadcastRank> broadcast_strides(const Sizes& sizes) {
  std::array<ssize_t, kMaxBroadcastRank> strides{};
  ssize_t stride = 1;
  for (int axis = kMaxBroadcastRank; axis-- > 0;) {
    strides[axis] = sizes[axis] == 1 ? 0 : stride;
    stride *= sizes[axis];
  }
  return strides;
}

// Checks the operands of minimum and maximum, and sets the shape of the result.
bool check_broadcast(ArgumentChecker& check, const Tensor& first, const Tensor& second, Tensor& out) {
  if (!check.has_type("self", first, ScalarType::Char) || !check.has_type("other", second, ScalarType::Char) ||
      !check.has_type("out", out, ScalarType::Char)) {
    return false;
  }
  if (has_same_shape(first, second)) {
    return check_equal_operands(check, first, second, out);
  }
  const auto rank = std::max(first.dim(), second.dim());
  if (!check.require(rank <= kMaxBroadcastRank, "other", "cannot be broadcast with more than 4 axes")) {
    return false;
  }
  const Sizes a = pad_sizes(first);
  const Sizes b = pad_sizes(second);
  Sizes sizes{};
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (!check.require(a[axis] == b[axis] || a[axis] == 1 || b[axis] == 1, "other", "cannot be broadcast with self")) {
      return false;
    }
    sizes[axis] = a[axis] == 1 ? b[axis] : a[axis];
  }
  const SizesType* of_result = sizes.data() + (kMaxBroadcastRank - rank);
  const bool resized = executorch::runtime::resize_tensor(out, {of_result, static_cast<size_t>(rank)}) == Error::Ok;
  const bool has_bug = has_cmsis_broadcast_bug(a, b) || has_cmsis_broadcast_bug(b, a);
  const bool is_scalar =
      (first.numel() == 1 && has_same_order(second, out)) || (second.numel() == 1 && has_same_order(first, out));
  const bool are_contiguous = is_contiguous(first) && is_contiguous(second) && is_contiguous(out);
  return check.require(resized, "out", "cannot have the shape of the result") &&
         check.require(!has_bug, "other",
                       "cannot be broadcast: CMSIS-NN reads wrong elements if a row has one element") &&
         check.require(is_scalar || are_contiguous, "other", "can be broadcast only in contiguous memory format");
}

// Computes one row of the result. An operand has stride 0 if one element is repeated, else stride 1.
template <typename Operation>
void apply_row(const int8_t* a, ssize_t a_stride, const int8_t* b, ssize_t b_stride, int8_t* out, ssize_t count,
               Operation operation) {
  for (ssize_t i = 0; i < count; ++i) {
    out[i] = operation(a[i * a_stride], b[i * b_stride]);
  }
}

template <typename Operation>
void apply_broadcast(const Tensor& first, const Tensor& second, Tensor& out, Operation operation) {
  if (first.numel() == out.numel() && second.numel() == out.numel()) {
    apply(first, second, out, operation);
    return;
  }
  if ((first.numel() == 1 || second.numel() == 1)) {
    apply_row(first.const_data_ptr<int8_t>(), first.numel() == 1 ? 0 : 1, second.const_data_ptr<int8_t>(),
              second.numel() == 1 ? 0 : 1, out.mutable_data_ptr<int8_t>(), out.numel(), operation);
    return;
  }
  const auto a_strides = broadcast_strides(pad_sizes(first));
  const auto b_strides = broadcast_strides(pad_sizes(second));
  const Sizes sizes = pad_sizes(out);
  auto* result = out.mutable_data_ptr<int8_t>();
  for (SizesType n = 0; n < sizes[0]; ++n) {
    for (SizesType h = 0; h < sizes[1]; ++h) {
      for (SizesType w = 0; w < sizes[2]; ++w) {
        const auto* a = first.const_data_ptr<int8_t>() + n * a_strides[0] + h * a_strides[1] + w * a_strides[2];
        const auto* b = second.const_data_ptr<int8_t>() + n * b_strides[0] + h * b_strides[1] + w * b_strides[2];
        apply_row(a, a_strides[3], b, b_strides[3], result, sizes[3], operation);
        result += sizes[3];
      }
    }
  }
}

Tensor& minimum_out(KernelRuntimeContext& context, const Tensor& first, const Tensor& second, Tensor& out) {
  ArgumentChecker check(context, kMinimum);
  if (check_broadcast(check, first, second, out)) {
    apply_broadcast(first, second, out, [](int8_t x, int8_t y) { return std::min(x, y); });
  }
  return out;
}

Tensor& maximum_out(KernelRuntimeContext& context, const Tensor& first, const Tensor& second, Tensor& out) {
  ArgumentChecker check(context, kMaximum);
  if (check_broadcast(check, first, second, out)) {
    apply_broadcast(first, second, out, [](int8_t x, int8_t y) { return std::max(x, y); });
  }
  return out;
}

Tensor& quantized_activation_out(KernelRuntimeContext& context, const Tensor& input, const Tensor& table, Tensor& out) {
  ArgumentChecker check(context, kActivation);
  if (!check.has_type("input", input, ScalarType::Char) || !check.has_type("lut", table, ScalarType::Char) ||
      !check.has_type("out", out, ScalarType::Char) ||
      !check.require(table.numel() == 256, "lut", "must have 256 elements") || !check.resize_like("out", out, input) ||
      !check.require(has_same_order(input, out), "out", "must have the memory format of input")) {
    return out;
  }
  const auto* x = input.const_data_ptr<int8_t>();
  const auto* entry_of_zero = table.const_data_ptr<int8_t>() + 128;
  auto* result = out.mutable_data_ptr<int8_t>();
  for (ssize_t i = 0; i < out.numel(); ++i) {
    result[i] = entry_of_zero[x[i]];
  }
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(quantized_add, kAdd, quantized_add_out)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_mul, kMul, quantized_mul_out)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_div, kDiv, quantized_div_out)
ARM_RUNTIME_CORTEX_M_KERNEL(minimum, kMinimum, minimum_out)
ARM_RUNTIME_CORTEX_M_KERNEL(maximum, kMaximum, maximum_out)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_activation, kActivation, quantized_activation_out)

}  // namespace arm_runtime
