// SPDX-License-Identifier: Apache-2.0
//
// Replaces ExecuTorch's loader and executor, whose sources are not in the Python package: the functions of Program and
// Method that a firmware's self-test calls. They read the test script of firmware.cpp, with these additional or
// changed entries:
//
//   null, bool NUMBER                      a value
//   ints COUNT VALUES..., tensors COUNT VALUES...        a value: a list of earlier values
//   constant VALUE OFFSET                  the data of the value's tensor is in the program file, at this byte offset
//   place VALUE MEMORY OFFSET              the value's tensor is in this planned memory (numbered from 0)
//   delegate BACKEND OFFSET SIZE COUNT {KEY NUMBER}...   loads a payload from the program, with compile specs
//   input VALUE, output VALUE              the next input or output of the method
//
// Memory plan, temp allocator, registries, backend and kernels are not replaced. From the method allocator, only the
// backend allocates; the allocations of ExecuTorch's runtime are missing.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "test_script.h"

namespace executorch {
namespace runtime {
namespace {

// A call of a kernel or of a delegate. If `kernel` is null, `delegate` is called.
struct Instruction {
  OpFunction kernel;
  size_t delegate;
  std::vector<size_t> arguments;
};

struct LoadedDelegate {
  BackendInterface* backend;
  FreeableBuffer payload;
  DelegateHandle* handle;
};

}  // namespace

// Storage of a list value: pointers to the elements (boxed), and the elements (unboxed). BoxedEvalueList needs both.
template <typename T>
struct OwnList {
  std::vector<EValue*> boxed;
  std::vector<T> unboxed;
  BoxedEvalueList<T> list;

  explicit OwnList(std::vector<EValue*> values)
      : boxed(std::move(values)),
        unboxed(unpack(boxed)),
        list(boxed.data(), unboxed.data(), static_cast<int>(boxed.size())) {}

  static std::vector<T> unpack(const std::vector<EValue*>& values) {
    std::vector<T> all;
    for (const EValue* value : values) {
      all.push_back(value->to<T>());
    }
    return all;
  }
};

// The whole state of a method. ExecuTorch's header of Method declares a class of this name and has a pointer to it.
struct Chain {
  std::vector<std::unique_ptr<OwnTensor>> tensors;
  std::vector<std::unique_ptr<EValue>> values;
  std::vector<std::unique_ptr<LoadedDelegate>> delegates;
  std::vector<Instruction> instructions;
  std::vector<size_t> inputs, outputs;
  std::vector<std::unique_ptr<OwnList<int64_t>>> ints;
  std::vector<std::unique_ptr<OwnList<aten::Tensor>>> lists;

