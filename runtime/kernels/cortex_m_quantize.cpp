// SPDX-License-Identifier: Apache-2.0
// Kernels that quantize float32 tensors, and dequantize int8 and int16 tensors.
#include <executorch/runtime/kernel/kernel_includes.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/executorch.h"
#include "kernels/argument_checker.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

using executorch::runtime::KernelRuntimeContext;

constexpr const char kQuantize[] = "cortex_m::quantize_per_tensor.out";
constexpr const char kDequantize[] = "cortex_m::dequantize_per_tensor.out";

// Quantizes as PyTorch does: multiply by 1 / scale in float32, round half to even, add the zero point, clamp. Here,
// the clamp directly follows the product, so that the conversion to int32 cannot overflow. The result is the same,
// because the limits are integers. NaN becomes the integer 0, whatever the zero point is.
template <typename T>
void quantize(const float* input, T* out, size_t count, double scale, int64_t zero_point, int64_t quant_min,
              int64_t quant_max) {
  const auto inverse = static_cast<float>(1.0 / scale);
  const auto low = static_cast<float>(quant_min - zero_point);
  const auto high = static_cast<float>(quant_max - zero_point);
  const auto zero = static_cast<int32_t>(zero_point);
  for (size_t i = 0; i < count; ++i) {
    const float clamped = std::min(std::max(input[i] * inverse, low), high);
    out[i] = std::isnan(input[i]) ? T{0} : static_cast<T>(static_cast<int32_t>(std::lrintf(clamped)) + zero);
  }
}

template <typename T>
void dequantize(const T* input, float* out, size_t count, double scale, int64_t zero_point) {
  const auto step = static_cast<float>(scale);
  const auto zero = static_cast<float>(zero_point);
  for (size_t i = 0; i < count; ++i) {
    out[i] = (static_cast<float>(input[i]) - zero) * step;
  }
}

template <typename T>
bool is_range_of(int64_t low, int64_t high) {
  return low >= std::numeric_limits<T>::min() && low <= high && high <= std::numeric_limits<T>::max();
}

// Checks the arguments of both kernels: one tensor is float32, the other int8 or int16 with valid parameters, and both
// have the same memory format. Sets the shape of `out`.
bool check_arguments(KernelRuntimeContext& context, const char* name, const Tensor& real, const Tensor& quantized,
                     double scale, int64_t zero_point, int64_t quant_min, int64_t quant_max, ScalarType dtype,
                     const Tensor& input, Tensor& out) {
  const char* reason = nullptr;
  const bool is_int8 = dtype == ScalarType::Char;
  if (real.scalar_type() != ScalarType::Float) {
    reason = "the real numbers must be float32";
  } else if (quantized.scalar_type() != dtype || !(is_int8 || dtype == ScalarType::Short)) {
    reason = "the integers must be int8 or int16, as the argument dtype says";
  } else if (!(scale > 0) || !std::isfinite(scale) || !std::isfinite(1.0 / scale)) {
    reason = "the scale must be positive and finite";
  } else if (!(is_int8 ? is_range_of<int8_t>(quant_min, quant_max) : is_range_of<int16_t>(quant_min, quant_max))) {
    reason = "quant_min and quant_max must be an interval of the integer type";
  } else if (!(is_int8 ? is_range_of<int8_t>(zero_point, zero_point) : is_range_of<int16_t>(zero_point, zero_point))) {
    reason = "the zero point must be a value of the integer type";
  } else if (executorch::runtime::resize_tensor(out, input.sizes()) != Error::Ok) {
    reason = "the output cannot take the input's shape";
  } else if (!has_same_order(input, out)) {
    reason = "input and output must have one memory format";
  }
  if (reason != nullptr) {
    ET_LOG(Error, "%s: %s (scale %g, zero point %" PRId64 ", dtype %d)", name, reason, scale, zero_point,
           static_cast<int>(dtype));
    context.fail(Error::InvalidArgument);
  }
  return reason == nullptr;
}

Tensor& quantize_out(KernelRuntimeContext& context, const Tensor& input, double scale, int64_t zero_point,
                     int64_t quant_min, int64_t quant_max, ScalarType dtype, Tensor& out) {
  if (!check_arguments(context, kQuantize, input, out, scale, zero_point, quant_min, quant_max, dtype, input, out)) {
    return out;
  }
  const auto* data = input.const_data_ptr<float>();
  const auto count = static_cast<size_t>(input.numel());
  if (dtype == ScalarType::Char) {
    quantize(data, out.mutable_data_ptr<int8_t>(), count, scale, zero_point, quant_min, quant_max);
  } else {
    quantize(data, out.mutable_data_ptr<int16_t>(), count, scale, zero_point, quant_min, quant_max);
  }
  return out;
}

Tensor& dequantize_out(KernelRuntimeContext& context, const Tensor& input, double scale, int64_t zero_point,
                       int64_t quant_min, int64_t quant_max, ScalarType dtype, Tensor& out) {
  if (!check_arguments(context, kDequantize, out, input, scale, zero_point, quant_min, quant_max, dtype, input, out)) {
    return out;
  }
  auto* data = out.mutable_data_ptr<float>();
  const auto count = static_cast<size_t>(input.numel());
  if (dtype == ScalarType::Char) {
    dequantize(input.const_data_ptr<int8_t>(), data, count, scale, zero_point);
  } else {
    dequantize(input.const_data_ptr<int16_t>(), data, count, scale, zero_point);
  }
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(quantize_per_tensor, kQuantize, quantize_out)
ARM_RUNTIME_CORTEX_M_KERNEL(dequantize_per_tensor, kDequantize, dequantize_out)

}  // namespace arm_runtime
