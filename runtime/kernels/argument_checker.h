// SPDX-License-Identifier: Apache-2.0
// Checks of kernels' arguments. A check that fails logs the operator, the argument and the reason, and sets the error
// of the kernel's context, which makes the runtime end the execution of the program.
#pragma once

#include <executorch/runtime/kernel/kernel_runtime_context.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "common/executorch.h"

namespace arm_runtime {

using Int64List = executorch::aten::ArrayRef<int64_t>;
using OptionalTensor = std::optional<Tensor>;
using executorch::runtime::KernelRuntimeContext;

// In a shape for ArgumentChecker::has_shape(): the axis may have any size.
constexpr int64_t kAnySize = -1;

// Whether the elements lie in memory in the order of the axes, outermost first. Axes of size 1 may be anywhere.
bool is_contiguous(const Tensor& tensor);

// Whether the elements of a tensor of rank 4 lie in the order of the axes 0, 2, 3, 1. Axes of size 1 may be anywhere.
bool is_channels_last(const Tensor& tensor);

// Whether the elements of two tensors of one shape lie in the same order. If both are contiguous, or both
// channels_last, axes of size 1 may be anywhere.
bool has_same_order(const Tensor& first, const Tensor& second);

// Checks the arguments of one call of a kernel. Each function returns whether the argument is valid. Combine the calls
// with &&: only the first error is logged, and a check can rely on the checks before it.
class ArgumentChecker {
 public:
  // `name` is the operator's name, for example "cortex_m::quantized_add.out".
  ArgumentChecker(KernelRuntimeContext& context, const char* name) : context_(context), name_(name) {}

  // Logs the error and returns false. `reason` follows the argument's name in the message: "must be ...".
  bool fail(const char* argument, const char* reason);
  bool require(bool condition, const char* argument, const char* reason) { return condition || fail(argument, reason); }

  bool has_type(const char* argument, const Tensor& tensor, ScalarType type);
  bool has_rank(const char* argument, const Tensor& tensor, int64_t rank);
  bool has_shape(const char* argument, const Tensor& tensor, std::initializer_list<int64_t> shape);
  bool is_contiguous(const char* argument, const Tensor& tensor) {
    return require(arm_runtime::is_contiguous(tensor), argument, "must have contiguous memory format");
  }
  bool is_channels_last(const char* argument, const Tensor& tensor) {
    return require(arm_runtime::is_channels_last(tensor), argument, "must have channels_last memory format");
  }

  bool is_in(const char* argument, int64_t value, int64_t low, int64_t high);
  // Whether a list has `length` values, all in [low, high].
  bool is_list(const char* argument, Int64List values, size_t length, int64_t low, int64_t high);

  bool is_zero_point(const char* argument, int64_t value) { return is_in(argument, value, INT8_MIN, INT8_MAX); }
  // An offset is the negative of a zero point.
  bool is_offset(const char* argument, int64_t value) { return is_in(argument, value, -INT8_MAX, -INT8_MIN); }
  bool is_multiplier(const char* argument, int64_t value);
  bool is_shift(const char* argument, int64_t value);
  // The limits of the result, activation_min (low) and activation_max (high): -128 <= low <= high <= 127.
  bool is_activation_range(int64_t low, int64_t high);

  // Sets the shape of the result. In programs with static shapes, the result already has this shape.
  bool resize(const char* argument, Tensor& out, std::initializer_list<int64_t> shape);
  bool resize_like(const char* argument, Tensor& out, const Tensor& input);
  // Sets the shape of `out` to the shape of `input`, but with `size` elements on the last axis.
  bool resize_last_axis(const char* argument, Tensor& out, const Tensor& input, int64_t size);

 private:
  bool resize(const char* argument, Tensor& out, const int64_t* shape, size_t rank);

  KernelRuntimeContext& context_;
  const char* name_;
};

}  // namespace arm_runtime
