// SPDX-License-Identifier: Apache-2.0
//
// Tests EthosUBackend with a fake of the driver. Arguments: a .pte that consists of one delegate, the payload of
// that delegate (COP1), and a COP2 payload.

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "backends/ethosu/ethosu_backend.h"
#include "backends/ethosu/npu_driver.h"
#include "common/checksum.h"
#include "common/executorch.h"
#include "fake_driver.h"
#include "payload/ethosu_payload.h"
#include "tests/recording_tracer.h"

namespace {

using namespace arm_runtime;
using executorch::aten::TensorImpl;
using executorch::runtime::NamedDataMap;
using executorch::runtime::TensorLayout;

int failures = 0;
int hooks_open = 0;
int hooks_closed = 0;
std::string logged;

#define CHECK(condition) check(condition, __LINE__, #condition)

void check(bool holds, int line, const char* condition) {
  if (!holds) {
    std::fprintf(stderr, "%s:%d: %s\n  log: %s\n", __FILE__, line, condition, logged.c_str());
    ++failures;
  }
}

void record_log(et_timestamp_t, et_pal_log_level_t, const char*, const char*, size_t, const char* message, size_t) {
  logged += message;
  logged += '\n';
}

bool logs(const char* text) { return logged.find(text) != std::string::npos; }

constexpr size_t kMisalignment = 8;

struct FreeDeleter {
  void operator()(void* pointer) const { std::free(pointer); }
};

// Memory for the temp allocator, surrounded by guard bytes. As in firmware, the memory is not aligned to a cache line,
// and its first and last cache lines also contain other data: the guard bytes.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t size)
      : size_(size),
        memory_(static_cast<uint8_t*>(std::aligned_alloc(kCacheLine, 3 * kCacheLine + round_up_to_cache_lines(size)))) {
    std::memset(memory_.get(), kGuardByte, 3 * kCacheLine + round_up_to_cache_lines(size));
  }
  uint8_t* data() const { return memory_.get() + kCacheLine + kMisalignment; }
  size_t size() const { return size_; }

  bool guards_are_intact() const {
    const auto is_intact = [](const uint8_t* from, const uint8_t* to) {
      return std::all_of(from, to, [](uint8_t byte) { return byte == kGuardByte; });
    };
    const uint8_t* end = memory_.get() + 3 * kCacheLine + round_up_to_cache_lines(size_);
    return is_intact(memory_.get(), data()) && is_intact(data() + size_, end);
  }

 private:
  static constexpr uint8_t kGuardByte = 0xA5;
  size_t size_;
  std::unique_ptr<uint8_t, FreeDeleter> memory_;
};

// Bytes at a multiple of kNpuAlignment plus `misalignment`. The last byte is the last of its heap block, so that
// sanitizers report reads beyond it.
class Bytes {
 public:
  Bytes(const std::string& content, size_t misalignment = 0)
      : memory_(static_cast<uint8_t*>(std::malloc(content.size() + misalignment))),
        data_(memory_.get() + misalignment),
        size_(content.size()) {
    std::memcpy(data_, content.data(), content.size());
  }
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t, FreeDeleter> memory_;
  uint8_t* data_;
  size_t size_;
};

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

struct Files {
  std::string program;
  std::string payload;
  std::string cop2;
};

uint8_t pattern(uint32_t seed, size_t i) { return static_cast<uint8_t>(seed * 37 + i * 11 + 5); }

// A tensor with the element size and byte count of `like`.
class Argument {
 public:
  explicit Argument(const PayloadTensor& like, uint64_t extra_elements = 0)
      : extent_(static_cast<int32_t>(like.nbytes / static_cast<uint64_t>(like.element_size) + extra_elements)),
        bytes_(static_cast<size_t>(extent_) * static_cast<size_t>(like.element_size)),
        impl_(type(like.element_size), 1, &extent_, bytes_.data(), &order_, &stride_),
        value_(Tensor(&impl_)) {}
  Argument(const Argument&) = delete;

  std::vector<uint8_t>& bytes() { return bytes_; }
  EValue* value() { return &value_; }
  void fill(uint32_t seed) {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = pattern(seed, i);
    }
  }
  // Moves the tensor to memory of the caller.
  void move_to(uint8_t* data) {
    std::copy(bytes_.begin(), bytes_.end(), data);
    impl_.set_data(data);
  }

 private:
  static ScalarType type(int32_t element_size) {
    return element_size == 1   ? ScalarType::Char
           : element_size == 2 ? ScalarType::Short
           : element_size == 4 ? ScalarType::Int
                               : ScalarType::Long;
  }

  int32_t extent_;
  uint8_t order_ = 0;
  int32_t stride_ = 1;
  std::vector<uint8_t> bytes_;
  TensorImpl impl_;
  EValue value_;
};

