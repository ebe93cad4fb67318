// SPDX-License-Identifier: Apache-2.0
// A method of a program, loaded into memory of the caller. The classes here neither allocate heap memory nor throw.
#pragma once

#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/core/memory_allocator.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "common/executorch.h"

namespace arm_runtime {

// Type, shape and memory layout of a tensor.
struct TensorMetadata {
  static constexpr size_t kMaxDimensions = 16;  // limit of ExecuTorch's runtime

  ScalarType type;
  size_t rank;
  const int32_t* sizes;
  const uint8_t* dim_order;  // dimensions in memory, outermost first
};

// A method of a program. Before load() has succeeded, set_input(), set_output() and execute() return InvalidState, and
// output() is empty.
class ModelMethod {
 public:
  using Bytes = Span<uint8_t>;

  ModelMethod() = default;
  ModelMethod(const ModelMethod&) = delete;
  ModelMethod& operator=(const ModelMethod&) = delete;

  // Loads a method. `pool` is the memory of ExecuTorch's method allocator, from which the runtime allocates the method.
  // `temp` is ExecuTorch's temp allocator, for temporary memory of instructions. Several methods may share `temp`.
  // Tensors are in `planned`, which has an entry for each memory-planned buffer. `data` is the named data outside the
  // program (see DataFile), or null. The program, `data`, the memories and the array of `planned` must outlive this
  // object.
  Error load(const executorch::runtime::Program& program, const char* name, Bytes pool, Span<Bytes> planned,
             MemoryAllocator* temp, const executorch::runtime::NamedDataMap* data = nullptr) {
    // Destroy the method of an earlier load() first: it refers to the allocators that are replaced below.
    method_.reset();
    pool_.emplace(static_cast<uint32_t>(pool.size()), pool.data());
    planned_.emplace(planned);
    manager_.emplace(&*pool_, &*planned_, temp);
    const auto meta = program.method_meta(name);
    if (!meta.ok()) {
      return meta.error();
    }
    // Check the sizes here. The runtime only checks that each tensor is inside its planned memory, but the scratch of a
    // delegate may end after the last tensor.
    for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
      const auto needed = meta->memory_planned_buffer_size(i);
      const size_t available = i < planned.size() ? planned[i].size() : 0;
      if (!needed.ok() || static_cast<size_t>(*needed) > available) {
        ET_LOG(Error, "planned memory %lu of method %s has %lu bytes and needs %lu: enlarge it",
               static_cast<unsigned long>(i), name, static_cast<unsigned long>(available),
               static_cast<unsigned long>(needed.ok() ? *needed : 0));
        return Error::MemoryAllocationFailed;
      }
    }
    auto loaded = program.load_method(name, &*manager_, /*event_tracer=*/nullptr, data);
    if (!loaded.ok()) {
      return loaded.error();
    }
    method_.emplace(std::move(*loaded));
    return Error::Ok;
  }

  // Sets an input. Copies the data if the memory plan allocates the input; otherwise, the method refers to `data`.
  Error set_input(size_t index, const TensorMetadata& metadata, const void* data) {
    if (!method_.has_value()) {
      return Error::InvalidState;
    }
    if (metadata.rank > TensorMetadata::kMaxDimensions) {
      return Error::InvalidArgument;
    }
    int32_t sizes[TensorMetadata::kMaxDimensions] = {}, strides[TensorMetadata::kMaxDimensions] = {};
    uint8_t dim_order[TensorMetadata::kMaxDimensions] = {};
    std::copy_n(metadata.sizes, metadata.rank, sizes);
    std::copy_n(metadata.dim_order, metadata.rank, dim_order);
    int32_t stride = 1;
    for (size_t i = metadata.rank; i-- > 0;) {
      strides[dim_order[i]] = stride;
      stride *= sizes[dim_order[i]];
    }
    // The runtime only reads the data, but its parameter lacks a const.
    executorch::aten::TensorImpl tensor(metadata.type, static_cast<ssize_t>(metadata.rank), sizes,
                                        const_cast<void*>(data), dim_order, strides);
    return method_->set_input(EValue(Tensor(&tensor)), index);
  }

  Error execute() { return method_.has_value() ? method_->execute() : Error::InvalidState; }

  // Sets the memory of an output that the memory plan does not allocate. Before this call, output() is empty for it.
  // The memory must stay valid while the method is loaded.
  Error set_output(size_t index, Bytes memory) {
    return method_.has_value() ? method_->set_output_data_ptr(memory.data(), memory.size(), index)
                               : Error::InvalidState;
  }

  // Returns the bytes of an output. The span is empty if the output is not a tensor, or if neither the memory plan nor
  // set_output() has set its memory.
  Span<const uint8_t> output(size_t index) const {
    if (!method_.has_value()) {
      return {};
    }
    const EValue& value = method_->get_output(index);
    if (!value.isTensor()) {
      return {};
    }
    const Tensor& tensor = value.toTensor();
    if (tensor.const_data_ptr() == nullptr) {
      return {};  // a Span of null with a size fails an assertion
    }
    return {static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()};
  }

  // Returns the number of bytes of the pool that loading has used.
  size_t pool_used() const { return pool_.has_value() ? pool_->used_size() : 0; }

 private:
  std::optional<MemoryAllocator> pool_;
  std::optional<executorch::runtime::HierarchicalAllocator> planned_;
  std::optional<executorch::runtime::MemoryManager> manager_;
  std::optional<executorch::runtime::Method> method_;
};

// Allocator that records its peak use. used_size() does not suffice: the runtime resets the allocator after each
// instruction.
class PeakAllocator final : public MemoryAllocator {
 public:
  using MemoryAllocator::MemoryAllocator;

  void* allocate(size_t size, size_t alignment = kDefaultAlignment) override {
    void* data = MemoryAllocator::allocate(size, alignment);
    peak_ = std::max(peak_, used_size());
    return data;
  }
  size_t peak() const { return peak_; }

 private:
  size_t peak_ = 0;
};

}  // namespace arm_runtime
