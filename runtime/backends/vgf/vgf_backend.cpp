// SPDX-License-Identifier: Apache-2.0
// ExecuTorch's VgfBackend: runs VGF payloads on Vulkan devices with VK_ARM_tensors and VK_ARM_data_graph.
//
// It does not link Vulkan; loading the first program opens the Vulkan loader. An application can provide its own device
// with set_vulkan_device (vulkan_device.h).

#include <cstring>
#include <memory>

#include "backends/vgf/vgf_program.h"
#include "common/checksum.h"
#include "common/executorch.h"
#include "common/log.h"
#include "common/trace.h"

#define ARM_RUNTIME_BACKEND_ID "VgfBackend"

namespace arm_runtime {

namespace {

// Whether the element type of a tensor fits an input or output of the graph. A uint8 tensor fits an int8 input or
// output: TOSA has no unsigned types, so the export declares uint8 tensors as int8. Operators of the graph interpret
// the bits of these tensors as uint8.
bool has_matching_type(const Tensor& tensor, const VgfProgram::Port& port) {
  return tensor.scalar_type() == port.scalar_type ||
         (tensor.scalar_type() == ScalarType::Byte && port.scalar_type == ScalarType::Char);
}

Error check_argument(const EValue& value, const VgfProgram::Port& port, const char* side, size_t index) {
  if (!value.isTensor()) {
    ARM_RUNTIME_LOG(Error, "%s %zu is not a tensor", side, index);
    return Error::InvalidArgument;
  }
  const Tensor& tensor = value.toTensor();
  if (!has_matching_type(tensor, port)) {
    ARM_RUNTIME_LOG(Error, "%s %zu has elements of type %d, the model was exported with %d (ScalarType)", side, index,
                    static_cast<int>(tensor.scalar_type()), static_cast<int>(port.scalar_type));
    return Error::InvalidArgument;
  }
  if (tensor.nbytes() != port.nbytes) {
    ARM_RUNTIME_LOG(Error, "%s %zu has %zu bytes, the model was exported with %zu", side, index, tensor.nbytes(),
                    port.nbytes);
    return Error::InvalidArgument;
  }
  return Error::Ok;
}

Error trace_run(VgfProgram* program, EventTracer* tracer) {
  const TraceScope scope(tracer, "VgfBackend device");
  return program->run();
}

class VgfBackend final : public BackendInterface {
 public:
  // Returns false, with the reason in the log, if there is neither a Vulkan loader nor a device of the application.
  bool is_available() const override { return VulkanDevice::has_device_or_loader(); }

  // Decodes the VGF file, creates its pipelines and frees the payload. Errors: InvalidArgument if the payload is not at
  // a multiple of 8 bytes, or the timeout in the environment is invalid; InvalidProgram if the payload is damaged or
  // differs from its compile spec payload_crc32; DelegateInvalidCompatibility if libvgf does not accept its header, for
  // example because of another version of the format; NotSupported for contents other than SPIR-V graphs and for
  // missing features of the device; NotFound if there is no device, or if a Vulkan function is missing; and the errors
  // that vulkan_failure() returns.
  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> compile_specs) const override {
    const TraceScope scope(context.event_tracer(), "VgfBackend load");
    Error error = verify_payload_checksum(ARM_RUNTIME_BACKEND_ID, processed->data(), processed->size(), compile_specs);
    if (error != Error::Ok) {
      return error;
    }
    VgfFile file;
    error = read_vgf(processed->data(), processed->size(), &file);
    if (error != Error::Ok) {
      return error;
    }
    Result<std::shared_ptr<VulkanDevice>> device = VulkanDevice::acquire();
    if (!device.ok()) {
      return device.error();
    }
    auto program = std::make_unique<VgfProgram>(device.get());
    error = program->prepare(file);
    if (error != Error::Ok) {
      return error;
    }
    processed->Free();
    return program.release();
  }

  // `args` are the model's inputs, then its outputs. Errors: InvalidArgument for a wrong number, element type or size;
  // InvalidState if this execution, or an earlier one that is still running, does not end before the timeout; and the
  // errors that vulkan_failure() returns.
  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override {
    const TraceScope scope(context.event_tracer(), "VgfBackend execute");
    auto& program = *static_cast<VgfProgram*>(handle);
    const auto& inputs = program.inputs();
    const auto& outputs = program.outputs();
    if (args.size() != inputs.size() + outputs.size()) {
      ARM_RUNTIME_LOG(Error, "the delegate was called with %zu tensors; its model has %zu inputs and %zu outputs",
                      args.size(), inputs.size(), outputs.size());
      return Error::InvalidArgument;
    }
    for (size_t index = 0; index < args.size(); ++index) {
      const bool is_input = index < inputs.size();
      const size_t position = is_input ? index : index - inputs.size();
      const Error error = check_argument(*args[index], is_input ? inputs[position] : outputs[position],
                                         is_input ? "input" : "output", position);
      if (error != Error::Ok) {
        return error;
      }
    }
    Error error = program.wait_for_last_run();
    if (error != Error::Ok) {
      return error;
    }
    for (size_t index = 0; index < inputs.size(); ++index) {
      std::memcpy(inputs[index].mapped, args[index]->toTensor().const_data_ptr(), inputs[index].nbytes);
    }
    error = trace_run(&program, context.event_tracer());
    if (error != Error::Ok) {
      return error;
    }
    for (size_t index = 0; index < outputs.size(); ++index) {
      std::memcpy(args[inputs.size() + index]->toTensor().mutable_data_ptr(), outputs[index].mapped,
                  outputs[index].nbytes);
    }
    return Error::Ok;
  }

  void destroy(DelegateHandle* handle) const override {
    VgfProgram::retire(std::unique_ptr<VgfProgram>(static_cast<VgfProgram*>(handle)));
  }
};

VgfBackend backend;

Error register_backend() {
  if (executorch::runtime::get_backend_class(ARM_RUNTIME_BACKEND_ID) != nullptr) {
    ARM_RUNTIME_LOG(Error, "another backend with this name is registered already; link or load only one");
    return Error::AlreadyLoaded;
  }
  return executorch::runtime::register_backend({ARM_RUNTIME_BACKEND_ID, &backend});
}

}  // namespace
}  // namespace arm_runtime

// Registers the backend at program start. Linkers keep this file if the option --undefined refers to this name.
extern "C" const executorch::runtime::Error arm_runtime_vgf_registered = arm_runtime::register_backend();