// A loaded payload, with valid arguments and memory of exactly the required size.
class Loaded {
 public:
  explicit Loaded(const std::string& content, size_t misalignment = 0, const ExternalData& external = {})
      : bytes_(content, misalignment) {
    read_ethosu_payload(bytes_.data(), bytes_.size(), &payload_, external);
    method_memory_.resize(256);
    set_scratch(round_up_to_cache_lines(payload_.scratch_size));
    for (uint32_t i = 0; i < payload_.inputs.count(); ++i) {
      arguments_.push_back(std::make_unique<Argument>(payload_.inputs.at(i)));
      arguments_.back()->fill(i);
    }
    for (uint32_t i = 0; i < payload_.outputs.count(); ++i) {
      arguments_.push_back(std::make_unique<Argument>(payload_.outputs.at(i)));
    }
    for (const auto& argument : arguments_) {
      values_.push_back(argument->value());
    }
    fake_driver = FakeDriver();
    logged.clear();
  }

  const EthosUPayload& payload() const { return payload_; }
  Argument& argument(size_t i) { return *arguments_[i]; }
  Argument& output(size_t i) { return *arguments_[payload_.inputs.count() + i]; }
  std::vector<EValue*>& values() { return values_; }

  // Allocates memory for the temp allocator, with `size` bytes after its first cache line boundary.
  void set_scratch(size_t size) { scratch_ = std::make_unique<GuardedMemory>(size + kCacheLine - kMisalignment); }
  RecordingTracer* tracer = nullptr;
  const NamedDataMap* named_data = nullptr;
  bool guards_are_intact() const { return scratch_->guards_are_intact(); }

  Error init(size_t method_memory = 256, std::vector<CompileSpec> specs = {}) {
    MemoryAllocator allocator(static_cast<uint32_t>(method_memory), method_memory_.data());
    BackendInitContext context(&allocator, tracer, nullptr, named_data);
    FreeableBuffer processed(bytes_.data(), bytes_.size(), nullptr);
    const Result<DelegateHandle*> result = backend_.init(context, &processed, {specs.data(), specs.size()});
    handle_ = result.ok() ? *result : nullptr;
    return result.error();
  }

  void destroy() { backend_.destroy(handle_); }

  Error execute(bool with_allocator = true) {
    MemoryAllocator allocator(static_cast<uint32_t>(scratch_->size()), scratch_->data());
    BackendExecutionContext context(tracer, with_allocator ? &allocator : nullptr);
    return backend_.execute(context, handle_, Span<EValue*>(values_.data(), values_.size()));
  }

 private:
  EthosUBackend backend_;
  Bytes bytes_;
  EthosUPayload payload_;
  std::vector<uint8_t> method_memory_;
  std::unique_ptr<GuardedMemory> scratch_;
  std::vector<std::unique_ptr<Argument>> arguments_;
  std::vector<EValue*> values_;
  DelegateHandle* handle_ = nullptr;
};

// Checks that the inputs are at the addresses that the commands use, then writes the expected outputs.
void act_as_npu(const EthosUPayload& payload, const std::vector<uint8_t*>& bases) {
  uint8_t* scratch = bases[1];
  for (uint32_t i = 0; i < payload.inputs.count(); ++i) {
    const PayloadTensor input = payload.inputs.at(i);
    for (size_t k = 0; input.is_allocated() && k < input.nbytes; ++k) {
      CHECK(scratch[static_cast<size_t>(input.offset) + k] == pattern(i, k));
    }
  }
  std::memset(scratch, 0xEE, payload.scratch_size);
  for (uint32_t i = 0; i < payload.outputs.count(); ++i) {
    const PayloadTensor output = payload.outputs.at(i);
    for (size_t k = 0; k < output.nbytes; ++k) {
      scratch[static_cast<size_t>(output.offset) + k] = pattern(100 + i, k);
    }
  }
}

void executes(const Files& files) {
  Loaded loaded(files.payload);
  const EthosUPayload& payload = loaded.payload();
  fake_driver.npu = [&](const std::vector<uint8_t*>& bases) { act_as_npu(payload, bases); };
  CHECK(loaded.init() == Error::Ok);
  for (int runs = 1; runs <= 2; ++runs) {
    CHECK(loaded.execute() == Error::Ok);
    CHECK(fake_driver.invoked == runs && fake_driver.reserved == runs && fake_driver.released == runs);
  }
  CHECK(fake_driver.commands == payload.commands.data);
  CHECK(fake_driver.commands_size == static_cast<int>(payload.commands.size));
  CHECK(fake_driver.bases[0] == payload.weights.data && fake_driver.sizes[0] == payload.weights.size);
  CHECK(reinterpret_cast<uintptr_t>(fake_driver.bases[1]) % kCacheLine == 0);
  CHECK(fake_driver.sizes[1] >= payload.scratch_size && fake_driver.sizes[1] % kCacheLine == 0);
  CHECK(fake_driver.bases.size() == 2);  // a third base would be address 0
  for (uint32_t i = 0; i < payload.outputs.count(); ++i) {
    const std::vector<uint8_t>& bytes = loaded.output(i).bytes();
    for (size_t k = 0; k < bytes.size(); ++k) {
      CHECK(bytes[k] == pattern(100 + i, k));
    }
  }
  CHECK(logged.empty() && fake_driver.violations.empty());
}

