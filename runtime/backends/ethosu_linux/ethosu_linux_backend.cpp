// SPDX-License-Identifier: Apache-2.0
// Backend "EthosUBackend" for an Ethos-U85 in Direct Drive: a Cortex-A under Linux sends command streams to the NPU
// through the kernel driver and the C++ driver library of ethos-u-linux-driver-stack. See README.md.
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include <ethosu.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "common/checksum.h"
#include "common/environment.h"
#include "common/executorch.h"
#include "common/log.h"
#include "common/trace.h"
#include "payload/ethosu_payload.h"
#include "payload/external_blocks.h"

#define ARM_RUNTIME_BACKEND_ID "EthosUBackend"

namespace arm_runtime {
namespace {

constexpr char kDefaultDevice[] = "/dev/ethosu0";
constexpr int64_t kDefaultTimeoutNs = 60'000'000'000;

// Keys of compile specs, as in ExecuTorch's own runtime. Environment variables override the device and the timeout.
constexpr char kDeviceSpec[] = "ethosu.device";
constexpr char kTimeoutSpec[] = "ethosu.timeout_ns";
constexpr char kCyclesSpec[] = "ethosu.enable_cycle_counter";
constexpr char kEventSpec[] = "ethosu.pmu_event";  // a number follows
constexpr char kDeviceVariable[] = "ARM_RUNTIME_ETHOSU_DEVICE";
constexpr char kTimeoutVariable[] = "ARM_RUNTIME_ETHOSU_TIMEOUT_MS";

// The event counters of an inference. Event 0 means none.
using Events = std::array<uint32_t, 4>;

// A deleter for objects of the driver library, whose destructors may throw. Buffers do not use it, because the library
// returns them as std::shared_ptr.
struct NoThrowDelete {
  template <typename T>
  void operator()(T* object) const noexcept {
    try {
      delete object;
    } catch (const std::exception& error) {
      ARM_RUNTIME_LOG(Error, "the driver failed to release an object: %s", error.what());
    } catch (...) {
      ARM_RUNTIME_LOG(Error, "the driver failed to release an object");
    }
  }
};

struct Options {
  std::string device = kDefaultDevice;
  int64_t timeout_ns = kDefaultTimeoutNs;
  std::optional<bool> counts_cycles;  // empty: count if there is a tracer
  Events events{};
};

// Runs `work`, and converts exceptions to a log line and an Error.
template <typename Work>
Error catch_exceptions(const char* doing, const Options& options, const Work& work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    ARM_RUNTIME_LOG(Error, "out of memory while %s", doing);
    return Error::MemoryAllocationFailed;
  } catch (const std::exception& error) {
    ARM_RUNTIME_LOG(Error, "%s on %s failed: %s; the kernel log (dmesg) has the driver's reason", doing,
                    options.device.c_str(), error.what());
  } catch (...) {
    ARM_RUNTIME_LOG(Error, "%s on %s failed, and the driver gave no reason; see the kernel log (dmesg)", doing,
                    options.device.c_str());
  }
  return Error::AccessFailed;
}

// Reads the value of a compile spec, which must have the size of `value`. Its byte order is the machine's.
template <typename T>
Error read_value(const CompileSpec& spec, const char* type, T* value) {
  if (spec.value.buffer == nullptr || spec.value.nbytes != sizeof(T)) {
    ARM_RUNTIME_LOG(Error, "compile spec %s has %zu bytes; it must be %s", spec.key, spec.value.nbytes, type);
    return Error::InvalidArgument;
  }
  std::memcpy(value, spec.value.buffer, sizeof(T));
  return Error::Ok;
}

Error read_event(const CompileSpec& spec, Events* events) {
  const char* number = spec.key + std::strlen(kEventSpec);
  char* end = nullptr;
  const unsigned long index = std::strtoul(number, &end, 10);
  if (*number < '0' || *number > '9' || *end != '\0' || index >= events->size()) {
    ARM_RUNTIME_LOG(Error, "compile spec %s names no counter; the counters of an inference are %s0 to %s%zu", spec.key,
                    kEventSpec, kEventSpec, events->size() - 1);
    return Error::InvalidArgument;
  }
  return read_value(spec, "a uint32", &(*events)[index]);
}

Error read_counters(const CompileSpec& spec, Options* options) {
  if (std::strcmp(spec.key, kCyclesSpec) == 0) {
    uint8_t counts = 0;
    const Error error = read_value(spec, "a byte", &counts);
    options->counts_cycles = counts != 0;
    return error;
  }
  return std::strncmp(spec.key, kEventSpec, std::strlen(kEventSpec)) == 0 ? read_event(spec, &options->events)
                                                                          : Error::Ok;
}

Error read_options(ArrayRef<CompileSpec> specs, Options* options) {
  for (const CompileSpec& spec : specs) {
    const auto* value = static_cast<const char*>(spec.value.buffer);
    if (std::strcmp(spec.key, kDeviceSpec) == 0) {
      // The text may end with a NUL.
      options->device.assign(value, value == nullptr ? 0 : strnlen(value, spec.value.nbytes));
    } else if (std::strcmp(spec.key, kTimeoutSpec) == 0) {
      const Error error = read_value(spec, "an int64", &options->timeout_ns);
      if (error != Error::Ok) {
        return error;
      }
    } else {
      const Error error = read_counters(spec, options);
      if (error != Error::Ok) {
        return error;
      }
    }
  }
  if (const char* device = std::getenv(kDeviceVariable)) {
    options->device = device;
  }
  if (options->device.empty()) {
    ARM_RUNTIME_LOG(Error, "the name of the device is empty; set %s", kDeviceVariable);
    return Error::InvalidArgument;
  }
  return read_timeout(ARM_RUNTIME_BACKEND_ID, kTimeoutVariable, &options->timeout_ns);
}

// Location and size of a tensor in its region, in bytes.
struct TensorSlot {
  size_t offset;
  size_t size;
  size_t element_size;
  bool allocated;  // false: the NPU does not use it
};

// The tensors of one region, in a single buffer. The kernel driver uses the address of the first input (output) buffer
// as the address of the region, and expects the other buffers behind it. In a region, Vela may order tensors
// differently from the program. With one buffer for each tensor, tensors could therefore have wrong addresses.
struct IoRegion {
  const char* name;
  Region region;
  std::vector<TensorSlot> slots;
  size_t size = 0;
  std::vector<char> bytes;  // to gather or scatter several tensors; empty if one tensor fills the region
  std::vector<std::shared_ptr<EthosU::Buffer>> buffers;  // at most one buffer; Inference takes a range of buffers
};

// A delegate of a loaded program.
struct Delegate {
  Options options;
  std::unique_ptr<EthosU::Device, NoThrowDelete> device;  // before the objects below, so that it outlives them
  std::shared_ptr<EthosU::Network> network;
  std::shared_ptr<EthosU::Buffer> constants, intermediate;
  IoRegion inputs{"input", Region::kInput, {}, 0, {}, {}};
  IoRegion outputs{"output", Region::kOutput, {}, 0, {}, {}};
};

// For a size of 0, returns a buffer object without memory, because the driver cannot create a buffer of 0 bytes.
std::shared_ptr<EthosU::Buffer> make_buffer(EthosU::Device& device, size_t size) {
  return size == 0 ? std::make_shared<EthosU::Buffer>() : device.createBuffers({size}).front();
}

// The driver accesses a buffer as a file: reads and writes continue at the last position.
void rewind(const EthosU::Buffer& buffer) {
  if (lseek(buffer.getFd(), 0, SEEK_SET) != 0) {
    throw EthosU::Exception("lseek() on a buffer failed");
  }
}

void write_buffer(EthosU::Buffer& buffer, const void* source, size_t size) {
  rewind(buffer);
  // The library only reads the data, but its parameter lacks a const.
  buffer.write(static_cast<char*>(const_cast<void*>(source)), size);
}

void read_buffer(EthosU::Buffer& buffer, void* destination, size_t size) {
  rewind(buffer);
  buffer.read(static_cast<char*>(destination), size);
}

Error read_payload(const void* data, size_t size, const ExternalData& external, EthosUPayload* payload) {
  const PayloadStatus status = read_ethosu_payload(data, size, payload, external);
  if (!status.ok()) {
    char reason[256];
    status.describe(reason, sizeof(reason));
    ARM_RUNTIME_LOG(Error, "the payload of %zu bytes is malformed: %s; export the program again", size, reason);
    return Error::InvalidProgram;
  }
  if (payload->kind != StreamKind::kCop2 || !payload->separate_io || payload->product != 85) {
    ARM_RUNTIME_LOG(Error,
                    "compiled for an Ethos-U%" PRIu32 " with stream COP%" PRIu32
                    "%s, not for an Ethos-U85 in Direct Drive; export with an ETHOSU_U85 recipe and "
                    "direct_drive=True",
                    payload->product, static_cast<uint32_t>(payload->kind),
                    payload->separate_io ? "" : " and inputs and outputs in the scratch region");
    return Error::DelegateInvalidCompatibility;
  }
  return Error::Ok;
}

Error assign_slots(const PayloadTensors& tensors, IoRegion* side) {
  if (side->region == Region::kOutput && tensors.count() == 0) {
    ARM_RUNTIME_LOG(Error, "the payload has no outputs; export the program again");
    return Error::InvalidProgram;
  }
  for (uint32_t index = 0; index < tensors.count(); ++index) {
    const PayloadTensor tensor = tensors.at(index);
    const bool is_output = side->region == Region::kOutput;
    if ((tensor.is_allocated() && !tensor.is_in(side->region)) || (!tensor.is_allocated() && is_output)) {
      ARM_RUNTIME_LOG(Error,
                      "%s %" PRIu32 " is at offset %" PRId32 " of region %" PRId32 ", not in region %" PRId32
                      "; export the program again",
                      side->name, index, tensor.offset, tensor.region, static_cast<int32_t>(side->region));
      return Error::InvalidProgram;
    }
    const auto offset = static_cast<size_t>(std::max(tensor.offset, 0));
    // read_payload() limits the offset to 2 GiB and the size to 4 GiB.
    const auto nbytes = static_cast<size_t>(tensor.nbytes);
    side->slots.push_back({offset, nbytes, static_cast<size_t>(tensor.element_size), tensor.is_allocated()});
    if (tensor.is_allocated()) {
      side->size = std::max(side->size, offset + nbytes);
    }
  }
  if (side->slots.size() != 1 || side->slots[0].size != side->size) {
    side->bytes.resize(side->size);
  }
  return Error::Ok;
}

// Checks that the device is an NPU in Direct Drive, with the number of MACs for which the payload was compiled. The
// kernel driver also refuses a stream for another configuration, but reports only EINVAL.
Error check_device(const Options& options, const EthosU::Device& device, const EthosUPayload& payload) {
  const auto configuration = device.capabilities().hwCfg;
  if (configuration.type != EthosU::HardwareConfiguration::DeviceType::DIRECT) {
    ARM_RUNTIME_LOG(Error, "%s is not an NPU in Direct Drive; choose another with %s", options.device.c_str(),
                    kDeviceVariable);
    return Error::NotSupported;
  }
  if (configuration.macsPerClockCycle != payload.log2_macs) {
    ARM_RUNTIME_LOG(Error, "compiled for %u MACs per cycle, but %s has %u; export with macs=%u",
                    1U << payload.log2_macs, options.device.c_str(), 1U << (configuration.macsPerClockCycle & 15U),
                    1U << (configuration.macsPerClockCycle & 15U));
    return Error::DelegateInvalidCompatibility;
  }
  return Error::Ok;
}

// Creates the objects that all executions share.
Error prepare(const BackendInitContext& context, const FreeableBuffer& processed, ArrayRef<CompileSpec> specs,
              Delegate* delegate) {
  const ExternalKeys keys = read_external_keys(processed.data(), processed.size());
  const auto commands = find_external_block(ARM_RUNTIME_BACKEND_ID, kExternalCommands, context, specs, keys.commands);
  const auto weights = find_external_block(ARM_RUNTIME_BACKEND_ID, kExternalWeights, context, specs, keys.weights);
  if (!commands.ok() || !weights.ok()) {
    return commands.ok() ? weights.error() : commands.error();
  }
  EthosUPayload payload;
  Error error = read_payload(processed.data(), processed.size(), {view_of(*commands), view_of(*weights)}, &payload);
  if (error == Error::Ok) {
    error = assign_slots(payload.inputs, &delegate->inputs);
  }
  if (error == Error::Ok) {
    error = assign_slots(payload.outputs, &delegate->outputs);
  }
  if (error != Error::Ok) {
    return error;
  }
  delegate->device.reset(new EthosU::Device(delegate->options.device.c_str()));
  EthosU::Device& device = *delegate->device;
  error = check_device(delegate->options, device, payload);
  if (error != Error::Ok) {
    return error;
  }
  // The driver copies the stream.
  delegate->network.reset(new EthosU::Network(device, payload.commands.data, payload.commands.size), NoThrowDelete());
  delegate->constants = make_buffer(device, payload.weights.size);
  if (payload.weights.size > 0) {
    write_buffer(*delegate->constants, payload.weights.data, payload.weights.size);
  }
  delegate->intermediate = make_buffer(device, payload.scratch_size);
  for (IoRegion* side : {&delegate->inputs, &delegate->outputs}) {
    if (side->size > 0) {
      side->buffers.push_back(make_buffer(device, side->size));
    }
  }
  return Error::Ok;
}

// Waits for the end of an inference. Returns true on timeout. If a signal interrupts the library's ppoll(), the library
// throws an exception. Then, the wait continues for the remaining time.
bool wait_for(const EthosU::Inference& inference, int64_t timeout_ns) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t left = timeout_ns; left > 0;) {
    errno = 0;
    try {
      return inference.wait(left);
    } catch (const EthosU::Exception&) {
      if (errno != EINTR) {
        throw;
      }
    }
    const auto passed = std::chrono::steady_clock::now() - start;
    left = timeout_ns - std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }
  return true;
}

