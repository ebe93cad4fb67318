// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/kernel_abi.h"

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "common/executorch.h"
#include "kernels/kernel_list.h"

namespace arm_runtime {

using executorch::runtime::Kernel;

#define ARM_RUNTIME_DECLARE(symbol) Kernel make_##symbol##_kernel();
ARM_RUNTIME_CORTEX_M_KERNEL_LIST(ARM_RUNTIME_DECLARE)
#undef ARM_RUNTIME_DECLARE

namespace {

using executorch::aten::TensorImpl;
using executorch::runtime::BoxedEvalueList;

std::string log_lines;
bool is_capturing = false;
pal_emit_log_message_method previous_emit = nullptr;

// Stores log lines of a kernel's call. Passes other log lines to the previous log function.
void emit(et_timestamp_t time, et_pal_log_level_t level, const char* file, const char* function, size_t line,
          const char* message, size_t length) {
  if (is_capturing) {
    log_lines.append(message, length).append("\n");
  } else {
    previous_emit(time, level, file, function, line, message, length);
  }
}

class LogCapture {
 public:
  LogCapture() {
    if (previous_emit == nullptr) {
      previous_emit = executorch::runtime::get_pal_impl()->emit_log_message;
      executorch::runtime::register_pal(executorch::runtime::PalImpl::create(emit, __FILE__));
    }
    log_lines.clear();
    is_capturing = true;
  }
  ~LogCapture() { is_capturing = false; }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;
};

// Arguments of one call, with the memory that they refer to. Deques do not move their elements.
class Arguments {
 public:
  void add(const arm_test_argument& argument) {
    switch (argument.kind) {
      case ARM_TEST_INT:
        return store(EValue(argument.integer));
      case ARM_TEST_DOUBLE:
        return store(EValue(argument.real));
      case ARM_TEST_BOOL:
        return store(EValue(argument.integer != 0));
      case ARM_TEST_INT_LIST:
        return add_list(argument);
      case ARM_TEST_TENSOR:
        return add_tensor(argument);
      default:
        return store(EValue());
    }
  }

  Span<EValue*> stack() { return {pointers_.data(), pointers_.size()}; }

 private:
  void store(const EValue& value) {
    values_.push_back(value);
    pointers_.push_back(&values_.back());
  }

  void add_list(const arm_test_argument& argument) {
    const auto length = static_cast<size_t>(argument.length);
    auto& elements = elements_.emplace_back(length);
    auto& boxes = boxes_.emplace_back();
    for (size_t i = 0; i < length; ++i) {
      elements[i] = argument.list[i];
      boxes.push_back(&scalars_.emplace_back(argument.list[i]));
    }
    // BoxedEvalueList rejects null pointers, and data() of an empty vector may be null: reserve(1) allocates.
    elements.reserve(1);
    boxes.reserve(1);
    store(EValue(&lists_.emplace_back(boxes.data(), elements.data(), argument.length)));
  }

  void add_tensor(const arm_test_argument& argument) {
    const auto rank = static_cast<size_t>(argument.length);
    auto& sizes = sizes_.emplace_back(argument.sizes, argument.sizes + rank);
    auto& order = orders_.emplace_back(argument.dim_order, argument.dim_order + rank);
    auto& strides = strides_.emplace_back(rank, 1);
    for (size_t axis = rank; axis-- > 1;) {
      const auto size = sizes[order[axis]];
      strides[order[axis - 1]] = strides[order[axis]] * (size > 0 ? size : 1);
    }
    store(EValue(Tensor(&tensors_.emplace_back(static_cast<ScalarType>(argument.dtype), argument.length, sizes.data(),
                                               argument.data, order.data(), strides.data()))));
  }

  std::deque<EValue> values_;
  std::vector<EValue*> pointers_;
  std::deque<EValue> scalars_;
  std::deque<std::vector<int64_t>> elements_;
  std::deque<std::vector<EValue*>> boxes_;
  std::deque<BoxedEvalueList<int64_t>> lists_;
  std::deque<std::vector<executorch::aten::SizesType>> sizes_;
  std::deque<std::vector<executorch::aten::DimOrderType>> orders_;
  std::deque<std::vector<executorch::aten::StridesType>> strides_;
  std::deque<TensorImpl> tensors_;
};

#define ARM_RUNTIME_MAKE(symbol) make_##symbol##_kernel,
Kernel (*const makers[])() = {ARM_RUNTIME_CORTEX_M_KERNEL_LIST(ARM_RUNTIME_MAKE)};
#undef ARM_RUNTIME_MAKE

}  // namespace
}  // namespace arm_runtime

int32_t arm_test_call_kernel(const char* name, const arm_test_argument* arguments, uint64_t count, char* log,
                             uint64_t log_size) {
  using namespace arm_runtime;  // NOLINT
  et_pal_init();
  for (Kernel (*make)() : makers) {
    const Kernel kernel = make();
    if (std::strcmp(kernel.name_, name) != 0) {
      continue;
    }
    Arguments values;
    for (uint64_t i = 0; i < count; ++i) {
      values.add(arguments[i]);
    }
    const LogCapture capture;
    executorch::runtime::KernelRuntimeContext context;
    kernel.op_(context, values.stack());
    std::strncpy(log, log_lines.c_str(), log_size);
    return static_cast<int32_t>(context.failure_state());
  }
  return -1;
}

const char* arm_test_list_kernels(void) {
#define ARM_RUNTIME_NAME(symbol) #symbol " "
  return ARM_RUNTIME_CORTEX_M_KERNEL_LIST(ARM_RUNTIME_NAME);
#undef ARM_RUNTIME_NAME
}