// Named data of a program: one entry, in separate memory.
class SingleEntryDataMap final : public NamedDataMap {
 public:
  SingleEntryDataMap(std::string name, const std::string& content) : name_(std::move(name)), content_(content) {}

  Result<FreeableBuffer> get_data(std::string_view key) const override {
    if (key != name_) {
      return Error::NotFound;
    }
    return FreeableBuffer(
        content_.data(), content_.size(), [](void* freed, void*, size_t) { ++*static_cast<int*>(freed); }, &freed_);
  }
  Result<const TensorLayout> get_tensor_layout(std::string_view) const override { return Error::NotFound; }
  Error load_data_into(std::string_view, void*, size_t) const override { return Error::NotFound; }
  Result<uint32_t> get_num_keys() const override { return uint32_t{1}; }
  Result<const char*> get_key(uint32_t) const override { return name_.c_str(); }
  const uint8_t* data() const { return content_.data(); }
  size_t size() const { return content_.size(); }
  int freed() const { return freed_; }

 private:
  std::string name_;
  Bytes content_;
  mutable int freed_ = 0;
};

// Returns the payload with the key `name` in place of the content of a block. Moves the content to `content`.
std::string externalize_block(const std::string& payload, const char* block_name, const std::string& name,
                              std::string* content) {
  const size_t at = payload.find(block_name);
  uint32_t size = 0;
  std::memcpy(&size, payload.data() + at + 16, sizeof(size));
  *content = payload.substr(at + 32, size);
  const auto length = static_cast<uint32_t>(name.size());
  std::string block = payload.substr(at, 16) + std::string(reinterpret_cast<const char*>(&length), 4) +
                      std::string("\1", 1) + std::string(11, '\0') + name;
  block.resize((block.size() + 15) / 16 * 16);
  return payload.substr(0, at) + block + payload.substr(at + 32 + (size + 15) / 16 * 16);
}

void loads_external_weights(const Files& files) {
  std::string weights;
  const std::string name(kNamedDataKeySize, 'w');
  const std::string payload = externalize_block(files.payload, "weight_data", name, &weights);
  const SingleEntryDataMap there(name, weights), other(std::string(kNamedDataKeySize, 'o'), weights);
  {
    Loaded loaded(payload);
    loaded.named_data = &there;
    CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);
    CHECK(fake_driver.bases[0] == there.data() && fake_driver.sizes[0] == there.size());
    CHECK(logged.empty() && fake_driver.violations.empty());
    loaded.destroy();
    CHECK(there.freed() == 1);
  }
  for (const NamedDataMap* map :
       {static_cast<const NamedDataMap*>(nullptr), static_cast<const NamedDataMap*>(&other)}) {
    Loaded loaded(payload);
    loaded.named_data = map;
    CHECK(loaded.init() == Error::InvalidProgram && logs("named data"));
  }
  Loaded changed(payload);
  changed.named_data = &there;
  uint8_t wrong[4] = {1, 2, 3, 4};
  CHECK(changed.init(256, {{"weight_data_crc32", {wrong, 4}}}) == Error::InvalidProgram);
  CHECK(logs("the weight data of") && there.freed() == 2);
}

void loads_external_commands(const Files& files) {
  std::string commands;
  const std::string name(kNamedDataKeySize, 'c');
  const std::string payload = externalize_block(files.payload, "cmd_data", name, &commands);
  const SingleEntryDataMap there(name, commands), damaged(name, std::string(commands.size(), 'x'));
  {
    Loaded loaded(payload, 0, {{there.data(), there.size()}, {}});
    loaded.named_data = &there;
    // One byte less than the program and its FreeableBuffer need.
    CHECK(loaded.init(EthosUBackend::kMethodAllocatorBytes + sizeof(FreeableBuffer) - 1) ==
          Error::MemoryAllocationFailed);
    CHECK(logs("bytes for the state of the delegate from the method allocator") && there.freed() == 1);
    CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);
    CHECK(fake_driver.commands == there.data());
    CHECK(fake_driver.violations.empty());
    loaded.destroy();
    CHECK(there.freed() == 2);
  }
  Loaded without(payload), of_another(payload), changed(payload);
  CHECK(without.init() == Error::InvalidProgram && logs("the command stream is outside the payload"));
  of_another.named_data = &damaged;
  CHECK(of_another.init() == Error::InvalidProgram && logs("it starts neither with COP1 nor with COP2"));
  changed.named_data = &there;
  uint8_t wrong[4] = {1, 2, 3, 4};
  CHECK(changed.init(256, {{"cmd_data_crc32", {wrong, 4}}}) == Error::InvalidProgram);
  CHECK(logs("the command stream of"));
}