Error check_argument(const EValue& argument, const IoRegion& side, size_t index) {
  if (!argument.isTensor()) {
    ARM_RUNTIME_LOG(Error, "%s %zu is not a tensor", side.name, index);
    return Error::InvalidArgument;
  }
  const auto& tensor = argument.toTensor();
  const TensorSlot& slot = side.slots[index];
  if (!executorch::runtime::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) ||
      static_cast<size_t>(tensor.element_size()) != slot.element_size || tensor.nbytes() != slot.size) {
    ARM_RUNTIME_LOG(Error, "%s %zu has %zu bytes of %s; compiled for %zu bytes of integers of %zu bytes", side.name,
                    index, tensor.nbytes(), executorch::runtime::toString(tensor.scalar_type()), slot.size,
                    slot.element_size);
    return Error::InvalidArgument;
  }
  return Error::Ok;
}

Error check_arguments(const Delegate& delegate, Span<EValue*> args) {
  const size_t inputs = delegate.inputs.slots.size();
  const size_t outputs = delegate.outputs.slots.size();
  if (args.size() != inputs + outputs) {
    ARM_RUNTIME_LOG(Error, "%zu arguments; compiled for %zu inputs and %zu outputs", args.size(), inputs, outputs);
    return Error::InvalidArgument;
  }
  for (size_t index = 0; index < args.size(); ++index) {
    const Error error = index < inputs ? check_argument(*args[index], delegate.inputs, index)
                                       : check_argument(*args[index], delegate.outputs, index - inputs);
    if (error != Error::Ok) {
      return error;
    }
  }
  return Error::Ok;
}

