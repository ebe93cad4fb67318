// SPDX-License-Identifier: Apache-2.0
// int8 linear layers and matrix products. Sums of products have 32 bits.
#include "kernels/argument_checker.h"
#include "kernels/fixed_point.h"
#include "kernels/multiply_accumulate.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

constexpr const char kLinear[] = "cortex_m::quantized_linear.out";
constexpr const char kBatchMatmul[] = "cortex_m::quantized_batch_matmul.out";

// Product of a left matrix of shape [rows, depth] and the transpose of a right matrix of shape [columns, depth].
struct MatrixProduct {
  int32_t rows;
  int32_t columns;
  int32_t depth;
  int32_t left_offset;
  int32_t right_offset;
  const int32_t* initial;  // initial accumulator of each column; null: 0
  int32_t multiplier;
  int32_t shift;
  int32_t output_offset;
  int32_t low;
  int32_t high;
};

void multiply(const MatrixProduct& product, const int8_t* left, const int8_t* right, int8_t* out) {
  const auto depth = static_cast<ptrdiff_t>(product.depth);
  for (int32_t row = 0; row < product.rows; ++row) {
    for (int32_t column = 0; column < product.columns; ++column) {
      const uint32_t sum = multiply_accumulate(left + row * depth, product.left_offset, right + column * depth,
                                               product.right_offset, product.depth);
      const int32_t initial = product.initial == nullptr ? 0 : product.initial[column];
      *out++ = requantize_to_int8(add_wrapping(initial, static_cast<int32_t>(sum)), product.multiplier, product.shift,
                                  product.output_offset, product.low, product.high);
    }
  }
}

bool is_contiguous_int8(ArgumentChecker& check, const char* argument, const Tensor& tensor) {
  return check.has_type(argument, tensor, ScalarType::Char) && check.is_contiguous(argument, tensor);
}

bool has_element_per_feature(ArgumentChecker& check, const char* argument, const OptionalTensor& tensor,
                             int64_t columns) {
  return !tensor.has_value() ||
         (check.has_type(argument, *tensor, ScalarType::Int) &&
          check.require(tensor->numel() == columns, argument, "must have an element for each output feature"));
}

bool check_linear(ArgumentChecker& check, const Tensor& input, const Tensor& weights, const OptionalTensor& bias,
                  const OptionalTensor& kernel_sum, int64_t input_offset, int64_t filter_offset, int64_t output_offset,
                  Int64List multipliers, Int64List shifts, int64_t activation_max, int64_t activation_min) {
  return is_contiguous_int8(check, "input", input) && is_contiguous_int8(check, "weights", weights) &&
         check.require(input.dim() >= 1, "input", "must have an axis of features") &&
         check.has_rank("weights", weights, 2) &&
         check.require(weights.size(1) == input.size(input.dim() - 1), "weights",
                       "must have the input's features on the last axis") &&
         has_element_per_feature(check, "bias", bias, weights.size(0)) &&
         has_element_per_feature(check, "kernel_sum", kernel_sum, weights.size(0)) &&
         check.is_offset("input_offset", input_offset) && check.is_offset("filter_offset", filter_offset) &&
         check.is_zero_point("output_offset", output_offset) &&
         check.is_list("requantize_multipliers", multipliers, 1, kMinMultiplier, kMaxMultiplier) &&
         check.is_list("requantize_shifts", shifts, 1, kMinShift, kMaxShift) &&
         check.is_activation_range(activation_min, activation_max);
}