// Sets the firmware's fast scratch during this object's lifetime. The buffer starts `offset` bytes after a cache line
// boundary.
class FirmwareScratch {
 public:
  explicit FirmwareScratch(size_t size, size_t offset = 0) {
    ethosu_fast_scratch = memory_ + offset;
    ethosu_fast_scratch_size = size;
  }
  ~FirmwareScratch() {
    ethosu_fast_scratch = nullptr;
    ethosu_fast_scratch_size = 0;
  }
  FirmwareScratch(const FirmwareScratch&) = delete;

  unsigned char* data() { return memory_; }

 private:
  alignas(kCacheLine) unsigned char memory_[256] = {};
};

// Compile spec with the size of the fast scratch (SRAM), in which Vela places tensors.
class FastScratchSpec {
 public:
  explicit FastScratchSpec(uint32_t size) : bytes_{static_cast<uint8_t>(size), static_cast<uint8_t>(size >> 8), 0, 0} {}
  CompileSpec spec(size_t bytes = 4) { return {"fast_scratch_size", {bytes_, bytes}}; }

 private:
  uint8_t bytes_[4];
};

void passes_fast_scratch_of_firmware(const Files& files) {
  FastScratchSpec needed(80);
  for (const size_t offset : {0, 16}) {  // bytes before the first whole cache line are not used
    FirmwareScratch firmware(128, offset);
    Loaded loaded(files.payload);
    CHECK(loaded.init(256, {needed.spec()}) == Error::Ok && loaded.execute() == Error::Ok);
    CHECK(fake_driver.bases[2] == firmware.data() + (offset == 0 ? 0 : kCacheLine));
    CHECK(fake_driver.sizes[2] == 80 && fake_driver.violations.empty());
  }
  FirmwareScratch firmware(128);
  FastScratchSpec nothing(0);
  Loaded loaded(files.payload);
  CHECK(loaded.init(256, {nothing.spec()}) == Error::Ok && loaded.execute() == Error::Ok);
  CHECK(fake_driver.bases.size() == 2);
}

void passes_fast_scratch_of_driver(const Files& files) {
  FastScratchSpec needed(80);
  alignas(kCacheLine) unsigned char memory[96];
  const auto load = [&](size_t size) {
    auto loaded = std::make_unique<Loaded>(files.payload);
    fake_driver.fast_memory = memory;
    fake_driver.fast_memory_size = size;
    return loaded;
  };
  auto fits = load(80);
  CHECK(fits->init(256, {needed.spec()}) == Error::Ok && fits->execute() == Error::Ok);
  CHECK(fake_driver.bases[2] == memory && fake_driver.sizes[2] == 80);
  CHECK(fake_driver.reserved == 2 && fake_driver.released == 2 && fake_driver.violations.empty());
  // Execution may reserve another driver than loading, here one without fast memory.
  fake_driver.fast_memory = nullptr;
  CHECK(fits->execute() == Error::MemoryAllocationFailed && logs("there are 0: "));
  CHECK(fake_driver.ran == 1 && fake_driver.released == 3);
  auto too_small = load(79);
  CHECK(too_small->init(256, {needed.spec()}) == Error::MemoryAllocationFailed);
  CHECK(logs("the program needs 80 bytes of fast scratch, and there are 79: "));
  CHECK(fake_driver.reserved == 1 && fake_driver.released == 1);
  // The driver uses the memory given to ethosu_init() even if only the firmware's memory is large enough. Loading
  // succeeds. At execution, the driver finds that its memory is too small, and fails.
  FirmwareScratch firmware(128);
  auto compared = load(79);
  CHECK(compared->init(256, {needed.spec()}) == Error::Ok && compared->execute() == Error::Internal);
  CHECK(fake_driver.ran == 0);
}

void refuses_too_little_fast_scratch(const Files& files) {
  FastScratchSpec needed(80);
  Loaded none(files.payload);
  CHECK(none.init(256, {needed.spec()}) == Error::MemoryAllocationFailed);
  CHECK(logs("the program needs 80 bytes of fast scratch, and there are 0: set "
             "ethosu_fast_scratch(_size) to 96 bytes at a multiple of 32, or give ethosu_init() that memory, or "
             "export without Dedicated_Sram\n"));
  fake_driver.has_npu = false;
  CHECK(none.init(256, {needed.spec()}) == Error::MemoryAllocationFailed);
  {
    FirmwareScratch firmware(95);  // the last cache line would be shared
    Loaded loaded(files.payload);
    CHECK(loaded.init(256, {needed.spec()}) == Error::MemoryAllocationFailed && logs("and there are 64: "));
  }
  for (const size_t size : {8, 111}) {
    FirmwareScratch firmware(size, 16);
    Loaded loaded(files.payload);
    CHECK(loaded.init(256, {needed.spec()}) == Error::MemoryAllocationFailed);
    CHECK(logs(size == 8 ? "and there are 0: " : "and there are 64: "));
  }
  CHECK(fake_driver.invoked == 0);
  Loaded loaded(files.payload);
  CHECK(loaded.init(256, {needed.spec(3)}) == Error::InvalidProgram);
  CHECK(logs("a compile spec fast_scratch_size of 3 bytes, not 4: export or flash the program again"));
}