void write_inputs(IoRegion& side, EValue** args) {
  if (side.buffers.empty()) {
    return;
  }
  if (side.bytes.empty()) {
    write_buffer(*side.buffers[0], args[0]->toTensor().const_data_ptr(), side.size);
    return;
  }
  for (size_t index = 0; index < side.slots.size(); ++index) {
    const TensorSlot& slot = side.slots[index];
    if (slot.allocated) {
      std::memcpy(side.bytes.data() + slot.offset, args[index]->toTensor().const_data_ptr(), slot.size);
    }
  }
  write_buffer(*side.buffers[0], side.bytes.data(), side.size);
}

void read_outputs(IoRegion& side, EValue** args) {
  if (side.bytes.empty()) {
    read_buffer(*side.buffers[0], args[0]->toTensor().mutable_data_ptr(), side.size);
    return;
  }
  read_buffer(*side.buffers[0], side.bytes.data(), side.size);
  for (size_t index = 0; index < side.slots.size(); ++index) {
    const TensorSlot& slot = side.slots[index];
    std::memcpy(args[index]->toTensor().mutable_data_ptr(), side.bytes.data() + slot.offset, slot.size);
  }
}

const char* to_text(EthosU::InferenceStatus status) {
  switch (status) {
    case EthosU::InferenceStatus::OK:
      return "ok";
    case EthosU::InferenceStatus::ERROR:
      return "error: the NPU stopped with a fault";
    case EthosU::InferenceStatus::RUNNING:
      return "running";
    case EthosU::InferenceStatus::REJECTED:
      return "rejected by the driver";
    case EthosU::InferenceStatus::ABORTED:
      return "aborted";
    case EthosU::InferenceStatus::ABORTING:
      return "aborting";
    case EthosU::InferenceStatus::PENDING:
      return "pending";
  }
  return "unknown";
}