  OwnTensor* tensor_of(size_t value) { return tensors.at(value).get(); }
  void add(std::unique_ptr<OwnTensor> tensor) {
    values.push_back(std::make_unique<EValue>(tensor->tensor()));
    tensors.push_back(std::move(tensor));
  }
  void add(const EValue& value) {
    values.push_back(std::make_unique<EValue>(value));
    tensors.push_back(nullptr);
  }
  std::vector<EValue*> pointers(const std::vector<size_t>& numbers) {
    std::vector<EValue*> all;
    for (const size_t number : numbers) {
      all.push_back(values.at(number).get());
    }
    return all;
  }
};

namespace {

std::vector<size_t> arguments(TestScript* script) {
  return script->numbers<size_t>(static_cast<size_t>(script->number()));
}

Error load_delegate(TestScript* script, DataLoader* loader, MemoryAllocator* allocator, const NamedDataMap* data,
                    Chain* chain) {
  const std::string name = script->word();
  const auto offset = static_cast<size_t>(script->number());
  const auto size = static_cast<size_t>(script->number());
  const auto count = static_cast<size_t>(script->number());
  std::vector<std::string> keys(count);
  std::vector<uint32_t> numbers(count);
  std::vector<CompileSpec> specs;
  for (size_t i = 0; i < count; ++i) {
    keys[i] = script->word();
    numbers[i] = static_cast<uint32_t>(script->number());
    specs.push_back({keys[i].c_str(), {&numbers[i], sizeof(uint32_t)}});
  }
  auto payload = loader->load(offset, size, DataLoader::SegmentInfo(DataLoader::SegmentInfo::Type::Backend, 0));
  BackendInterface* backend = get_backend_class(name.c_str());
  if (!payload.ok() || backend == nullptr) {
    return Error::NotFound;
  }
  chain->delegates.push_back(std::make_unique<LoadedDelegate>(LoadedDelegate{backend, std::move(*payload), nullptr}));
  LoadedDelegate& added = *chain->delegates.back();
  BackendInitContext context(allocator, nullptr, nullptr, data);
  const auto handle = backend->init(context, &added.payload, {specs.data(), specs.size()});
  added.handle = handle.ok() ? *handle : nullptr;
  return handle.ok() ? Error::Ok : handle.error();
}

// Reads the rest of an entry of the test script. The first word is `entry`.
Error read_entry(const std::string& entry, TestScript* script, DataLoader* loader, MemoryManager* memory,
                 const NamedDataMap* data, Chain* chain) {
  if (entry == "tensor") {
    chain->add(std::make_unique<OwnTensor>(script));
  } else if (entry == "double") {
    chain->add(EValue(script->real()));
  } else if (entry == "int") {
    chain->add(EValue(script->number()));
  } else if (entry == "bool") {
    chain->add(EValue(script->number() != 0));
  } else if (entry == "null") {
    chain->add(EValue());
  } else if (entry == "ints") {
    chain->ints.push_back(std::make_unique<OwnList<int64_t>>(chain->pointers(arguments(script))));
    chain->add(EValue(&chain->ints.back()->list));
  } else if (entry == "tensors") {
    chain->lists.push_back(std::make_unique<OwnList<aten::Tensor>>(chain->pointers(arguments(script))));
    chain->add(EValue(&chain->lists.back()->list));
  } else if (entry == "constant") {
    OwnTensor* tensor = chain->tensor_of(static_cast<size_t>(script->number()));
    const auto data = loader->load(static_cast<size_t>(script->number()), tensor->nbytes(),
                                   DataLoader::SegmentInfo(DataLoader::SegmentInfo::Type::Constant, 0));
    if (!data.ok()) {
      return data.error();
    }
    tensor->set_data(const_cast<void*>(data->data()));
  } else if (entry == "place") {
    OwnTensor* tensor = chain->tensor_of(static_cast<size_t>(script->number()));
    const auto which = static_cast<uint32_t>(script->number());
    const auto offset = static_cast<size_t>(script->number());
    const auto place = memory->planned_memory()->get_offset_address(which, offset, tensor->nbytes());
    if (!place.ok()) {
      return place.error();
    }
    tensor->set_data(*place);
  } else if (entry == "delegate") {
    return load_delegate(script, loader, memory->method_allocator(), data, chain);
  } else if (entry == "input" || entry == "output") {
    (entry == "input" ? chain->inputs : chain->outputs).push_back(static_cast<size_t>(script->number()));
  } else if (entry == "kernel") {
    const auto kernel = get_op_function_from_registry(script->word().c_str());
    if (!kernel.ok()) {
      return kernel.error();
    }
    chain->instructions.push_back({*kernel, 0, arguments(script)});
  } else if (entry == "call") {
    const auto delegate = static_cast<size_t>(script->number());
    chain->instructions.push_back({nullptr, delegate, arguments(script)});
  } else {
    return Error::InvalidProgram;
  }
  return Error::Ok;
}

}  // namespace

void runtime_init() {}

Result<Program> Program::load(DataLoader* loader, Verification) {
  const auto head = loader->load(0, 8, DataLoader::SegmentInfo(DataLoader::SegmentInfo::Type::Program));
  if (!head.ok() || std::memcmp(static_cast<const uint8_t*>(head->data()) + 4, "ET12", 4) != 0) {
    return Error::InvalidProgram;
  }
  return Program(loader, 1, FreeableBuffer(), nullptr, FreeableBuffer(), std::nullopt);
}

// The test script does not contain the sizes of planned memories. get_offset_address() checks the place of each tensor.
MethodMeta::MethodMeta(const executorch_flatbuffer::ExecutionPlan* plan) : s_plan_(plan) {}
Result<MethodMeta> Program::method_meta(const char*) const { return MethodMeta(nullptr); }
size_t MethodMeta::num_memory_planned_buffers() const { return 0; }
Result<int64_t> MethodMeta::memory_planned_buffer_size(size_t) const { return Error::NotSupported; }

Result<Method> Program::load_method(const char*, MemoryManager* memory, EventTracer* tracer, const NamedDataMap* data,
                                    const LoadBackendOptionsMap*, Span<const Kernel>) const {
  Method method(this, memory, tracer, memory->temp_allocator());
  method.chains_ = new Chain;
  TestScript script;
  for (std::string entry; script.next(&entry);) {
    const Error error = read_entry(entry, &script, loader_, memory, data, method.chains_);
    if (error != Error::Ok) {
      return error;
    }
  }
  return Result<Method>(std::move(method));
}

Method::~Method() {
  if (chains_ != nullptr) {
    for (const auto& delegate : chains_->delegates) {
      delegate->backend->destroy(delegate->handle);
    }
    delete chains_;
  }
}

Error Method::set_input(const EValue& given, size_t index) {
  const aten::Tensor from = given.toTensor();
  OwnTensor& to = *chains_->tensor_of(chains_->inputs.at(index));
  if (from.nbytes() != to.nbytes()) {
    return Error::InvalidArgument;
  }
  if (to.tensor().const_data_ptr() == nullptr) {
    to.set_data(from.mutable_data_ptr());
  } else {
    std::memcpy(to.tensor().mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  }
  return Error::Ok;
}

Error Method::set_output_data_ptr(void* buffer, size_t size, size_t index) {
  OwnTensor& to = *chains_->tensor_of(chains_->outputs.at(index));
  if (size < to.nbytes()) {
    return Error::InvalidArgument;
  }
  to.set_data(buffer);
  return Error::Ok;
}

const EValue& Method::get_output(size_t index) const { return *chains_->values.at(chains_->outputs.at(index)); }

Error Method::execute() {
  for (const Instruction& instruction : chains_->instructions) {
    std::vector<EValue*> given = chains_->pointers(instruction.arguments);
    Error error = Error::Ok;
    if (instruction.kernel != nullptr) {
      KernelRuntimeContext context(event_tracer_, temp_allocator_);
      instruction.kernel(context, {given.data(), given.size()});
      error = context.failure_state();
    } else {
      const LoadedDelegate& delegate = *chains_->delegates.at(instruction.delegate);
      BackendExecutionContext context(event_tracer_, temp_allocator_);
      error = delegate.backend->execute(context, delegate.handle, {given.data(), given.size()});
    }
    if (error != Error::Ok) {
      return error;
    }
    temp_allocator_->reset();
  }
  return Error::Ok;
}

namespace internal {

// The linker needs these functions, because Program has a member of type PteDataMap.
Result<FreeableBuffer> PteDataMap::get_data(std::string_view) const { return Error::NotFound; }
Result<uint32_t> PteDataMap::get_num_keys() const { return 0; }
Result<const char*> PteDataMap::get_key(uint32_t) const { return Error::NotFound; }

}  // namespace internal
}  // namespace runtime
}  // namespace executorch