// Programs of other exporters lack the compile spec fast_scratch_size. They get all memory that is available.
void passes_whole_fast_scratch_without_compile_spec(const Files& files) {
  {
    FirmwareScratch firmware(100);
    Loaded loaded(files.payload);
    CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);
    CHECK(fake_driver.bases[2] == firmware.data() && fake_driver.sizes[2] == 96);
  }
  alignas(kCacheLine) unsigned char memory[64];
  Loaded loaded(files.payload);
  fake_driver.fast_memory = memory;
  fake_driver.fast_memory_size = sizeof(memory);
  CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);
  CHECK(fake_driver.bases[2] == memory && fake_driver.violations.empty());
}

// Checks that an execution fails with `error` and logs `reason`, without a call of the driver.
void expect_refused(Loaded& loaded, Error error, const char* reason) {
  CHECK(loaded.execute() == error);
  CHECK(logs(reason));
  CHECK(fake_driver.reserved == 0 && fake_driver.invoked == 0);
}

void refuses_arguments(const Files& files) {
  const auto refuse = [&](const char* reason, auto change) {
    Loaded loaded(files.payload);
    CHECK(loaded.init() == Error::Ok);
    change(loaded);
    expect_refused(loaded, Error::InvalidArgument, reason);
  };
  EValue number(int64_t{3});
  refuse("arguments for a payload with", [](Loaded& loaded) { loaded.values().pop_back(); });
  refuse("arguments for a payload with", [&](Loaded& loaded) { loaded.values().push_back(&number); });
  refuse("arguments for a payload with", [](Loaded& loaded) { loaded.values().clear(); });
  refuse("input 0 is not a tensor", [&](Loaded& loaded) { loaded.values()[0] = &number; });
  refuse("output 0 is not a tensor",
         [](Loaded& loaded) { loaded.values()[loaded.payload().inputs.count()] = nullptr; });

  Loaded like(files.payload);
  const size_t first_output = like.payload().inputs.count();
  PayloadTensor input = like.payload().inputs.at(0);
  Argument longer(input, 1);
  refuse("input 0 has", [&](Loaded& loaded) { loaded.values()[0] = longer.value(); });
  Argument longer_output(like.payload().outputs.at(0), 1);
  refuse("output 0 has", [&](Loaded& loaded) { loaded.values()[first_output] = longer_output.value(); });
  // Equal bytes in wider elements.
  input.element_size *= 2;
  Argument wider(input);
  refuse("in elements of", [&](Loaded& loaded) { loaded.values()[0] = wider.value(); });

  int32_t extent = static_cast<int32_t>(longer.bytes().size()) - 1;
  uint8_t order = 0;
  int32_t stride = 1;
  TensorImpl empty(ScalarType::Char, 1, &extent, nullptr, &order, &stride);
  EValue without_memory{Tensor(&empty)};
  refuse("input 0 has no memory", [&](Loaded& loaded) { loaded.values()[0] = &without_memory; });
}

void refuses_too_little_memory(const Files& files) {
  Loaded loaded(files.payload);
  CHECK(loaded.init(8) == Error::MemoryAllocationFailed && logs("method allocator"));
  CHECK(loaded.init() == Error::Ok);
  const size_t enough = round_up_to_cache_lines(loaded.payload().scratch_size);
  loaded.set_scratch(enough - 1);
  expect_refused(loaded, Error::MemoryAllocationFailed, "bytes of scratch");
  loaded.set_scratch(0);
  expect_refused(loaded, Error::MemoryAllocationFailed, "bytes of scratch");
  loaded.set_scratch(enough);
  CHECK(loaded.execute(false) == Error::MemoryAllocationFailed);
}

void reports_driver_failures(const Files& files) {
  Loaded loaded(files.payload);
  CHECK(loaded.init() == Error::Ok);
  fake_driver.has_npu = false;
  CHECK(loaded.execute() == Error::InvalidState);
  CHECK(logs("the driver has no Ethos-U") && logs("call ethosu_init()") && fake_driver.invoked == 0 &&
        fake_driver.released == 0);

  fake_driver.has_npu = true;
  fake_driver.faults = true;
  CHECK(loaded.execute() == Error::Internal);
  CHECK(logs("failed with -1"));
  CHECK(fake_driver.reserved == 1 && fake_driver.released == 1);
  for (const uint8_t byte : loaded.output(0).bytes()) {
    CHECK(byte == 0);
  }
}

