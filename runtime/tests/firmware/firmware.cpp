// SPDX-License-Identifier: Apache-2.0
//
// Firmware that interprets a test script: a method as a text file. It uses ExecuTorch's registries of backends and
// kernels. The script replaces a .pte, because the Python package does not contain the runtime's program loader. The
// script is the file "method" in the working directory of QEMU, one entry per line. Values are numbered from 0 in the
// order of their creation:
//
//   npu PRODUCT LOG2_MACS                              the NPU of the device, as in fake_driver.h
//   tensor DTYPE RANK SIZES... DIM_ORDER...            a value; DTYPE is a number of executorch::aten::ScalarType
//   double NUMBER, int NUMBER                          a value
//   delegate BACKEND FILE COUNT {KEY NUMBER}...        loads a payload, with compile specs of 4 bytes
//   input VALUE FILE, output VALUE FILE                reads, writes a tensor's bytes
//   kernel NAME COUNT VALUES...                        calls a kernel
//   call DELEGATE COUNT VALUES...                      executes a delegate
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <malloc.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "backends/ethosu/ethosu_backend.h"
#include "backends/ethosu/npu_driver.h"
#include "common/executorch.h"
#include "emulated_npu.h"
#include "test_script.h"
#include "tests/ethosu/fake_driver.h"
#include "tests/recording_tracer.h"

namespace {

using namespace arm_runtime;
using executorch::runtime::KernelRuntimeContext;

constexpr size_t kFastScratch = 128 * 1024;
alignas(kCacheLine) __attribute__((section(".npu"))) unsigned char fast_scratch[kFastScratch];

RecordingTracer tracer;

// The bytes of a file, at a multiple of 16 for the NPU.
struct Bytes {
  explicit Bytes(const std::string& name) {
    std::FILE* file = open(name, "rb");
    std::fseek(file, 0, SEEK_END);
    size = static_cast<size_t>(std::ftell(file));
    std::fseek(file, 0, SEEK_SET);
    data = static_cast<uint8_t*>(memalign(kNpuAlignment, size));
    if (data == nullptr || std::fread(data, 1, size, file) != size) {
      fail("cannot read", name, static_cast<int>(size));
    }
    std::fclose(file);
  }

  uint8_t* data;
  size_t size;
};

// A loaded delegate. Its temp allocator has the size that runtime/README.md requires: the scratch in whole cache lines,
// plus 31 bytes because the memory is not aligned.
class Delegate {
 public:
  explicit Delegate(TestScript* script) : name_(script->word()), payload_(script->word()) {
    backend_ = executorch::runtime::get_backend_class(name_.c_str());
    if (backend_ == nullptr || !backend_->is_available()) {
      fail("no backend", name_);
    }
    read_specs(script);
    EthosUPayload content;
    read_ethosu_payload(payload_.data, payload_.size, &content);
    temp_.resize(round_up_to_cache_lines(content.scratch_size) + kCacheLine - 1);
    MemoryAllocator allocator(sizeof(method_), method_);
    BackendInitContext context(&allocator, &tracer);
    FreeableBuffer processed(payload_.data, payload_.size, nullptr);
    const auto handle = backend_->init(context, &processed, {specs_.data(), specs_.size()});
    if (!handle.ok()) {
      fail("cannot load", name_, static_cast<int>(handle.error()));
    }
    handle_ = *handle;
  }
  Delegate(const Delegate&) = delete;

  void execute(std::vector<EValue*> arguments) {
    MemoryAllocator allocator(static_cast<uint32_t>(temp_.size()), temp_.data());
    BackendExecutionContext context(&tracer, &allocator);
    const Error error = backend_->execute(context, handle_, {arguments.data(), arguments.size()});
    if (error != Error::Ok) {
      fail("cannot execute", name_, static_cast<int>(error));
    }
  }

 private:
  void read_specs(TestScript* script) {
    const auto count = static_cast<size_t>(script->number());
    keys_.reserve(count);
    numbers_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      keys_.push_back(script->word());
      numbers_.push_back(static_cast<uint32_t>(script->number()));
      specs_.push_back({keys_[i].c_str(), {&numbers_[i], sizeof(uint32_t)}});
    }
  }

