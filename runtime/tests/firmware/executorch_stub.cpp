// SPDX-License-Identifier: Apache-2.0
// Stubs of the functions of ExecuTorch's runtime that the backend and the kernels call. The Python package has the
// headers, but not the sources.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/abort.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace executorch {
namespace runtime {
namespace {

template <typename T, size_t size>
struct Table {
  T entries[size] = {};
  size_t count = 0;

  bool add(const T& entry) {
    if (count < size) {
      entries[count++] = entry;
      return true;
    }
    return false;
  }
  const T* begin() const { return entries; }
  const T* end() const { return entries + count; }
};

// Tables with constant initialization: constructors in other files fill them, possibly before those of this file run.
Table<Backend, 4> backends;
Table<Kernel, 32> kernels;

}  // namespace

BackendInterface::~BackendInterface() = default;

Error register_backend(const Backend& backend) {
  return backends.add(backend) ? Error::Ok : Error::RegistrationExceedingMaxKernels;
}

BackendInterface* get_backend_class(const char* name) {
  const auto* found = std::find_if(backends.begin(), backends.end(),
                                   [name](const Backend& backend) { return std::strcmp(backend.name, name) == 0; });
  return found == backends.end() ? nullptr : found->backend;
}

Span<const Kernel> get_registered_kernels() { return {kernels.entries, kernels.count}; }

Error register_kernels(const Span<const Kernel> added) {
  const bool fit = std::all_of(added.begin(), added.end(), [](const Kernel& kernel) { return kernels.add(kernel); });
  return fit ? Error::Ok : Error::RegistrationExceedingMaxKernels;
}

Result<OpFunction> get_op_function_from_registry(const char* name, Span<const TensorMeta>) {
  const auto* found = std::find_if(kernels.begin(), kernels.end(),
                                   [name](const Kernel& kernel) { return std::strcmp(kernel.name_, name) == 0; });
  return found == kernels.end() ? Result<OpFunction>(Error::OperatorMissing) : Result<OpFunction>(found->op_);
}

void runtime_abort() { std::abort(); }

bool tensors_have_same_dim_order(const aten::ArrayRef<aten::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&tensors](const aten::Tensor& tensor) {
    const auto first = tensors[0].dim_order(), other = tensor.dim_order();
    return std::equal(first.begin(), first.end(), other.begin(), other.end());
  });
}

namespace internal {

et_timestamp_t get_log_timestamp() { return 0; }

void vlogf(LogLevel, et_timestamp_t, const char*, const char*, size_t, const char* format, va_list arguments) {
  std::vprintf(format, arguments);
  std::putchar('\n');
}

// Tensors of the test script have the shapes of the export. A kernel that changes a shape fails.
Error resize_tensor_impl(aten::TensorImpl* tensor, aten::ArrayRef<aten::SizesType> sizes) {
  const auto old = tensor->sizes();
  const bool same = std::equal(old.begin(), old.end(), sizes.begin(), sizes.end());
  return same ? Error::Ok : Error::NotSupported;
}

}  // namespace internal

namespace etensor {

ssize_t compute_numel(const TensorImpl::SizesType* sizes, ssize_t dim) {
  ssize_t count = 1;
  for (ssize_t i = 0; i < dim; ++i) {
    count *= sizes[i];
  }
  return count;
}

TensorImpl::TensorImpl(ScalarType type, ssize_t dim, SizesType* sizes, void* data, DimOrderType* dim_order,
                       StridesType* strides, TensorShapeDynamism dynamism, DeviceType device_type,
                       DeviceIndex device_index)
    : sizes_(sizes),
      dim_order_(dim_order),
      strides_(strides),
      data_(data),
      dim_(dim),
      numel_(compute_numel(sizes, dim)),
      numel_bound_(static_cast<size_t>(numel_)),
      type_(type),
      shape_dynamism_(dynamism),
      device_(device_type, device_index) {}

ssize_t TensorImpl::element_size() const { return static_cast<ssize_t>(elementSize(type_)); }

size_t TensorImpl::nbytes() const { return static_cast<size_t>(numel_ * element_size()); }

}  // namespace etensor
}  // namespace runtime
}  // namespace executorch
