// SPDX-License-Identifier: Apache-2.0
//
// Executes a program in ExecuTorch's runtime on this machine, in memory pools of given sizes, and prints how many bytes
// the program used. Backend, kernels and allocators are the same as in firmware. The emulator replaces the NPU.
//
//   measure_pools FILE
//
// FILE has one path, name or number per line, in the following order. A size of -1 means "as much as needed":
//
//   PROGRAM                                    path of the .pte
//   DATA                                       path of the .ptd, or an empty line
//   FAST_SCRATCH TEMP SHARED_COUNT SHARED...   bytes of the fast scratch and of the temp allocator; the number of
//                                              memories of the memory plan that methods share (the second and later
//                                              ones), and the bytes of each
//   METHODS {NAME POOL PLANNED}...             the number of methods; for each method, its name, and the bytes of the
//                                              method allocator and of the first memory of the memory plan
//   RUNS {METHOD INPUTS FILE... OUTPUTS FILE...}...
//                                              the number of runs;
//                                              for each run, the index of the method (from 0), the number of inputs
//                                              and their files, which are read, and the number of outputs and their
//                                              files, which are written. A file has the bytes of one tensor
//
// It prints "method NAME BYTES" with the used bytes of each method allocator, and "temp BYTES" with the peak of the
// temp allocator. On failure, it prints a line on stderr and returns 1.
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/executor/method_meta.h>
#include <executorch/runtime/platform/runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "backends/ethosu/ethosu_backend.h"
#include "backends/ethosu/npu_driver.h"
#include "firmware/data_file.h"
#include "firmware/model_method.h"

namespace {

using arm_runtime::ModelMethod;
using executorch::runtime::Error;
using executorch::runtime::Program;

// Size of an unlimited pool. The operating system allocates only the pages that are used.
constexpr size_t kUnlimitedPoolSize = size_t{1} << 30;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "pools: %s\n", what.c_str());
  std::exit(1);
}

[[noreturn]] void fail(const std::string& what, Error error) {
  fail(what + ": error " + std::to_string(static_cast<int>(error)) + " of ExecuTorch");
}

// Memory of the given size, or unlimited memory for -1, aligned to a cache line as in firmware.
class Pool {
 public:
  explicit Pool(long long size) : size_(size < 0 ? kUnlimitedPoolSize : static_cast<size_t>(size)) {
    void* data = nullptr;
    if (posix_memalign(&data, arm_runtime::kCacheLine, std::max<size_t>(size_, 1)) != 0) {
      fail("no memory for a pool of " + std::to_string(size_) + " bytes");
    }
    data_.reset(static_cast<uint8_t*>(data));
  }

  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }
  ModelMethod::Bytes bytes() const { return {data(), size()}; }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  size_t size_;
  std::unique_ptr<uint8_t, Free> data_;
};