// Reports the counters to the tracer. The cycles are also logged if a compile spec asks for them.
void report_counters(const EthosU::Inference& inference, const Options& options, bool counts_cycles,
                     TraceScope* scope) {
  if (counts_cycles) {
    const uint64_t cycles = inference.getCycleCounter();
    scope->add("npu_cycles", cycles);
    if (options.counts_cycles.has_value()) {
      ARM_RUNTIME_LOG(Info, "%" PRIu64 " cycles of the NPU", cycles);
    }
  }
  const auto counters = inference.getPmuCounters();
  for (size_t index = 0; index < std::min(counters.size(), options.events.size()); ++index) {
    if (options.events[index] != 0) {
      scope->add(("pmu_event" + std::to_string(index)).c_str(), counters[index]);
    }
  }
}

// Runs an inference. The constructor of an Inference object starts the inference. The object cannot be reused.
Error run(Delegate& delegate, EventTracer* tracer) {
  TraceScope scope(tracer, "EthosUBackend npu");
  const bool counts_cycles = delegate.options.counts_cycles.value_or(is_tracing(tracer));
  const std::unique_ptr<EthosU::Inference, NoThrowDelete> inference(
      new EthosU::Inference(delegate.network, delegate.inputs.buffers.begin(), delegate.inputs.buffers.end(),
                            delegate.outputs.buffers.begin(), delegate.outputs.buffers.end(), delegate.intermediate,
                            delegate.constants, delegate.options.events, counts_cycles));
  if (wait_for(*inference, delegate.options.timeout_ns)) {
    // Destroying the inference removes it from the driver's queue. If the inference is running, the NPU is reset.
    ARM_RUNTIME_LOG(Error,
                    "no result from %s after %" PRId64 " ms, waiting for the NPU included; set a longer time with %s",
                    delegate.options.device.c_str(), delegate.options.timeout_ns / 1'000'000, kTimeoutVariable);
    return Error::InvalidState;
  }
  const EthosU::InferenceStatus status = inference->status();
  if (status != EthosU::InferenceStatus::OK) {
    ARM_RUNTIME_LOG(Error, "the inference on %s ended with status %s; the kernel log (dmesg) has the driver's reason",
                    delegate.options.device.c_str(), to_text(status));
    return Error::Internal;
  }
  report_counters(*inference, delegate.options, counts_cycles, &scope);
  return Error::Ok;
}