  std::string name_;
  Bytes payload_;
  BackendInterface* backend_;
  std::vector<std::string> keys_;
  std::vector<uint32_t> numbers_;
  std::vector<CompileSpec> specs_;
  std::vector<uint8_t> temp_;
  uint8_t method_[256];
  DelegateHandle* handle_ = nullptr;
};

// Executes the entries of the test script, in order.
class ScriptInterpreter {
 public:
  explicit ScriptInterpreter(TestScript* script) : script_(*script) {}

  void run() {
    for (std::string entry; script_.next(&entry);) {
      if (entry == "npu") {
        const auto product = static_cast<uint32_t>(script_.number());
        init_npu(product, static_cast<uint32_t>(script_.number()));
      } else if (entry == "tensor") {
        tensors_.push_back(std::make_unique<OwnTensor>(&script_));
        tensors_.back()->allocate();
        values_.push_back(std::make_unique<EValue>(tensors_.back()->tensor()));
      } else if (entry == "double") {
        values_.push_back(std::make_unique<EValue>(script_.real()));
      } else if (entry == "int") {
        values_.push_back(std::make_unique<EValue>(script_.number()));
      } else if (entry == "delegate") {
        delegates_.push_back(std::make_unique<Delegate>(&script_));
      } else if (entry == "input" || entry == "output") {
        transfer(entry == "input");
      } else if (entry == "kernel") {
        call_kernel(script_.word());
      } else if (entry == "call") {
        Delegate& delegate = *delegates_.at(static_cast<size_t>(script_.number()));
        delegate.execute(arguments());
      } else {
        fail("unknown entry", entry);
      }
    }
  }

 private:
  void transfer(bool in) {
    const Tensor tensor = values_.at(static_cast<size_t>(script_.number()))->toTensor();
    const std::string name = script_.word();
    std::FILE* file = open(name, in ? "rb" : "wb");
    void* data = tensor.mutable_data_ptr();
    const size_t done = in ? std::fread(data, 1, tensor.nbytes(), file) : std::fwrite(data, 1, tensor.nbytes(), file);
    if (std::fclose(file) != 0 || done != tensor.nbytes()) {
      fail("not all bytes of", name, static_cast<int>(done));
    }
  }

  std::vector<EValue*> arguments() {
    std::vector<EValue*> all;
    for (const auto number : script_.numbers<size_t>(static_cast<size_t>(script_.number()))) {
      all.push_back(values_.at(number).get());
    }
    return all;
  }

  void call_kernel(const std::string& name) {
    const auto kernel = executorch::runtime::get_op_function_from_registry(name.c_str());
    if (!kernel.ok()) {
      fail("no kernel", name);
    }
    KernelRuntimeContext context(&tracer);
    std::vector<EValue*> stack = arguments();
    (*kernel)(context, {stack.data(), stack.size()});
    if (context.failure_state() != Error::Ok) {
      fail("failed:", name, static_cast<int>(context.failure_state()));
    }
  }

  TestScript& script_;
  std::vector<std::unique_ptr<OwnTensor>> tensors_;
  std::vector<std::unique_ptr<EValue>> values_;
  std::vector<std::unique_ptr<Delegate>> delegates_;
};

}  // namespace

extern "C" {
// These override the weak definitions of the backend.
unsigned char* ethosu_fast_scratch = fast_scratch;
size_t ethosu_fast_scratch_size = kFastScratch;

// The startup code calls this function. Its name is not main, because C++ forbids calls of main().
int run_firmware() {
  TestScript script;
  ScriptInterpreter(&script).run();
  for (const std::string& event : tracer.events) {
    std::printf("%s\n", event.c_str());
  }
  if (!fake_driver.violations.empty()) {
    fail("the driver's contract is broken:", fake_driver.violations);
  }
  return 0;
}

}  // extern "C"
