// SPDX-License-Identifier: Apache-2.0
#include "host/plugin.h"

#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/platform/platform.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/executorch.h"
#include "kernels/cortex_m_kernels.h"

namespace arm_runtime {
namespace {

void write_message(char* message, uint64_t size, const char* text, const char* name) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, size, text, name);
  }
}

// The tracer of the delegate that executes on this thread, and the start time of the execution. Without a tracer, they
// are null and 0.
thread_local EventTracer* tracer = nullptr;
thread_local et_timestamp_t start_ticks = 0;

// Sets the tracer of this thread during its lifetime.
class ScopedTracer {
 public:
  explicit ScopedTracer(EventTracer* current) : previous_(tracer), previous_start_ticks_(start_ticks) {
    tracer = current;
    start_ticks = current == nullptr ? 0 : et_pal_current_ticks();
  }
  ~ScopedTracer() {
    tracer = previous_;
    start_ticks = previous_start_ticks_;
  }
  ScopedTracer(const ScopedTracer&) = delete;
  ScopedTracer& operator=(const ScopedTracer&) = delete;

 private:
  EventTracer* previous_;
  et_timestamp_t previous_start_ticks_;
};

// A backend that forwards its calls to an executor.
class HostBackend final : public BackendInterface {
 public:
  explicit HostBackend(const char* id) : id_(id) {}

  const char* id() const { return id_; }
  void set_executor(const arm_host_executor& executor) { executor_ = executor; }

  bool is_available() const override { return executor_.init != nullptr; }

  Result<DelegateHandle*> init(BackendInitContext&, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> compile_specs) const override {
    if (!is_available()) {
      ET_LOG(Error, "%s: no executor is set; load the program with arm_recipes.load", id_);
      return Error::NotFound;
    }
    std::vector<arm_host_compile_spec> specs;
    specs.reserve(compile_specs.size());
    for (const CompileSpec& spec : compile_specs) {
      specs.push_back({spec.key, spec.value.buffer, spec.value.nbytes});
    }
    const int64_t handle =
        executor_.init(executor_.context, processed->data(), processed->size(), specs.data(), specs.size());
    if (handle <= 0) {
      ET_LOG(Error, "%s: the payload of %zu bytes was refused", id_, processed->size());
      return Error::DelegateInvalidCompatibility;
    }
    // A handle is a number above 0, so it is never a null pointer.
    return reinterpret_cast<DelegateHandle*>(static_cast<intptr_t>(handle));
  }

  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override {
    const ScopedTracer tracing(context.event_tracer());
    std::vector<arm_host_tensor> tensors;
    tensors.reserve(args.size());
    for (size_t index = 0; index < args.size(); ++index) {
      if (!args[index]->isTensor()) {
        ET_LOG(Error, "%s: argument %zu of the delegate is not a tensor", id_, index);
        return Error::InvalidArgument;
      }
      const auto& tensor = args[index]->toTensor();
      tensors.push_back({tensor.mutable_data_ptr(), tensor.nbytes(), tensor.sizes().data(), tensor.dim_order().data(),
                         static_cast<int32_t>(tensor.dim()), static_cast<int32_t>(tensor.scalar_type())});
    }
    const auto number = static_cast<int64_t>(reinterpret_cast<intptr_t>(handle));
    if (executor_.execute(executor_.context, number, tensors.data(), tensors.size()) != 0) {
      ET_LOG(Error, "%s: delegate %" PRId64 " failed; the executor has the reason", id_, number);
      return Error::Internal;
    }
    return Error::Ok;
  }

  void destroy(DelegateHandle* handle) const override {
    executor_.destroy(executor_.context, static_cast<int64_t>(reinterpret_cast<intptr_t>(handle)));
  }

 private:
  const char* id_;
  arm_host_executor executor_{};
};

// Never destroyed, because the runtime's registry refers to the backends until the process ends.
HostBackend* const kBackends[] = {new HostBackend("TOSABackend"), new HostBackend("VgfBackend"),
                                  new HostBackend("EthosUBackend")};
bool installed = false;

}  // namespace
}  // namespace arm_runtime

using namespace arm_runtime;

int32_t arm_host_install(char* message, uint64_t message_size) {
  if (installed) {
    write_message(message, message_size, "this copy of the %s is installed already", "Arm host plugin");
    return 1;
  }
  for (const HostBackend* backend : kBackends) {
    if (executorch::runtime::get_backend_class(backend->id()) != nullptr) {
      write_message(
          message, message_size,
          "something else in this process implements %s already: another copy of the plugin, or another library",
          backend->id());
      return 1;
    }
  }
  for (HostBackend* backend : kBackends) {
    if (executorch::runtime::register_backend({backend->id(), backend}) != Error::Ok) {
      write_message(message, message_size, "ExecuTorch's runtime has no room for another backend: %s", backend->id());
      return 1;
    }
  }
  if (const char* refused = register_cortex_m_kernels()) {
    write_message(message, message_size, "ExecuTorch's runtime refused the kernel %s", refused);
    return 1;
  }
  installed = true;
  return 0;
}

int32_t arm_host_set_executor(const char* backend_id, const arm_host_executor* executor, char* message,
                              uint64_t message_size) {
  for (HostBackend* backend : kBackends) {
    if (std::strcmp(backend->id(), backend_id) == 0) {
      backend->set_executor(*executor);
      return 0;
    }
  }
  write_message(message, message_size, "the plugin has no backend '%s'", backend_id);
  return 1;
}

int32_t arm_host_log_duration(int32_t id, uint64_t start, uint64_t end, const char* metadata, uint64_t metadata_size) {
  if (tracer == nullptr) {
    return 1;
  }
  tracer->log_profiling_delegate(nullptr, id, start_ticks + start, start_ticks + end, metadata, metadata_size);
  return 0;
}

int32_t arm_host_log_output(int32_t id, const arm_host_tensor* output) {
  if (tracer == nullptr) {
    return 1;
  }
  std::vector<executorch::aten::SizesType> sizes(output->sizes, output->sizes + output->rank);
  std::vector<executorch::aten::DimOrderType> order(output->dim_order, output->dim_order + output->rank);
  std::vector<executorch::aten::StridesType> strides(sizes.size(), 1);
  for (size_t axis = sizes.size(); axis-- > 1;) {
    strides[order[axis - 1]] = strides[order[axis]] * sizes[order[axis]];
  }
  executorch::aten::TensorImpl tensor(static_cast<executorch::aten::ScalarType>(output->dtype), output->rank,
                                      sizes.data(), output->data, order.data(), strides.data());
  return tracer->log_intermediate_output_delegate(nullptr, id, executorch::aten::Tensor(&tensor)).ok() ? 0 : 1;
}