// For each output feature, `kernel_sum` is the bias plus `input_offset` times the sum of (weight + filter_offset).
// CMSIS-NN reads `kernel_sum` instead of the bias on CPUs with MVE. This kernel reads it on all CPUs if it is given.
Tensor& linear_out(KernelRuntimeContext& context, const Tensor& input, const Tensor& weights,
                   const OptionalTensor& bias, const OptionalTensor& kernel_sum, int64_t input_offset,
                   int64_t filter_offset, int64_t output_offset, Int64List requantize_multipliers,
                   Int64List requantize_shifts, int64_t activation_max, int64_t activation_min, Tensor& out) {
  ArgumentChecker check(context, kLinear);
  if (!check_linear(check, input, weights, bias, kernel_sum, input_offset, filter_offset, output_offset,
                    requantize_multipliers, requantize_shifts, activation_max, activation_min) ||
      !is_contiguous_int8(check, "out", out) || !check.resize_last_axis("out", out, input, weights.size(0))) {
    return out;
  }
  const int64_t columns = weights.size(0);
  const OptionalTensor& initial = kernel_sum.has_value() ? kernel_sum : bias;
  const MatrixProduct product = {
      static_cast<int32_t>(columns == 0 ? 0 : out.numel() / columns),
      static_cast<int32_t>(columns),
      static_cast<int32_t>(weights.size(1)),
      static_cast<int32_t>(kernel_sum.has_value() ? 0 : input_offset),
      static_cast<int32_t>(filter_offset),
      initial.has_value() ? initial->const_data_ptr<int32_t>() : nullptr,
      static_cast<int32_t>(requantize_multipliers[0]),
      static_cast<int32_t>(requantize_shifts[0]),
      static_cast<int32_t>(output_offset),
      static_cast<int32_t>(activation_min),
      static_cast<int32_t>(activation_max),
  };
  multiply(product, input.const_data_ptr<int8_t>(), weights.const_data_ptr<int8_t>(), out.mutable_data_ptr<int8_t>());
  return out;
}

// Despite their names in the schema, `lhs_zero_point` and `rhs_zero_point` are negated zero points, which are added.
Tensor& batch_matmul_out(KernelRuntimeContext& context, const Tensor& lhs, int64_t lhs_zero_point,
                         const Tensor& rhs_transposed, int64_t rhs_zero_point, int64_t output_zero_point,
                         int64_t output_multiplier, int64_t output_shift, const Tensor& scratch, Tensor& out) {
  ArgumentChecker check(context, kBatchMatmul);
  if (!is_contiguous_int8(check, "lhs", lhs) || !is_contiguous_int8(check, "rhs_transposed", rhs_transposed) ||
      !is_contiguous_int8(check, "out", out) || !check.has_rank("lhs", lhs, 3) ||
      !check.has_shape("rhs_transposed", rhs_transposed, {lhs.size(0), kAnySize, lhs.size(2)}) ||
      !check.is_offset("lhs_zero_point", lhs_zero_point) || !check.is_offset("rhs_zero_point", rhs_zero_point) ||
      !check.is_zero_point("output_zero_point", output_zero_point) ||
      !check.is_multiplier("output_multiplier", output_multiplier) || !check.is_shift("output_shift", output_shift) ||
      !check.resize("out", out, {lhs.size(0), lhs.size(1), rhs_transposed.size(1)})) {
    return out;
  }
  const MatrixProduct product = {
      static_cast<int32_t>(lhs.size(1)),
      static_cast<int32_t>(rhs_transposed.size(1)),
      static_cast<int32_t>(lhs.size(2)),
      static_cast<int32_t>(lhs_zero_point),
      static_cast<int32_t>(rhs_zero_point),
      nullptr,
      static_cast<int32_t>(output_multiplier),
      static_cast<int32_t>(output_shift),
      static_cast<int32_t>(output_zero_point),
      INT8_MIN,
      INT8_MAX,
  };
  const auto depth = static_cast<ptrdiff_t>(product.depth);
  for (ptrdiff_t batch = 0; batch < lhs.size(0); ++batch) {
    multiply(product, lhs.const_data_ptr<int8_t>() + batch * product.rows * depth,
             rhs_transposed.const_data_ptr<int8_t>() + batch * product.columns * depth,
             out.mutable_data_ptr<int8_t>() + batch * product.rows * product.columns);
  }
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(quantized_linear, kLinear, linear_out)
ARM_RUNTIME_CORTEX_M_KERNEL(quantized_batch_matmul, kBatchMatmul, batch_matmul_out)

}  // namespace arm_runtime
