// SPDX-License-Identifier: Apache-2.0
// Kernels that move int8 elements: transpose and constant padding. Their limits are described in
// arm_backend_core/cortex_m/kernels/movement.py.
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "common/executorch.h"
#include "kernels/argument_checker.h"
#include "kernels/registration.h"

namespace arm_runtime {
namespace {

constexpr const char kTranspose[] = "cortex_m::transpose.out";
constexpr const char kPad[] = "cortex_m::pad.out";

using executorch::aten::SizesType;

constexpr size_t kMaxMovedRank = 4;
using AxisSizes = std::array<SizesType, kMaxMovedRank>;

bool check_tensors(ArgumentChecker& check, const Tensor& input, const Tensor& out) {
  return check.has_type("input", input, ScalarType::Char) && check.has_type("out", out, ScalarType::Char) &&
         check.is_in("rank of input", input.dim(), 1, kMaxMovedRank);
}

bool resize(ArgumentChecker& check, Tensor& out, const SizesType* sizes, size_t rank) {
  return check.require(executorch::runtime::resize_tensor(out, {sizes, rank}) == Error::Ok, "out",
                       "cannot have the shape of the result");
}

bool is_permutation(Int64List axes, size_t rank) {
  unsigned seen = 0;
  for (const int64_t axis : axes) {
    if (axis < 0 || axis >= static_cast<int64_t>(rank)) {
      return false;
    }
    seen |= 1U << axis;
  }
  return axes.size() == rank && seen == (1U << rank) - 1;
}

Tensor& transpose_out(KernelRuntimeContext& context, const Tensor& input, Int64List axes, Tensor& out) {
  ArgumentChecker check(context, kTranspose);
  const auto rank = static_cast<size_t>(input.dim());
  if (!check_tensors(check, input, out) ||
      !check.require(is_permutation(axes, rank), "perm", "must name each axis of the input once") ||
      !check.require(rank != 2 || axes[0] == 1, "perm",
                     "must be (1, 0) for an input of rank 2, because CMSIS-NN always swaps its axes") ||
      !check.is_contiguous("input", input)) {
    return out;
  }
  // Leading axes of size 1 extend every tensor to rank 4.
  const size_t absent = kMaxMovedRank - rank;
  std::array<ssize_t, kMaxMovedRank> input_strides{};
  ssize_t stride = 1;
  for (size_t axis = rank; axis-- > 0;) {
    input_strides[axis] = stride;
    stride *= input.size(static_cast<ssize_t>(axis));
  }
  AxisSizes sizes{1, 1, 1, 1};
  std::array<ssize_t, kMaxMovedRank> strides{};
  for (size_t i = 0; i < rank; ++i) {
    sizes[absent + i] = static_cast<SizesType>(input.size(static_cast<ssize_t>(axes[i])));
    strides[absent + i] = input_strides[static_cast<size_t>(axes[i])];
  }
  if (!resize(check, out, sizes.data() + absent, rank) || !check.is_contiguous("out", out)) {
    return out;
  }
  auto* result = out.mutable_data_ptr<int8_t>();
  for (SizesType n = 0; n < sizes[0]; ++n) {
    for (SizesType h = 0; h < sizes[1]; ++h) {
      for (SizesType w = 0; w < sizes[2]; ++w) {
        const auto* data = input.const_data_ptr<int8_t>() + n * strides[0] + h * strides[1] + w * strides[2];
        for (SizesType c = 0; c < sizes[3]; ++c) {
          *result++ = data[c * strides[3]];
        }
      }
    }
  }
  return out;
}

// Whether the pad amounts are in the order (N, H, W, C). This is the order for a channels_last input of rank 4. If C is
// 1, or H and W are 1, both memory formats have the same order of elements, and the amounts are also in the order
// (N, H, W, C). The lowering to cortex_m::pad uses the same rule.
bool is_padded_as_channels_last(const Tensor& input) {
  if (input.dim() != 4) {
    return false;
  }
  const auto order = input.dim_order();
  return input.size(1) == 1 || (input.size(2) == 1 && input.size(3) == 1) ||
         (order[1] == 2 && order[2] == 3 && order[3] == 1);
}

// Sizes of an input, and the pad amounts before and after it, in the order of the axes in memory.
struct Padding {
  AxisSizes sizes{1, 1, 1, 1};
  AxisSizes before{};
  AxisSizes after{};

