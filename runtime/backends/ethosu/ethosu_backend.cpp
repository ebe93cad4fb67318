// SPDX-License-Identifier: Apache-2.0
#include "backends/ethosu/ethosu_backend.h"

#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "backends/ethosu/npu_driver.h"
#include "common/checksum.h"
#include "common/compile_specs.h"
#include "common/executorch.h"
#include "common/log.h"
#include "common/trace.h"
#include "payload/ethosu_payload.h"
#include "payload/external_blocks.h"

extern "C" {
__attribute__((weak)) void EthosUBackend_execute_begin(void) {}
__attribute__((weak)) void EthosUBackend_execute_end(void) {}
}

#define ARM_RUNTIME_BACKEND_ID "EthosUBackend"

namespace arm_runtime {
namespace {

// Compile spec with the size of the fast scratch: 4 bytes, little endian.
constexpr char kFastScratchSpec[] = "fast_scratch_size";
// Compile spec of a delegate whose scratch is in planned memory. The value is the index of an argument whose memory
// is in the scratch. The scratch starts at the argument's address minus the offset of the payload's tensor for it.
constexpr char kPlannedScratchSpec[] = "planned_scratch_argument";
constexpr uint32_t kNotPlanned = UINT32_MAX;

// State of a loaded delegate. The runtime's allocator owns its memory.
struct Delegate {
  EthosUPayload payload;
  FastScratchSize fast_scratch;
  uint32_t scratch_argument;  // index of an argument that is in the scratch in planned memory, or kNotPlanned
  FreeableBuffer weights;     // external weights; empty if the payload contains the weights
  FreeableBuffer* commands;   // external commands, allocated like this object; null if the payload contains them
};
static_assert(sizeof(Delegate) == EthosUBackend::kMethodAllocatorBytes && alignof(Delegate) == 8);

class ExecuteHooks {
 public:
  ExecuteHooks() { EthosUBackend_execute_begin(); }
  ~ExecuteHooks() { EthosUBackend_execute_end(); }
  ExecuteHooks(const ExecuteHooks&) = delete;
  ExecuteHooks& operator=(const ExecuteHooks&) = delete;
};

// Checks that this backend can execute a valid payload. The regions of inputs and outputs need no check: the inputs and
// outputs of COP1 streams are in the scratch.
Error check_executable(const EthosUPayload& payload) {
  if (!payload.aligned) {
    ARM_RUNTIME_LOG(
        Error,
        "the payload or its external data does not start at a multiple of %lu bytes: align the buffers that "
        "hold the program and its .ptd, and serialize the program with at least that delegate alignment",
        static_cast<PrintfUnsigned>(kNpuAlignment));
    return Error::InvalidProgram;
  }
  // The driver takes the size as an int.
  if (payload.kind != StreamKind::kCop1 || payload.commands.size > static_cast<size_t>(INT_MAX)) {
    ARM_RUNTIME_LOG(Error,
                    "a command stream of format COP%lu with %lu bytes; ethos-u-core-driver takes COP1 "
                    "below 2 GiB: export without direct_drive=True (Vela's --cop-format=COP2)",
                    static_cast<PrintfUnsigned>(payload.kind), static_cast<PrintfUnsigned>(payload.commands.size));
    return Error::DelegateInvalidCompatibility;
  }
  for (uint32_t i = 0; i < payload.outputs.count(); ++i) {
    if (!payload.outputs.at(i).is_allocated()) {
      ARM_RUNTIME_LOG(Error, "output %lu of the payload has no place in memory: no command computes it",
                      static_cast<PrintfUnsigned>(i));
      return Error::InvalidProgram;
    }
  }
  return Error::Ok;
}

// Reads a payload that this backend can execute.
Error read_payload(const void* data, size_t size, const ExternalData& external, EthosUPayload* payload) {
  const PayloadStatus status = read_ethosu_payload(data, size, payload, external);
  if (!status.ok()) {
    char reason[192];
    status.describe(reason, sizeof(reason));
    ARM_RUNTIME_LOG(Error, "the payload is not valid: %s", reason);
    return Error::InvalidProgram;
  }
  return check_executable(*payload);
}

// Checks that an argument matches the tensor in the payload. Only element size and number of bytes are compared,
// because the export fixes the order of dimensions, and the NPU treats int8 and bool alike.
Error check_argument(const EValue* value, const PayloadTensor& expected, const char* side, uint32_t index) {
  if (value == nullptr || !value->isTensor()) {
    ARM_RUNTIME_LOG(Error, "%s %lu is not a tensor", side, static_cast<PrintfUnsigned>(index));
    return Error::InvalidArgument;
  }
  const Tensor& tensor = value->toTensor();
  if (static_cast<uint64_t>(tensor.element_size()) != static_cast<uint64_t>(expected.element_size) ||
      tensor.nbytes() != expected.nbytes) {
    ARM_RUNTIME_LOG(Error,
                    "%s %lu has %lu bytes in elements of %lu, the program was compiled for %lu in "
                    "elements of %lu: pass the type and shape that it was exported with",
                    side, static_cast<PrintfUnsigned>(index), static_cast<PrintfUnsigned>(tensor.nbytes()),
                    static_cast<PrintfUnsigned>(tensor.element_size()), static_cast<PrintfUnsigned>(expected.nbytes),
                    static_cast<PrintfUnsigned>(expected.element_size));
    return Error::InvalidArgument;
  }
  if (tensor.const_data_ptr() == nullptr) {
    ARM_RUNTIME_LOG(Error, "%s %lu has no memory: set its data before execution", side,
                    static_cast<PrintfUnsigned>(index));
    return Error::InvalidArgument;
  }
  return Error::Ok;
}

// Returns the payload's tensor for an argument. Arguments are the inputs, then the outputs.
PayloadTensor tensor_of(const EthosUPayload& payload, uint32_t argument) {
  const uint32_t inputs = payload.inputs.count();
  return argument < inputs ? payload.inputs.at(argument) : payload.outputs.at(argument - inputs);
}

Error check_arguments(const EthosUPayload& payload, Span<EValue*> args) {
  const uint32_t inputs = payload.inputs.count();
  const uint32_t outputs = payload.outputs.count();
  if (args.size() != size_t{inputs} + outputs) {
    ARM_RUNTIME_LOG(Error, "%lu arguments for a payload with %lu inputs and %lu outputs",
                    static_cast<PrintfUnsigned>(args.size()), static_cast<PrintfUnsigned>(inputs),
                    static_cast<PrintfUnsigned>(outputs));
    return Error::InvalidArgument;
  }
  for (uint32_t i = 0; i < inputs + outputs; ++i) {
    const bool input = i < inputs;
    const uint32_t index = input ? i : i - inputs;
    const Error error = check_argument(args[i], tensor_of(payload, i), input ? "input" : "output", index);
    if (error != Error::Ok) {
      return error;
    }
  }
  return Error::Ok;
}

// Allocates whole cache lines, because the driver invalidates whole cache lines.
Result<uint8_t*> allocate_scratch(BackendExecutionContext& context, uint32_t scratch_size) {
  const size_t size = round_up_to_cache_lines(scratch_size);
  MemoryAllocator* allocator = context.get_temp_allocator();
  void* scratch = allocator == nullptr ? nullptr : allocator->allocate(size, kCacheLine);
  if (scratch == nullptr) {
    ARM_RUNTIME_LOG(Error,
                    "cannot allocate %lu bytes of scratch from the temp allocator, which has %lu: "
                    "give the method's MemoryManager a larger one",
                    static_cast<PrintfUnsigned>(size),
                    static_cast<PrintfUnsigned>(allocator == nullptr ? 0 : allocator->size()));
    return Error::MemoryAllocationFailed;
  }
  return static_cast<uint8_t*>(scratch);
}

// Computes the start of the scratch in planned memory from the address of the argument in it. The application allocates
// planned memory, so the alignment may be wrong.
Result<uint8_t*> find_planned_scratch(const Delegate& delegate, Span<EValue*> args) {
  const PayloadTensor tensor = tensor_of(delegate.payload, delegate.scratch_argument);
  // Inputs are constant for kernels, but the NPU may overwrite the memory of an input that is no longer needed.
  auto* data = static_cast<uint8_t*>(const_cast<void*>(args[delegate.scratch_argument]->toTensor().const_data_ptr()));
  uint8_t* scratch = data - tensor.offset;
  if (reinterpret_cast<uintptr_t>(scratch) % kCacheLine != 0) {
    ARM_RUNTIME_LOG(Error,
                    "the scratch in planned memory does not start at a multiple of %lu bytes: align the planned memory "
                    "to that, and do not set data pointers of inputs or outputs that the memory plan places",
                    static_cast<PrintfUnsigned>(kCacheLine));
    return Error::InvalidArgument;
  }
  return scratch;
}

// Copies a tensor, unless source and target have the same address. Returns the number of bytes copied.
uint64_t copy_tensor(void* target, const void* source, uint64_t nbytes) {
  if (target == source) {
    return 0;
  }
  std::memcpy(target, source, static_cast<size_t>(nbytes));
  return nbytes;
}

// Runs the commands. Reports the NPU's cycles in a traced event and to arm_runtime_npu_measured(), if firmware defines
// it.
Error run_and_measure(const Delegate& delegate, uint8_t* scratch, EventTracer* tracer) {
  constexpr uint64_t kNotCounted = UINT64_MAX;
  TraceScope scope(tracer, "EthosUBackend npu");
  uint64_t cycles = kNotCounted;
  const bool counts = is_tracing(tracer) || arm_runtime_npu_measured != nullptr;
  const Error error = run_on_npu(delegate.payload, delegate.fast_scratch, scratch, counts ? &cycles : nullptr);
  if (cycles != kNotCounted) {
    scope.add("npu_cycles", cycles);
    if (arm_runtime_npu_measured != nullptr) {
      arm_runtime_npu_measured(cycles);
    }
  }
  return error;
}

// Reads the size of the fast scratch from the compile specs and checks that it is available.
Error read_fast_scratch(const EthosUPayload& payload, ArrayRef<CompileSpec> specs, FastScratchSize* fast_scratch) {
  CompileSpecNumber size;
  const Error error = read_spec_number(ARM_RUNTIME_BACKEND_ID, specs, kFastScratchSpec, &size);
  if (error != Error::Ok) {
    return error;
  }
  *fast_scratch = {size.found, size.value};
  return check_fast_scratch(payload, *fast_scratch);
}

// Reads the index of the argument from whose address find_planned_scratch() computes the start of the scratch.
Error read_planned_scratch(const EthosUPayload& payload, ArrayRef<CompileSpec> specs, uint32_t* argument) {
  CompileSpecNumber number;
  const Error error = read_spec_number(ARM_RUNTIME_BACKEND_ID, specs, kPlannedScratchSpec, &number);
  if (error != Error::Ok) {
    return error;
  }
  *argument = number.found ? number.value : kNotPlanned;
  if (*argument == kNotPlanned) {
    return Error::Ok;
  }
  const uint64_t count = uint64_t{payload.inputs.count()} + payload.outputs.count();
  if (*argument >= count || !tensor_of(payload, *argument).is_allocated()) {
    ARM_RUNTIME_LOG(Error, "compile spec %s: argument %lu is not in the scratch: export or flash the program again",
                    kPlannedScratchSpec, static_cast<PrintfUnsigned>(*argument));
    return Error::InvalidProgram;
  }
  return Error::Ok;
}

}  // namespace

Result<DelegateHandle*> EthosUBackend::init(BackendInitContext& context, FreeableBuffer* processed,
                                            ArrayRef<CompileSpec> compile_specs) const {
  const TraceScope scope(context.event_tracer(), "EthosUBackend load");
  const Result<const void*> data = processed->data_safe();
  if (!data.ok()) {
    return data.error();
  }
  Error error = verify_payload_checksum(ARM_RUNTIME_BACKEND_ID, *data, processed->size(), compile_specs);
  if (error != Error::Ok) {
    return error;
  }
  const ExternalKeys keys = read_external_keys(*data, processed->size());
  auto commands = find_external_block(ARM_RUNTIME_BACKEND_ID, kExternalCommands, context, compile_specs, keys.commands);
  auto weights = find_external_block(ARM_RUNTIME_BACKEND_ID, kExternalWeights, context, compile_specs, keys.weights);
  if (!commands.ok() || !weights.ok()) {
    return commands.ok() ? weights.error() : commands.error();
  }
  EthosUPayload payload;
  error = read_payload(*data, processed->size(), {view_of(*commands), view_of(*weights)}, &payload);
  FastScratchSize fast_scratch;
  uint32_t scratch_argument = kNotPlanned;
  if (error == Error::Ok) {
    error = read_fast_scratch(payload, compile_specs, &fast_scratch);
  }
  if (error == Error::Ok) {
    error = read_planned_scratch(payload, compile_specs, &scratch_argument);
  }
  if (error != Error::Ok) {
    return error;
  }
  // The driver does not clean the data cache for the commands, and some versions of the driver do not clean it for the
  // weights. Without the calls below, the NPU would not see data that a loader has just copied into cached memory.
  clean_cache(*data, processed->size());
  for (const FreeableBuffer* buffer : {&*commands, &*weights}) {
    if (buffer->size() > 0) {
      clean_cache(buffer->data(), buffer->size());
    }
  }
  MemoryAllocator* allocator = context.get_runtime_allocator();
  Delegate* delegate = allocator->allocateInstance<Delegate>();
  FreeableBuffer* kept_commands = commands->size() > 0 ? allocator->allocateInstance<FreeableBuffer>() : nullptr;
  if (delegate == nullptr || (kept_commands == nullptr && commands->size() > 0)) {
    ARM_RUNTIME_LOG(
        Error, "cannot allocate %lu bytes for the state of the delegate from the method allocator",
        static_cast<PrintfUnsigned>(sizeof(Delegate) + (commands->size() > 0 ? sizeof(FreeableBuffer) : 0)));
    return Error::MemoryAllocationFailed;
  }
  if (kept_commands != nullptr) {
    new (kept_commands) FreeableBuffer(std::move(*commands));
  }
  return new (delegate) Delegate{payload, fast_scratch, scratch_argument, std::move(*weights), kept_commands};
}

void EthosUBackend::destroy(DelegateHandle* handle) const {
  if (handle != nullptr) {
    auto* delegate = static_cast<Delegate*>(handle);
    if (delegate->commands != nullptr) {
      delegate->commands->~FreeableBuffer();
    }
    delegate->~Delegate();
  }
}

Error EthosUBackend::execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const {
  const ExecuteHooks hooks;
  TraceScope scope(context.event_tracer(), "EthosUBackend execute");
  const Delegate& delegate = *static_cast<const Delegate*>(handle);
  const EthosUPayload& payload = delegate.payload;
  Error error = check_arguments(payload, args);
  if (error != Error::Ok) {
    return error;
  }
  const Result<uint8_t*> scratch = delegate.scratch_argument == kNotPlanned
                                       ? allocate_scratch(context, payload.scratch_size)
                                       : find_planned_scratch(delegate, args);
  if (!scratch.ok()) {
    return scratch.error();
  }
  uint64_t copied = 0;
  const uint32_t inputs = payload.inputs.count();
  for (uint32_t i = 0; i < inputs; ++i) {
    const PayloadTensor input = payload.inputs.at(i);
    if (input.is_allocated()) {
      copied += copy_tensor(*scratch + input.offset, args[i]->toTensor().const_data_ptr(), input.nbytes);
    }
  }
  error = run_and_measure(delegate, *scratch, context.event_tracer());
  if (error != Error::Ok) {
    return error;
  }
  for (uint32_t i = 0; i < payload.outputs.count(); ++i) {
    const PayloadTensor output = payload.outputs.at(i);
    copied += copy_tensor(args[inputs + i]->toTensor().mutable_data_ptr(), *scratch + output.offset, output.nbytes);
  }
  scope.add("copied_bytes", copied);
  return Error::Ok;
}

namespace {

EthosUBackend backend;

}  // namespace
}  // namespace arm_runtime

// Linkers keep this file if the option --undefined refers to this name.
extern "C" const executorch::runtime::Error arm_runtime_ethosu_registered =
    executorch::runtime::register_backend({ARM_RUNTIME_BACKEND_ID, &arm_runtime::backend});