void refuses_invalid_payloads(const Files& files) {
  Loaded unaligned(files.payload, kMisalignment);
  CHECK(unaligned.init() == Error::InvalidProgram && logs("multiple of 16"));

  Loaded truncated(files.payload.substr(0, files.payload.size() - 16));
  CHECK(truncated.init() == Error::InvalidProgram && logs("block 'outputs'"));

  Loaded empty("");
  CHECK(empty.init() == Error::InvalidProgram && logs("empty"));

  Loaded cop2(files.cop2);
  CHECK(cop2.init() == Error::DelegateInvalidCompatibility && logs("COP2"));
}

void checks_the_checksum(const Files& files) {
  CHECK(crc32("123456789", 9) == 0xCBF43926);
  CHECK(crc32("", 0) == 0);
  uint32_t recorded = crc32(files.payload.data(), files.payload.size());
  uint8_t other[3] = {1, 2, 3};
  const CompileSpec unrelated{"target", {other, 3}};
  const CompileSpec whole{"payload_crc32", {&recorded, 4}};
  Loaded loaded(files.payload);
  CHECK(loaded.init(256, {unrelated, whole}) == Error::Ok && logged.empty());

  // A damaged weight: without the checksum, the payload would load, and the result would be wrong.
  std::string flipped = files.payload;
  flipped[flipped.size() / 2] = static_cast<char>(flipped[flipped.size() / 2] ^ 0x10);
  char line[256];
  std::snprintf(line, sizeof(line),
                "EthosUBackend: the payload of %zu bytes has changed since it was exported: its CRC-32 is "
                "%08x, recorded is %08x: export or flash the program again\n",
                flipped.size(), crc32(flipped.data(), flipped.size()), recorded);
  Loaded changed(flipped);
  CHECK(changed.init(256, {unrelated, whole}) == Error::InvalidProgram && logged == line);

  for (const CompileSpec& wrong :
       {CompileSpec{"payload_crc32", {&recorded, 3}}, CompileSpec{"payload_crc32", {nullptr, 4}}}) {
    Loaded refused(files.payload);
    CHECK(refused.init(256, {wrong}) == Error::InvalidProgram && logs("a compile spec payload_crc32 of "));
    CHECK(logged.find('\n') == logged.size() - 1);
  }
}

// Loading cleans the cache for the whole payload. The driver cleans it before a run, and invalidates it after the run.
void keeps_data_cache_coherent(const Files& files) {
  // Vela's scratch sizes are multiples of a cache line. Others must work, too.
  for (const uint32_t extra_bytes : {0U, 1U, 15U}) {
    std::string payload = files.payload;
    const size_t at = payload.find("scratch_size") + 32;
    uint32_t size = 0;
    std::memcpy(&size, &payload[at], 4);
    size += extra_bytes;
    std::memcpy(&payload[at], &size, 4);
    Loaded loaded(payload);
    CHECK(loaded.payload().scratch_size == size);
    CHECK(loaded.init() == Error::Ok && fake_driver.calls == "c");
    CHECK(fake_driver.cleaned[0].first % kCacheLine == 0 && fake_driver.cleaned[0].second % kCacheLine == 0);
    CHECK(loaded.execute() == Error::Ok && loaded.execute() == Error::Ok);
    CHECK(fake_driver.calls.find('i') > fake_driver.calls.find('r'));
    CHECK(loaded.guards_are_intact());
    CHECK(fake_driver.violations.empty());
  }
}

void traces_load_and_execution(const Files& files) {
  RecordingTracer tracer;
  Loaded loaded(files.payload);
  CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);  // without a tracer
  loaded.tracer = &tracer;
  CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);
  const std::string npu = kDriverHasCounters ? "EthosUBackend npu: npu_cycles=12345678901" : "EthosUBackend npu";
  uint64_t copied = 0;
  for (uint32_t i = 0; i < loaded.payload().inputs.count(); ++i) {
    copied += loaded.payload().inputs.at(i).nbytes;
  }
  for (uint32_t i = 0; i < loaded.payload().outputs.count(); ++i) {
    copied += loaded.payload().outputs.at(i).nbytes;
  }
  const std::string execute = "EthosUBackend execute: copied_bytes=";
  CHECK((tracer.events == std::vector<std::string>{"EthosUBackend load", npu, execute + std::to_string(copied)}));
  fake_driver.cycles = 0;
  fake_driver.faults = true;
  CHECK(loaded.execute() == Error::Internal);
  CHECK(tracer.events.size() == 5 && tracer.open == 0);
  CHECK(!kDriverHasCounters || tracer.events[3] == "EthosUBackend npu: npu_cycles=0");
  CHECK(fake_driver.violations.empty() && !fake_driver.counters_on);
}