  int64_t padded(size_t axis) const { return static_cast<int64_t>(before[axis]) + sizes[axis] + after[axis]; }
};

// Checks the pad amounts, and sets `before` and `after` of `padding`. `absent` is 4 minus the rank of the input.
bool set_amounts(ArgumentChecker& check, Padding& padding, Int64List before, Int64List after, size_t absent) {
  if (!check.is_list("pre_pad", before, kMaxMovedRank, 0, INT32_MAX) ||
      !check.is_list("post_pad", after, kMaxMovedRank, 0, INT32_MAX)) {
    return false;
  }
  for (size_t axis = 0; axis < kMaxMovedRank; ++axis) {
    padding.before[axis] = static_cast<SizesType>(before[axis]);
    padding.after[axis] = static_cast<SizesType>(after[axis]);
    if (!check.require(axis >= absent || (before[axis] == 0 && after[axis] == 0), "pre_pad or post_pad",
                       "must be 0 for axes that the input lacks") ||
        !check.require(padding.padded(axis) <= INT32_MAX, "post_pad", "makes the result too large")) {
      return false;
    }
  }
  return true;
}

int8_t* fill(int8_t* out, int8_t value, int64_t count) {
  std::memset(out, value, static_cast<size_t>(count));
  return out + count;
}

void copy_padded(const int8_t* input, int8_t* out, const Padding& padding, int8_t value) {
  const int64_t pixel = padding.padded(3);
  const int64_t row = padding.padded(2) * pixel;
  const int64_t image = padding.padded(1) * row;
  const auto channels = static_cast<size_t>(padding.sizes[3]);
  out = fill(out, value, padding.before[0] * image);
  for (SizesType n = 0; n < padding.sizes[0]; ++n) {
    out = fill(out, value, padding.before[1] * row);
    for (SizesType h = 0; h < padding.sizes[1]; ++h) {
      out = fill(out, value, padding.before[2] * pixel);
      for (SizesType w = 0; w < padding.sizes[2]; ++w) {
        out = fill(out, value, padding.before[3]);
        std::memcpy(out, input, channels);
        input += channels;
        out = fill(out + channels, value, padding.after[3]);
      }
      out = fill(out, value, padding.after[2] * pixel);
    }
    out = fill(out, value, padding.after[1] * row);
  }
  fill(out, value, padding.after[0] * image);
}

Tensor& pad_out(KernelRuntimeContext& context, const Tensor& input, Int64List before, Int64List after, int64_t value,
                Tensor& out) {
  ArgumentChecker check(context, kPad);
  const auto rank = static_cast<size_t>(input.dim());
  Padding padding;
  if (!check_tensors(check, input, out) || !check.is_zero_point("pad_value", value) ||
      !set_amounts(check, padding, before, after, kMaxMovedRank - rank)) {
    return out;
  }
  const bool as_channels_last = is_padded_as_channels_last(input);
  constexpr size_t kChannelsLast[] = {0, 2, 3, 1};
  const size_t absent = kMaxMovedRank - rank;
  AxisSizes padded{};
  for (size_t i = 0; i < rank; ++i) {
    const size_t axis = as_channels_last ? kChannelsLast[i] : i;
    padding.sizes[absent + i] = static_cast<SizesType>(input.size(static_cast<ssize_t>(axis)));
    if (!check.require(padding.padded(absent + i) <= INT32_MAX, "post_pad", "makes the result too large")) {
      return out;
    }
    padded[axis] = static_cast<SizesType>(padding.padded(absent + i));
  }
  const bool has_format =
      as_channels_last ? check.is_channels_last("input", input) : check.is_contiguous("input", input);
  if (!has_format || !resize(check, out, padded.data(), rank) ||
      !(as_channels_last ? check.is_channels_last("out", out) : check.is_contiguous("out", out))) {
    return out;
  }
  copy_padded(input.const_data_ptr<int8_t>(), out.mutable_data_ptr<int8_t>(), padding, static_cast<int8_t>(value));
  return out;
}

}  // namespace

ARM_RUNTIME_CORTEX_M_KERNEL(transpose, kTranspose, transpose_out)
ARM_RUNTIME_CORTEX_M_KERNEL(pad, kPad, pad_out)

}  // namespace arm_runtime
