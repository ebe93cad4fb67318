// SPDX-License-Identifier: Apache-2.0
#include "kernels/argument_checker.h"

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "kernels/fixed_point.h"

namespace arm_runtime {
namespace {

using executorch::aten::DimOrderType;
using executorch::aten::SizesType;

constexpr size_t kMaxRank = 16;

// Whether `order` is the order of the axes in memory. Axes of size 1 may be anywhere. True for empty tensors.
bool has_order(const Tensor& tensor, const DimOrderType* order) {
  const auto actual = tensor.dim_order();
  const auto sizes = tensor.sizes();
  const size_t rank = sizes.size();
  size_t next = 0;
  for (size_t i = 0; i < rank && tensor.numel() > 0; ++i) {
    if (sizes[order[i]] == 1) {
      continue;
    }
    while (sizes[actual[next]] == 1) {
      ++next;
    }
    if (actual[next++] != order[i]) {
      return false;
    }
  }
  return true;
}

const char* describe_type(ScalarType type) {
  switch (type) {
    case ScalarType::Char:
      return "must be int8";
    case ScalarType::Short:
      return "must be int16";
    case ScalarType::Int:
      return "must be int32";
    default:
      return "has the wrong dtype";
  }
}

}  // namespace

bool is_contiguous(const Tensor& tensor) {
  const auto actual = tensor.dim_order();
  const auto sizes = tensor.sizes();
  int last = -1;
  for (const DimOrderType axis : actual) {
    if (sizes[axis] != 1) {
      if (axis < last) {
        return tensor.numel() == 0;
      }
      last = axis;
    }
  }
  return true;
}

bool is_channels_last(const Tensor& tensor) {
  constexpr DimOrderType kOrder[] = {0, 2, 3, 1};
  return tensor.dim() == 4 && has_order(tensor, kOrder);
}

bool has_same_order(const Tensor& first, const Tensor& second) {
  return (is_contiguous(first) && is_contiguous(second)) || (is_channels_last(first) && is_channels_last(second)) ||
         executorch::runtime::tensors_have_same_dim_order(first, second);
}

bool ArgumentChecker::fail(const char* argument, const char* reason) {
  ET_LOG(Error, "%s: %s %s", name_, argument, reason);
  context_.fail(Error::InvalidArgument);
  return false;
}

bool ArgumentChecker::has_type(const char* argument, const Tensor& tensor, ScalarType type) {
  return require(tensor.scalar_type() == type, argument, describe_type(type));
}

bool ArgumentChecker::has_rank(const char* argument, const Tensor& tensor, int64_t rank) {
  if (tensor.dim() == rank) {
    return true;
  }
  ET_LOG(Error, "%s: %s must have rank %d, and has rank %d", name_, argument, static_cast<int>(rank),
         static_cast<int>(tensor.dim()));
  context_.fail(Error::InvalidArgument);
  return false;
}

bool ArgumentChecker::has_shape(const char* argument, const Tensor& tensor, std::initializer_list<int64_t> shape) {
  const auto sizes = tensor.sizes();
  return require(
      std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(),
                 [](SizesType actual, int64_t expected) { return expected == kAnySize || actual == expected; }),
      argument, "has a shape that does not fit the other arguments");
}

bool ArgumentChecker::is_in(const char* argument, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) {
    return true;
  }
  const auto printable = [](int64_t number) {
    return static_cast<long>(std::min<int64_t>(std::max<int64_t>(number, INT32_MIN), INT32_MAX));
  };
  // The C library of small targets prints no 64-bit numbers, so the message has the nearest int32.
  ET_LOG(Error, "%s: %s must be from %ld to %ld, and is %ld", name_, argument, printable(low), printable(high),
         printable(value));
  context_.fail(Error::InvalidArgument);
  return false;
}

bool ArgumentChecker::is_list(const char* argument, Int64List values, size_t length, int64_t low, int64_t high) {
  return require(values.size() == length, argument, "has the wrong length") &&
         std::all_of(values.begin(), values.end(), [&](int64_t value) { return is_in(argument, value, low, high); });
}

bool ArgumentChecker::is_multiplier(const char* argument, int64_t value) {
  return is_in(argument, value, kMinMultiplier, kMaxMultiplier);
}

bool ArgumentChecker::is_shift(const char* argument, int64_t value) {
  return is_in(argument, value, kMinShift, kMaxShift);
}

bool ArgumentChecker::is_activation_range(int64_t low, int64_t high) {
  return is_in("activation_min", low, INT8_MIN, INT8_MAX) && is_in("activation_max", high, low, INT8_MAX);
}

bool ArgumentChecker::resize(const char* argument, Tensor& out, const int64_t* shape, size_t rank) {
  std::array<SizesType, kMaxRank> sizes{};
  for (size_t axis = 0; axis < rank; ++axis) {
    if (rank > kMaxRank || shape[axis] < 0 || shape[axis] > INT32_MAX) {
      return fail(argument, "would have more than 16 axes, or an axis whose size is not an int32");
    }
    sizes[axis] = static_cast<SizesType>(shape[axis]);
  }
  return require(executorch::runtime::resize_tensor(out, {sizes.data(), rank}) == Error::Ok, argument,
                 "cannot have the shape of the result");
}

bool ArgumentChecker::resize(const char* argument, Tensor& out, std::initializer_list<int64_t> shape) {
  return resize(argument, out, shape.begin(), shape.size());
}

bool ArgumentChecker::resize_last_axis(const char* argument, Tensor& out, const Tensor& input, int64_t size) {
  std::array<int64_t, kMaxRank> shape{};
  const auto sizes = input.sizes();
  if (sizes.empty() || sizes.size() > kMaxRank) {
    return fail(argument, "must have 1 to 16 axes");
  }
  std::copy(sizes.begin(), sizes.end(), shape.begin());
  shape[sizes.size() - 1] = size;
  return resize(argument, out, shape.data(), sizes.size());
}

bool ArgumentChecker::resize_like(const char* argument, Tensor& out, const Tensor& input) {
  return require(executorch::runtime::resize_tensor(out, input.sizes()) == Error::Ok, argument,
                 "cannot have the shape of the input");
}

}  // namespace arm_runtime