void refuses_program_for_another_npu(const Files& files) {
  const auto refuse = [&](auto change) {
    Loaded loaded(files.payload);
    CHECK(loaded.init() == Error::Ok);
    change();
    const Error error = loaded.execute();
    CHECK(fake_driver.ran == 0 && fake_driver.reserved == fake_driver.released);
    CHECK(fake_driver.violations.empty());
    return error;
  };
  const Error macs = refuse([] { fake_driver.log2_macs = 11; });
  const Error product = refuse([] { fake_driver.product = 2; });
  if (kDriverSupportsSeveralNpus) {  // this driver does not report which NPU it has
    CHECK(macs == Error::InvalidState && logs("no Ethos-U55-128: ") && logs("or export for the NPU that"));
    return;
  }
  CHECK(macs == Error::DelegateInvalidCompatibility);
  CHECK(product == (kDriverReservesByProduct ? Error::DelegateInvalidCompatibility : Error::Internal));
  CHECK(!logs("ethosu_init"));
  refuse([] { fake_driver.log2_macs = 11; });
  CHECK(logs("compiled for Ethos-U55-128, and the NPU has 2048 multiply-accumulates a cycle: export for the NPU of "
             "this device"));
}

// Returns the byte offset in the payload of the `offset` field of the first tensor of `block` ("inputs" or "outputs").
size_t find_tensor_offset_field(const std::string& payload, const char* block) {
  return payload.find(std::string(block) + std::string(16 - std::strlen(block), '\0')) + 32 + 4 + 4 * 7;
}

// A scratch in planned memory. It contains all arguments, at the offsets of their tensors in the payload.
class PlannedScratch {
 public:
  PlannedScratch(Loaded* loaded, uint32_t argument, size_t shift = 0) : bytes_{} {
    const EthosUPayload& payload = loaded->payload();
    void* data = nullptr;
    CHECK(posix_memalign(&data, kCacheLine, round_up_to_cache_lines(payload.scratch_size) + shift) == 0);
    memory_.reset(static_cast<uint8_t*>(data));
    const uint32_t inputs = payload.inputs.count();
    for (uint32_t i = 0; i < inputs + payload.outputs.count(); ++i) {
      const PayloadTensor tensor = i < inputs ? payload.inputs.at(i) : payload.outputs.at(i - inputs);
      loaded->argument(i).move_to(memory_.get() + shift + tensor.offset);
    }
    std::memcpy(bytes_, &argument, sizeof(argument));
  }

  uint8_t* data() const { return memory_.get(); }
  CompileSpec spec(size_t bytes = 4) { return {"planned_scratch_argument", {bytes_, bytes}}; }

 private:
  std::unique_ptr<uint8_t, FreeDeleter> memory_;
  uint8_t bytes_[4];
};

void executes_in_planned_memory(const Files& files) {
  for (const bool by_input : {true, false}) {
    Loaded loaded(files.payload);
    const EthosUPayload& payload = loaded.payload();
    const uint32_t argument = by_input ? 0 : payload.inputs.count();
    fake_driver.npu = [&](const std::vector<uint8_t*>& bases) { act_as_npu(payload, bases); };
    PlannedScratch planned(&loaded, argument);
    RecordingTracer tracer;
    loaded.tracer = &tracer;
    loaded.set_scratch(0);  // nothing is allocated
    CHECK(loaded.init(256, {planned.spec()}) == Error::Ok && loaded.execute(/*with_allocator=*/false) == Error::Ok);
    CHECK(fake_driver.bases[1] == planned.data() && fake_driver.violations.empty());
    CHECK(tracer.events.back() == "EthosUBackend execute: copied_bytes=0");
    const PayloadTensor output = payload.outputs.at(0);
    for (size_t k = 0; k < output.nbytes; ++k) {
      CHECK(planned.data()[static_cast<size_t>(output.offset) + k] == pattern(100, k));
    }
  }
}

void refuses_a_wrong_planned_scratch(const Files& files) {
  Loaded loaded(files.payload);
  const uint32_t count = loaded.payload().inputs.count() + loaded.payload().outputs.count();
  PlannedScratch beyond(&loaded, count);
  const std::string reason = "argument " + std::to_string(count) + " is not in the scratch";
  CHECK(loaded.init(256, {beyond.spec()}) == Error::InvalidProgram && logs(reason.c_str()));
  CHECK(loaded.init(256, {beyond.spec(3)}) == Error::InvalidProgram &&
        logs("a compile spec planned_scratch_argument of 3 bytes, not 4: export or flash the program again"));
  PlannedScratch misaligned(&loaded, 0, kNpuAlignment);
  CHECK(loaded.init(256, {misaligned.spec()}) == Error::Ok);
  expect_refused(loaded, Error::InvalidArgument, "the scratch in planned memory does not start at a multiple of 32");
}