std::vector<uint8_t> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    fail("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// Reader of FILE.
class Request {
 public:
  explicit Request(const char* path) : file_(path) {}

  std::string read_line() {
    std::string line;
    if (!std::getline(file_, line)) {
      fail("the request ends too early");
    }
    return line;
  }
  long long number() { return std::stoll(read_line()); }
  size_t count() { return static_cast<size_t>(number()); }

 private:
  std::ifstream file_;
};

// A method with its own pools.
struct LoadedMethod {
  std::string name;
  Pool pool, planned;
  std::vector<ModelMethod::Bytes> memories;
  std::vector<std::vector<uint8_t>> inputs, outputs;  // the application's memory
  ModelMethod method;

  LoadedMethod(Request* request, const std::vector<Pool>& shared)
      : name(request->read_line()), pool(request->number()), planned(request->number()), memories{planned.bytes()} {
    for (const Pool& other : shared) {
      memories.push_back(other.bytes());
    }
  }
};

void set_inputs(LoadedMethod* loaded, const Program& program, Request* request) {
  const auto meta = program.method_meta(loaded->name.c_str());
  const size_t count = request->count();
  loaded->inputs.clear();
  for (size_t i = 0; i < count; ++i) {
    const std::vector<uint8_t> bytes = read(request->read_line());
    const auto info = meta->input_tensor_meta(i);
    if (!info.ok() || info->nbytes() != bytes.size()) {
      fail("the file of input " + std::to_string(i) + " has another size than the input");
    }
    const arm_runtime::TensorMetadata metadata = {info->scalar_type(), info->sizes().size(), info->sizes().data(),
                                                  info->dim_order().data()};
    // The caller must keep an input valid during the run if the memory plan does not allocate it.
    loaded->inputs.push_back(bytes);
    const Error error = loaded->method.set_input(i, metadata, loaded->inputs.back().data());
    if (error != Error::Ok) {
      fail("cannot set input " + std::to_string(i), error);
    }
  }
}

// Sets the memory of outputs that the memory plan does not allocate. Only the first call for a method has an effect.
void set_outputs(LoadedMethod* loaded, const Program& program) {
  const auto meta = program.method_meta(loaded->name.c_str());
  for (size_t i = 0; i < meta->num_outputs(); ++i) {
    if (loaded->method.output(i).data() != nullptr) {
      continue;
    }
    loaded->outputs.emplace_back(meta->output_tensor_meta(i)->nbytes());
    std::vector<uint8_t>& output = loaded->outputs.back();
    const Error error = loaded->method.set_output(i, {output.data(), output.size()});
    if (error != Error::Ok) {
      fail("cannot set output " + std::to_string(i), error);
    }
  }
}

void write_outputs(const LoadedMethod& loaded, Request* request) {
  const size_t count = request->count();
  for (size_t i = 0; i < count; ++i) {
    const auto bytes = loaded.method.output(i);
    if (bytes.data() == nullptr) {
      fail("output " + std::to_string(i) + " has no memory");
    }
    std::ofstream file(request->read_line(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) {
      fail("cannot write the file of output " + std::to_string(i));
    }
  }
}

}  // namespace

extern "C" {
unsigned char* ethosu_fast_scratch = nullptr;
size_t ethosu_fast_scratch_size = 0;
}

int main(int count, char** arguments) {
  if (count != 2) {
    fail("takes one argument, the file with the request");
  }
  Request request(arguments[1]);
  executorch::runtime::runtime_init();
  const std::vector<uint8_t> file = read(request.read_line());
  const Pool content(static_cast<long long>(file.size()));
  std::copy(file.begin(), file.end(), content.data());
  executorch::extension::BufferDataLoader loader(content.data(), content.size());
  const auto program = Program::load(&loader);
  if (!program.ok()) {
    fail("cannot load the program", program.error());
  }
  const std::string data_path = request.read_line();
  const std::vector<uint8_t> data_bytes = data_path.empty() ? std::vector<uint8_t>() : read(data_path);
  const Pool data_content(static_cast<long long>(data_bytes.size()));
  std::copy(data_bytes.begin(), data_bytes.end(), data_content.data());
  arm_runtime::DataFile data;
  if (!data_path.empty() && data.load(data_content.data(), data_content.size()) != Error::Ok) {
    fail("cannot load the .ptd");
  }
  const Pool fast(request.number());
  ethosu_fast_scratch = fast.data();
  ethosu_fast_scratch_size = fast.size();
  const Pool temp_memory(request.number());
  arm_runtime::PeakAllocator temp(static_cast<uint32_t>(temp_memory.size()), temp_memory.data());
  std::vector<Pool> shared;
  for (size_t left = request.count(); left > 0; --left) {
    shared.emplace_back(request.number());
  }
  std::vector<std::unique_ptr<LoadedMethod>> methods;
  for (size_t left = request.count(); left > 0; --left) {
    methods.push_back(std::make_unique<LoadedMethod>(&request, shared));
    LoadedMethod& added = *methods.back();
    const Error error =
        added.method.load(*program, added.name.c_str(), added.pool.bytes(),
                          {added.memories.data(), added.memories.size()}, &temp, data_path.empty() ? nullptr : &data);
    if (error != Error::Ok) {
      fail("cannot load the method " + added.name, error);
    }
  }
  for (size_t left = request.count(); left > 0; --left) {
    LoadedMethod& loaded = *methods.at(request.count());
    set_inputs(&loaded, *program, &request);
    set_outputs(&loaded, *program);
    const Error error = loaded.method.execute();
    if (error != Error::Ok) {
      fail("cannot execute the method " + loaded.name, error);
    }
    write_outputs(loaded, &request);
  }
  for (const auto& loaded : methods) {
    std::printf("method %s %zu\n", loaded->name.c_str(), loaded->method.pool_used());
  }
  std::printf("temp %zu\n", temp.peak());
  return 0;
}
