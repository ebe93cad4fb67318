// SPDX-License-Identifier: Apache-2.0
// Replaces ExecuTorch's portable kernels that move int8 values between the kernels of a Cortex-M: cat, slice_copy and
// select_copy. Their sources are not in the Python package. Tensors are contiguous.
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>

#include <cstring>
#include <optional>

namespace {

using executorch::aten::Tensor;
using executorch::runtime::KernelRuntimeContext;
using TensorList = executorch::aten::ArrayRef<Tensor>;

// Bytes of a row: of the elements that have the same indices on `dim` and on the axes before `dim`.
size_t row_bytes(const Tensor& tensor, ssize_t dim) {
  auto bytes = static_cast<size_t>(tensor.element_size());
  for (ssize_t i = dim + 1; i < tensor.dim(); ++i) {
    bytes *= static_cast<size_t>(tensor.size(i));
  }
  return bytes;
}

size_t outer_count(const Tensor& tensor, ssize_t dim) {
  size_t count = 1;
  for (ssize_t i = 0; i < dim; ++i) {
    count *= static_cast<size_t>(tensor.size(i));
  }
  return count;
}

// Converts an index that may be negative, which counts from the end, to an index from the start.
ssize_t from_start(int64_t index, ssize_t size) { return static_cast<ssize_t>(index < 0 ? index + size : index); }

// Copies rows start, start + step, ... (`count` rows) to `out`.
void copy_rows(const Tensor& input, ssize_t dim, int64_t start, int64_t step, int64_t count, Tensor& out) {
  const size_t bytes = row_bytes(input, dim);
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto* from = static_cast<const uint8_t*>(input.const_data_ptr());
  for (size_t outer = 0; outer < outer_count(input, dim); ++outer) {
    for (int64_t i = 0; i < count; ++i, to += bytes) {
      const size_t row = outer * static_cast<size_t>(input.size(dim)) + static_cast<size_t>(start + i * step);
      std::memcpy(to, from + row * bytes, bytes);
    }
  }
}

Tensor& cat_out(KernelRuntimeContext&, TensorList tensors, int64_t axis, Tensor& out) {
  const ssize_t dim = from_start(axis, out.dim());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  for (size_t outer = 0; outer < outer_count(out, dim); ++outer) {
    for (const Tensor& tensor : tensors) {
      const size_t bytes = row_bytes(tensor, dim) * static_cast<size_t>(tensor.size(dim));
      std::memcpy(to, static_cast<const uint8_t*>(tensor.const_data_ptr()) + outer * bytes, bytes);
      to += bytes;
    }
  }
  return out;
}

Tensor& slice_copy_out(KernelRuntimeContext&, const Tensor& input, int64_t axis, std::optional<int64_t> start,
                       std::optional<int64_t>, int64_t step, Tensor& out) {
  const ssize_t dim = from_start(axis, input.dim());
  copy_rows(input, dim, from_start(start.value_or(0), input.size(dim)), step, out.size(dim), out);
  return out;
}

Tensor& select_copy_out(KernelRuntimeContext&, const Tensor& input, int64_t axis, int64_t index, Tensor& out) {
  const ssize_t dim = from_start(axis, input.dim());
  copy_rows(input, dim, from_start(index, input.size(dim)), 1, 1, out);
  return out;
}

}  // namespace

EXECUTORCH_LIBRARY(aten, "cat.out", cat_out);
EXECUTORCH_LIBRARY(aten, "slice_copy.Tensor_out", slice_copy_out);
EXECUTORCH_LIBRARY(aten, "select_copy.int_out", select_copy_out);