class EthosULinuxBackend final : public BackendInterface {
 public:
  bool is_available() const override { return true; }

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> specs) const override {
    const TraceScope scope(context.event_tracer(), "EthosUBackend load");
    Error error = verify_payload_checksum(ARM_RUNTIME_BACKEND_ID, processed->data(), processed->size(), specs);
    if (error != Error::Ok) {
      return error;
    }
    DelegateHandle* handle = nullptr;
    Options options;
    error = catch_exceptions("loading a program", options, [&] {
      Error prepared = read_options(specs, &options);
      auto delegate = std::make_unique<Delegate>();
      delegate->options = options;
      if (prepared == Error::Ok) {
        prepared = prepare(context, *processed, specs, delegate.get());
      }
      if (prepared == Error::Ok) {
        handle = delegate.release();
      }
      return prepared;
    });
    if (error != Error::Ok) {
      return error;
    }
    // The driver has copies of the stream and the weights.
    processed->Free();
    return handle;
  }

  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override {
    const TraceScope scope(context.event_tracer(), "EthosUBackend execute");
    Delegate& delegate = *static_cast<Delegate*>(handle);
    return catch_exceptions("an inference", delegate.options, [&] {
      Error error = check_arguments(delegate, args);
      if (error != Error::Ok) {
        return error;
      }
      write_inputs(delegate.inputs, args.data());
      error = run(delegate, context.event_tracer());
      if (error == Error::Ok) {
        read_outputs(delegate.outputs, args.data() + delegate.inputs.slots.size());
      }
      return error;
    });
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<Delegate*>(handle); }
};

EthosULinuxBackend backend;

}  // namespace
}  // namespace arm_runtime

// Linkers keep this file if the option --undefined refers to this name.
extern "C" const executorch::runtime::Error arm_runtime_ethosu_linux_registered =
    executorch::runtime::register_backend({ARM_RUNTIME_BACKEND_ID, &arm_runtime::backend});