void handles_unallocated_tensors(const Files& files) {
  std::string input = files.payload;
  input.replace(find_tensor_offset_field(input, "inputs"), 4, 4, '\xFF');
  Loaded loaded(input);
  fake_driver.npu = [&](const std::vector<uint8_t*>& bases) { act_as_npu(loaded.payload(), bases); };
  CHECK(!loaded.payload().inputs.at(0).is_allocated());
  CHECK(loaded.init() == Error::Ok && loaded.execute() == Error::Ok);
  CHECK(loaded.output(0).bytes()[0] == pattern(100, 0));

  std::string output = files.payload;
  output.replace(find_tensor_offset_field(output, "outputs"), 4, 4, '\xFF');
  Loaded uncomputed(output);
  CHECK(uncomputed.init() == Error::InvalidProgram && logs("output 0 of the payload has no place"));
}

// End to end: ExecuTorch's own loader and executor find the backend by its name.
void executes_in_the_runtime(const Files& files) {
  EthosUPayload payload;
  CHECK(read_ethosu_payload(files.payload.data(), files.payload.size(), &payload).ok());
  logged.clear();
  fake_driver = FakeDriver();
  fake_driver.npu = [&](const std::vector<uint8_t*>& bases) { act_as_npu(payload, bases); };

  const Bytes file(files.program);
  executorch::extension::BufferDataLoader loader(file.data(), file.size());
  auto program = executorch::runtime::Program::load(&loader);
  CHECK(program.ok());
  auto meta = program->method_meta("forward");
  CHECK(meta.ok());
  std::vector<Bytes> planned;  // aligned to kNpuAlignment only; the scratch in it must start at a cache line
  std::vector<Span<uint8_t>> spans;
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
    const auto size = static_cast<size_t>(meta->memory_planned_buffer_size(i).get());
    planned.emplace_back(std::string(size + kCacheLine, '\0'));
    const size_t misaligned = reinterpret_cast<uintptr_t>(planned.back().data()) % kCacheLine;
    spans.emplace_back(planned.back().data() + (kCacheLine - misaligned) % kCacheLine, size);
  }
  executorch::runtime::HierarchicalAllocator planned_memory({spans.data(), spans.size()});
  std::vector<uint8_t> method_bytes(1 << 16);
  std::vector<uint8_t> temp_bytes(round_up_to_cache_lines(payload.scratch_size) + kCacheLine);
  MemoryAllocator method_memory(static_cast<uint32_t>(method_bytes.size()), method_bytes.data());
  MemoryAllocator temp_memory(static_cast<uint32_t>(temp_bytes.size()), temp_bytes.data());
  executorch::runtime::MemoryManager manager(&method_memory, &planned_memory, &temp_memory);
  auto method = program->load_method("forward", &manager);
  CHECK(method.ok());
  for (uint32_t i = 0; i < payload.inputs.count(); ++i) {
    const EValue& value = method->get_input(i);
    uint8_t* data = static_cast<uint8_t*>(value.toTensor().mutable_data_ptr());
    for (size_t k = 0; k < value.toTensor().nbytes(); ++k) {
      data[k] = pattern(i, k);
    }
  }
  CHECK(method->execute() == Error::Ok);
  CHECK(fake_driver.invoked == 1);
  CHECK(method->outputs_size() == payload.outputs.count());
  for (uint32_t i = 0; i < payload.outputs.count(); ++i) {
    const Tensor& output = method->get_output(i).toTensor();
    const uint8_t* data = static_cast<const uint8_t*>(output.const_data_ptr());
    for (size_t k = 0; k < output.nbytes(); ++k) {
      CHECK(data[k] == pattern(100 + i, k));
    }
  }
}

}  // namespace

extern "C" void EthosUBackend_execute_begin() { ++hooks_open; }
extern "C" void EthosUBackend_execute_end() { ++hooks_closed; }

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s PROGRAM.pte PAYLOAD COP2_PAYLOAD\n", argv[0]);
    return 2;
  }
  const Files files = {read_file(argv[1]), read_file(argv[2]), read_file(argv[3])};
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(record_log, __FILE__));
  executorch::runtime::runtime_init();
  CHECK(arm_runtime_ethosu_registered == Error::Ok);

  executes(files);
  loads_external_weights(files);
  loads_external_commands(files);
  passes_fast_scratch_of_firmware(files);
  passes_fast_scratch_of_driver(files);
  refuses_too_little_fast_scratch(files);
  passes_whole_fast_scratch_without_compile_spec(files);
  refuses_arguments(files);
  refuses_too_little_memory(files);
  reports_driver_failures(files);
  refuses_invalid_payloads(files);
  checks_the_checksum(files);
  keeps_data_cache_coherent(files);
  traces_load_and_execution(files);
  refuses_program_for_another_npu(files);
  executes_in_planned_memory(files);
  refuses_a_wrong_planned_scratch(files);
  handles_unallocated_tensors(files);
  executes_in_the_runtime(files);
  CHECK(hooks_open > 10 && hooks_open == hooks_closed);
  if (failures == 0) {
    std::puts("ok");
  }
  return failures == 0 ? 0 : 1;
}
