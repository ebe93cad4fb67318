// SPDX-License-Identifier: Apache-2.0
// Tests the Linux backend with a fake of the driver library. Without arguments, the test uses payloads that it builds.
// With the path of a .pte that consists of one delegate, it runs this program in ExecuTorch's runtime.
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <list>
#include <string>
#include <vector>

#include "common/checksum.h"
#include "common/executorch.h"
#include "fake_driver.h"
#include "payload/ethosu_payload.h"
#include "tests/recording_tracer.h"

namespace {

using namespace arm_runtime;
using executorch::aten::SizesType;
using executorch::aten::TensorImpl;
using fake_driver::Bytes;
using fake_driver::Call;
using fake_driver::record;
using fake_driver::Regions;
using fake_driver::script;

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                 \
      for (const std::string& line : log_lines) std::fprintf(stderr, "  log: %s\n", line.c_str()); \
      std::exit(1);                                                                                \
    }                                                                                              \
  } while (false)

std::vector<std::string> log_lines;

void record_errors(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* message,
                   size_t length) {
  if (level == kError || level == kFatal) {
    log_lines.emplace_back(message, length);
  }
}

// Whether exactly one line was logged, and contains `part`. If so, clears the log.
bool logged(const char* part) {
  const bool found = log_lines.size() == 1 && log_lines[0].find(part) != std::string::npos;
  if (found) {
    log_lines.clear();
  }
  return found;
}

// ---- Payloads

void append(Bytes& bytes, const void* data, size_t size) {
  const auto* first = static_cast<const uint8_t*>(data);
  bytes.insert(bytes.end(), first, first + size);
}

void append_words(Bytes& bytes, const std::vector<uint32_t>& words) { append(bytes, words.data(), 4 * words.size()); }

constexpr uint32_t kU85With256Macs = 0x20000118;

Bytes cop2(uint32_t config = kU85With256Macs, uint32_t addressing = 2) {
  Bytes bytes{'C', 'O', 'P', '2'};
  append_words(bytes, {1, 64, 0, 1, 56, 36});
  append(bytes, "VEUM", 4);
  append_words(bytes, {1, 20, config, 0x20007000, addressing, 4096, 0, 0xFFFFFFFF, 1, 2, 3, 4});
  return bytes;
}

Bytes cop1() {
  Bytes bytes{'C', 'O', 'P', '1'};
  append_words(bytes, {0x00100001, kU85With256Macs, 0x20007000, 5, 5, 5, 4 << 16 | 2, 1, 2, 3, 4});
  return bytes;
}

struct Io {
  int32_t elements, element_size, offset, region;
};

struct Payload {
  Bytes commands = cop2();
  Bytes weights{9, 8, 7};
  uint32_t scratch = 4096;
  std::vector<Io> inputs{{8, 1, 0, 3}, {4, 2, 16, 3}};
  // The second output precedes the first one in the region, as Vela may order them.
  std::vector<Io> outputs{{6, 1, 16, 4}, {2, 4, 0, 4}};

  Bytes bytes() const {
    Bytes all;
    block(all, "vela_bin_stream", {});
    block(all, "cmd_data", commands);
    block(all, "weight_data", weights);
    Bytes size;
    append(size, &scratch, 4);
    block(all, "scratch_size", size);
    block(all, "inputs", io(inputs));
    block(all, "outputs", io(outputs));
    block(all, "vela_end_stream", {});
    return all;
  }

 private:
  static void block(Bytes& all, const char* name, const Bytes& data) {
    char header[32] = {};
    std::strncpy(header, name, 16);
    const auto size = static_cast<uint32_t>(data.size());
    std::memcpy(header + 16, &size, 4);
    append(all, header, 32);
    all.insert(all.end(), data.begin(), data.end());
    all.resize((all.size() + 15) / 16 * 16);
  }

  static Bytes io(const std::vector<Io>& tensors) {
    Bytes bytes;
    append_words(bytes, {static_cast<uint32_t>(tensors.size())});
    for (const Io& tensor : tensors) {
      const int32_t words[9] = {1, 1, 1, 1, 1, tensor.elements, tensor.element_size, tensor.offset, tensor.region};
      append(bytes, words, sizeof(words));
    }
    return bytes;
  }
};

// ---- Calling the backend as the runtime does

const BackendInterface& backend() { return *executorch::runtime::get_backend_class("EthosUBackend"); }

Error load(const Bytes& payload, DelegateHandle** handle, const std::vector<CompileSpec>& specs = {}) {
  // Loads a copy that is freed afterwards: a sanitizer reports later reads.
  auto* copy = new Bytes(payload);
  copy->reserve(1);  // a FreeableBuffer without data is not freed
  BackendInitContext context(nullptr);
  FreeableBuffer processed(
      copy->data(), copy->size(), [](void* bytes, void*, size_t) { delete static_cast<Bytes*>(bytes); }, copy);
  auto result = backend().init(context, &processed, {specs.data(), specs.size()});
  if (result.ok()) {
    *handle = *result;
    CHECK(processed.size() == 0);  // freed by init
  }
  return result.error();
}

Error load(const Payload& payload, DelegateHandle** handle, const std::vector<CompileSpec>& specs = {}) {
  return load(payload.bytes(), handle, specs);
}

// Arguments of a delegate: 1D tensors, and the EValues that hold them.
class Arguments {
 public:
  explicit Arguments(const Payload& payload) {
    for (const Io& input : payload.inputs) {
      add(input);
    }
    for (const Io& output : payload.outputs) {
      add(output);
    }
  }

  void add(const Io& io) {
    const ScalarType types[] = {ScalarType::Char, ScalarType::Short, ScalarType::Int};
    add(io.elements, types[io.element_size / 2],
        static_cast<size_t>(io.elements) * static_cast<size_t>(io.element_size));
  }

  void add(SizesType elements, ScalarType type, size_t bytes) {
    static TensorImpl::DimOrderType order[] = {0};
    static TensorImpl::StridesType strides[] = {1};
    data.emplace_back(bytes, uint8_t{0xEE});
    sizes_.push_back(elements);
    tensors_.emplace_back(type, 1, &sizes_.back(), data.back().data(), order, strides);
    values_.emplace_back(Tensor(&tensors_.back()));
    pointers.push_back(&values_.back());
  }

  Error execute(DelegateHandle* handle, RecordingTracer* tracer = nullptr) {
    BackendExecutionContext context(tracer);
    return backend().execute(context, handle, {pointers.data(), pointers.size()});
  }

  std::vector<Bytes> data;
  std::vector<EValue*> pointers;

 private:
  // Lists, because their elements do not move.
  std::list<SizesType> sizes_;
  std::list<TensorImpl> tensors_;
  std::list<EValue> values_;
};

bool nothing_is_alive() {
  return record.devices == 0 && record.live_networks == 0 && record.live_buffers == 0 && record.inferences == 0;
}

Bytes part(const Bytes& bytes, size_t offset, size_t size) {
  const auto first = bytes.begin() + static_cast<Bytes::difference_type>(offset);
  return Bytes(first, first + static_cast<Bytes::difference_type>(size));
}

// ---- Tests

void tensors_are_at_offsets_of_payload() {
  const Payload payload;
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == Error::Ok);
  CHECK(record.opened == std::vector<std::string>{"/dev/ethosu0"});
  CHECK(record.networks == std::vector<Bytes>{payload.commands});
  CHECK((record.buffers == std::vector<size_t>{3, 4096, 24, 22}));
  script.npu = [](Regions& regions) {
    for (size_t i = 0; i < regions.outputs.size(); ++i) {
      regions.outputs[i] = static_cast<uint8_t>(regions.inputs[0] + i);
    }
  };
  for (uint8_t round = 0; round < 3; ++round) {
    Arguments arguments(payload);
    arguments.data[0] = {round, 1, 2, 3, 4, 5, 6, 7};
    arguments.data[1] = {10, 11, 12, 13, 14, 15, 16, round};
    CHECK(arguments.execute(handle) == Error::Ok);
    CHECK(record.started.size() == size_t{round} + 1);
    const Regions& seen = record.started.back();
    CHECK((seen.constants == Bytes{9, 8, 7}));
    CHECK(seen.intermediate.size() == 4096);
    CHECK(part(seen.inputs, 0, 8) == arguments.data[0]);
    CHECK(part(seen.inputs, 16, 8) == arguments.data[1]);
    const auto first = [round](int offset) { return static_cast<uint8_t>(round + offset); };
    CHECK((arguments.data[2] == Bytes{first(16), first(17), first(18), first(19), first(20), first(21)}));
    CHECK((part(arguments.data[3], 0, 2) == Bytes{first(0), first(1)}));
    CHECK(arguments.data[3].back() == first(7));
  }
  // All objects but inferences are created once.
  CHECK(record.networks.size() == 1 && record.buffers.size() == 4 && record.inferences == 0);
  CHECK(record.waits == std::vector<int64_t>(3, 60'000'000'000));
  backend().destroy(handle);
  CHECK(nothing_is_alive());
}

void single_tensor_fills_its_region() {
  Payload payload;
  payload.inputs = {{5, 4, 0, 3}};
  payload.outputs = {{5, 4, 0, 4}};
  payload.weights.clear();
  payload.scratch = 0;
  script.npu = [](Regions& regions) { regions.outputs = regions.inputs; };
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == Error::Ok);
  CHECK((record.buffers == std::vector<size_t>{20, 20}));  // the driver refuses buffers of 0 bytes
  for (uint8_t round = 0; round < 2; ++round) {
    Arguments arguments(payload);
    arguments.data[0].assign(20, round);
    CHECK(arguments.execute(handle) == Error::Ok);
    CHECK(arguments.data[1] == arguments.data[0]);
  }
  backend().destroy(handle);
}

void inputs_may_be_unused_and_outputs_repeated() {
  Payload payload;
  payload.inputs = {{4, 2, 0, 3}, {8, 1, -1, 3}};
  payload.outputs = {{8, 1, 0, 4}, {8, 1, 0, 4}};
  script.npu = [](Regions& regions) { regions.outputs = regions.inputs; };
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == Error::Ok);
  Arguments arguments(payload);
  arguments.data[0] = {1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(arguments.execute(handle) == Error::Ok);
  CHECK(record.started[0].inputs == arguments.data[0]);
  CHECK(arguments.data[2] == arguments.data[0] && arguments.data[3] == arguments.data[0]);
  backend().destroy(handle);

  payload.inputs.clear();
  payload.outputs = {{3, 1, 16, 4}};
  script.npu = [](Regions& regions) { regions.outputs.back() = 5; };
  CHECK(load(payload, &handle) == Error::Ok);
  Arguments none(payload);
  CHECK(none.execute(handle) == Error::Ok);
  CHECK((none.data[0] == Bytes{0, 0, 5}));
  backend().destroy(handle);
}

void device_and_timeout_are_configurable() {
  const Payload payload;
  DelegateHandle* handle = nullptr;
  char device[] = "/dev/ethosu3";
  int64_t timeout = 2'000'000;
  const std::vector<CompileSpec> specs{{"target", {device, 3}},
                                       {"ethosu.device", {device, sizeof(device)}},
                                       {"ethosu.timeout_ns", {&timeout, sizeof(timeout)}}};
  CHECK(load(payload, &handle, specs) == Error::Ok);
  Arguments arguments(payload);
  CHECK(arguments.execute(handle) == Error::Ok);
  backend().destroy(handle);
  setenv("ARM_RUNTIME_ETHOSU_DEVICE", "/dev/ethosu7", 1);
  setenv("ARM_RUNTIME_ETHOSU_TIMEOUT_MS", "3", 1);
  CHECK(load(payload, &handle, specs) == Error::Ok);
  CHECK(arguments.execute(handle) == Error::Ok);
  backend().destroy(handle);
  CHECK((record.opened == std::vector<std::string>{"/dev/ethosu3", "/dev/ethosu7"}));
  CHECK((record.waits == std::vector<int64_t>{2'000'000, 3'000'000}));

  for (const char* wrong : {"", "soon", "5s", "99999999999999999999", "9223372036854775807", "0", "-1"}) {
    setenv("ARM_RUNTIME_ETHOSU_TIMEOUT_MS", wrong, 1);
    CHECK(load(payload, &handle) == Error::InvalidArgument);
    CHECK(logged(*wrong == '0' || *wrong == '-' ? "must be positive" : "ARM_RUNTIME_ETHOSU_TIMEOUT_MS"));
  }
  unsetenv("ARM_RUNTIME_ETHOSU_TIMEOUT_MS");
  setenv("ARM_RUNTIME_ETHOSU_DEVICE", "", 1);
  CHECK(load(payload, &handle) == Error::InvalidArgument);
  CHECK(logged("ARM_RUNTIME_ETHOSU_DEVICE"));
  unsetenv("ARM_RUNTIME_ETHOSU_DEVICE");
  CHECK(load(payload, &handle, {{"ethosu.timeout_ns", {&timeout, 4}}}) == Error::InvalidArgument);
  CHECK(logged("ethosu.timeout_ns"));
  CHECK(load(payload, &handle, {{"ethosu.device", {nullptr, 0}}}) == Error::InvalidArgument);
  CHECK(logged("is empty"));
}

void refuses(const Payload& payload, Error error, const char* part_of_log) {
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == error);
  CHECK(logged(part_of_log));
  CHECK(nothing_is_alive());
}

void counters_are_configurable() {
  const Payload payload;
  DelegateHandle* handle = nullptr;
  Arguments arguments(payload);
  RecordingTracer tracer;
  const auto npu = [&] { return tracer.events.at(tracer.events.size() - 2); };
  uint8_t on = 1, off = 0;
  uint32_t first = 17, last = 35;

  CHECK(load(payload, &handle) == Error::Ok && arguments.execute(handle) == Error::Ok);
  CHECK(!record.counts_cycles && record.events == std::vector<uint32_t>(4, 0));
  CHECK(arguments.execute(handle, &tracer) == Error::Ok && record.counts_cycles);
  CHECK((tracer.events ==
         std::vector<std::string>{"EthosUBackend npu: npu_cycles=12345678901", "EthosUBackend execute"}));
  backend().destroy(handle);

  CHECK(load(payload, &handle,
             {{"ethosu.enable_cycle_counter", {&on, 1}},
              {"ethosu.pmu_event3", {&last, 4}},
              {"ethosu.pmu_event0", {&first, 4}}}) == Error::Ok);
  CHECK(arguments.execute(handle) == Error::Ok);
  CHECK((record.counts_cycles && record.events == std::vector<uint32_t>{17, 0, 0, 35}));
  CHECK(arguments.execute(handle, &tracer) == Error::Ok);
  CHECK(npu() == "EthosUBackend npu: npu_cycles=12345678901 pmu_event0=17000 pmu_event3=35000");
  script.throws = Call::kCounters;
  CHECK(arguments.execute(handle, &tracer) == Error::AccessFailed && tracer.open == 0);
  CHECK(logged("an inference on /dev/ethosu0 failed"));
  script.throws = Call::kNone;
  backend().destroy(handle);

  CHECK(load(payload, &handle, {{"ethosu.enable_cycle_counter", {&off, 1}}}) == Error::Ok);
  CHECK(arguments.execute(handle, &tracer) == Error::Ok && !record.counts_cycles);
  CHECK(npu() == "EthosUBackend npu");
  backend().destroy(handle);

  for (const char* key : {"ethosu.pmu_event4", "ethosu.pmu_event", "ethosu.pmu_event-1", "ethosu.pmu_event1x"}) {
    CHECK(load(payload, &handle, {{key, {&first, 4}}}) == Error::InvalidArgument);
    CHECK(logged("the counters of an inference are ethosu.pmu_event0 to ethosu.pmu_event3"));
  }
  CHECK(load(payload, &handle, {{"ethosu.pmu_event1", {&first, 3}}}) == Error::InvalidArgument);
  CHECK(logged("compile spec ethosu.pmu_event1 has 3 bytes; it must be a uint32"));
  CHECK(load(payload, &handle, {{"ethosu.enable_cycle_counter", {&first, 4}}}) == Error::InvalidArgument);
  CHECK(logged("compile spec ethosu.enable_cycle_counter has 4 bytes; it must be a byte"));
}

void loading_is_traced() {
  const Bytes bytes = Payload{}.bytes();
  RecordingTracer tracer;
  BackendInitContext context(nullptr, &tracer);
  FreeableBuffer processed(bytes.data(), bytes.size(), nullptr);
  const auto handle = backend().init(context, &processed, {});
  CHECK(handle.ok());
  CHECK(tracer.events == std::vector<std::string>{"EthosUBackend load"});
  backend().destroy(*handle);
}

void incompatible_payloads_are_refused() {
  Payload payload;
  payload.commands = cop2(0x10000108);
  refuses(payload, Error::DelegateInvalidCompatibility, "Ethos-U65");
  payload.inputs = {{8, 1, 0, 1}};
  payload.outputs = {{8, 1, 16, 1}};
  payload.commands = cop1();
  refuses(payload, Error::DelegateInvalidCompatibility, "COP1");
  payload.commands = cop2(kU85With256Macs, 1);
  refuses(payload, Error::DelegateInvalidCompatibility, "inputs and outputs in the scratch region");
  payload = Payload{};
  payload.commands.resize(40);
  refuses(payload, Error::InvalidProgram, "cmd_data");
  payload = Payload{};
  payload.outputs[1].offset = -1;
  refuses(payload, Error::InvalidProgram, "output 1 is at offset -1");
  payload = Payload{};
  payload.inputs[1].region = 1;
  refuses(payload, Error::InvalidProgram, "input 1 is at offset 16 of region 1");
  payload = Payload{};
  payload.outputs.clear();
  refuses(payload, Error::InvalidProgram, "no outputs");
  CHECK(record.opened.empty());  // payloads are checked before the device is opened

  payload = Payload{};
  script.capabilities.hwCfg.macsPerClockCycle = 9;
  refuses(payload, Error::DelegateInvalidCompatibility, "256 MACs per cycle, but /dev/ethosu0 has 512");
  script.capabilities.hwCfg.type = EthosU::HardwareConfiguration::DeviceType::SUBSYSTEM;
  refuses(payload, Error::NotSupported, "not an NPU in Direct Drive");
}

void checksums_are_checked() {
  Bytes bytes = Payload{}.bytes();
  uint32_t recorded = crc32(bytes.data(), bytes.size());
  const CompileSpec whole{"payload_crc32", {&recorded, 4}};
  DelegateHandle* handle = nullptr;
  CHECK(load(bytes, &handle, {whole}) == Error::Ok);
  backend().destroy(handle);
  record.opened.clear();
  bytes[bytes.size() / 2] ^= 0x10;
  CHECK(load(bytes, &handle, {whole}) == Error::InvalidProgram);
  CHECK(logged("has changed since it was exported"));
  CHECK(load(Payload{}, &handle, {{"payload_crc32", {&recorded, 3}}}) == Error::InvalidProgram);
  CHECK(logged("a compile spec payload_crc32 of 3 bytes, not 4: export or flash the program again"));
  CHECK(record.opened.empty());
}

void truncated_payloads_are_refused() {
  const Bytes whole = Payload{}.bytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    DelegateHandle* handle = nullptr;
    CHECK(load(Bytes(whole.begin(), whole.begin() + static_cast<Bytes::difference_type>(size)), &handle) ==
          Error::InvalidProgram);
    CHECK(logged("malformed"));
  }
}

void driver_exceptions_become_errors() {
  const Payload payload;
  for (const bool strange : {false, true}) {
    for (const Call call : {Call::kOpen, Call::kCapabilities, Call::kNetwork, Call::kBuffers, Call::kWrite}) {
      script.throws = call;
      script.throws_int = strange;
      DelegateHandle* handle = nullptr;
      CHECK(load(payload, &handle) == Error::AccessFailed);
      CHECK(logged(strange ? "no reason" : "loading a program on /dev/ethosu0 failed: the fake driver was told"));
      CHECK(nothing_is_alive());
    }
    script.throws = Call::kNone;
    DelegateHandle* handle = nullptr;
    CHECK(load(payload, &handle) == Error::Ok);
    Arguments arguments(payload);
    for (const Call call : {Call::kWrite, Call::kStart, Call::kWait, Call::kStatus, Call::kRead}) {
      script.throws = call;
      CHECK(arguments.execute(handle) == Error::AccessFailed);
      CHECK(logged(strange ? "an inference on /dev/ethosu0 failed" : "the fake driver was told to fail"));
      CHECK(record.inferences == 0);
      script.throws = Call::kNone;
      CHECK(arguments.execute(handle) == Error::Ok);
    }
    script.throws = Call::kCloseInference;  // after its result has been read
    CHECK(arguments.execute(handle) == Error::Ok);
    CHECK(logged("failed to release"));
    script.throws = strange ? Call::kCloseNetwork : Call::kCloseDevice;
    backend().destroy(handle);
    CHECK(logged("failed to release"));
    CHECK(nothing_is_alive());
  }
}

void failed_inferences_are_reported() {
  const Payload payload;
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == Error::Ok);
  Arguments arguments(payload);
  const std::pair<EthosU::InferenceStatus, const char*> cases[] = {
      {EthosU::InferenceStatus::ERROR, "stopped with a fault"},
      {EthosU::InferenceStatus::REJECTED, "rejected"},
      {EthosU::InferenceStatus::ABORTED, "aborted"},
      {EthosU::InferenceStatus::ABORTING, "aborting"},
      {EthosU::InferenceStatus::RUNNING, "running"},
      {EthosU::InferenceStatus::PENDING, "pending"},
      {static_cast<EthosU::InferenceStatus>(99), "unknown"}};
  for (const auto& [status, text] : cases) {
    script.status = status;
    CHECK(arguments.execute(handle) == Error::Internal);
    CHECK(logged(text));
  }
  script.status = EthosU::InferenceStatus::OK;
  script.times_out = true;
  CHECK(arguments.execute(handle) == Error::InvalidState);
  CHECK(logged("no result from /dev/ethosu0 after 60000 ms"));
  CHECK(record.inferences == 0);               // destroying the inference stops it
  CHECK(arguments.data[2] == Bytes(6, 0xEE));  // a failure writes no outputs
  script.times_out = false;
  CHECK(arguments.execute(handle) == Error::Ok);
  backend().destroy(handle);
}

void signals_do_not_end_the_wait() {
  const Payload payload;
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == Error::Ok);
  script.signals = 2;
  Arguments arguments(payload);
  CHECK(arguments.execute(handle) == Error::Ok);
  CHECK(record.waits.size() == 3 && record.waits[0] > record.waits[1] && record.waits[1] > record.waits[2]);
  backend().destroy(handle);
  int64_t timeout = 1;
  CHECK(load(payload, &handle, {{"ethosu.timeout_ns", {&timeout, sizeof(timeout)}}}) == Error::Ok);
  script.signals = 1000;
  CHECK(arguments.execute(handle) == Error::InvalidState);
  CHECK(logged("no result"));
  backend().destroy(handle);
}

void wrong_arguments_are_refused() {
  const Payload payload;
  DelegateHandle* handle = nullptr;
  CHECK(load(payload, &handle) == Error::Ok);
  Arguments few(payload), many(payload), other(payload);
  few.pointers.pop_back();
  CHECK(few.execute(handle) == Error::InvalidArgument);
  CHECK(logged("3 arguments; compiled for 2 inputs and 2 outputs"));
  many.add({1, 1, 0, 0});
  CHECK(many.execute(handle) == Error::InvalidArgument);
  CHECK(logged("5 arguments"));
  EValue number(int64_t{1});
  other.pointers[1] = &number;
  CHECK(other.execute(handle) == Error::InvalidArgument);
  CHECK(logged("input 1 is not a tensor"));
  const struct {
    SizesType elements;
    ScalarType type;
    size_t bytes, place;
    const char* text;
  } cases[] = {{7, ScalarType::Char, 7, 0, "input 0 has 7 bytes of Char; compiled for 8 bytes"},
               {4, ScalarType::Short, 8, 0, "input 0 has 8 bytes of Short"},
               {2, ScalarType::Float, 8, 3, "output 1 has 8 bytes of Float"}};
  for (const auto& wrong : cases) {
    Arguments arguments(payload);
    arguments.add(wrong.elements, wrong.type, wrong.bytes);
    arguments.pointers[wrong.place] = arguments.pointers.back();
    arguments.pointers.pop_back();
    CHECK(arguments.execute(handle) == Error::InvalidArgument);
    CHECK(logged(wrong.text));
  }
  CHECK(record.started.empty());
  backend().destroy(handle);
}

void programs_share_no_buffers() {
  Payload payload;
  payload.inputs = {{4, 1, 0, 3}};
  payload.outputs = {{4, 1, 0, 4}};
  Payload other = payload;
  other.weights = {1};
  script.npu = [](Regions& regions) {
    regions.outputs = regions.inputs;
    regions.outputs[0] = regions.constants[0];
  };
  DelegateHandle *first = nullptr, *second = nullptr;
  CHECK(load(payload, &first) == Error::Ok && load(other, &second) == Error::Ok);
  Arguments a(payload), b(other);
  CHECK(a.execute(first) == Error::Ok && b.execute(second) == Error::Ok);
  backend().destroy(first);
  CHECK(b.execute(second) == Error::Ok);
  CHECK(a.data[1][0] == 9 && b.data[1][0] == 1);
  backend().destroy(second);
  CHECK(nothing_is_alive());
}

// ---- A whole program

// Data of input `i` in a round. The elements of a float input increase, so that the quantized elements increase too.
Bytes input_data(const executorch::runtime::TensorInfo& info, uint32_t i, int round) {
  Bytes data(info.nbytes());
  if (info.scalar_type() == ScalarType::Float) {
    const size_t count = data.size() / sizeof(float);
    for (size_t k = 0; k < count; ++k) {
      const float value = -3.0F + 6.0F * static_cast<float>(k) / static_cast<float>(count);
      std::memcpy(&data[k * sizeof(float)], &value, sizeof(float));
    }
  } else {
    for (size_t k = 0; k < data.size(); ++k) {
      data[k] = static_cast<uint8_t>(k + 31 * i + static_cast<size_t>(round));
    }
  }
  return data;
}

void check_input(const executorch::runtime::TensorInfo& info, const Bytes& data, const Bytes& seen) {
  if (info.scalar_type() != ScalarType::Float) {
    CHECK(seen == data);
    return;
  }
  CHECK(seen.size() * sizeof(float) == data.size());
  const auto value = [&seen](size_t k) { return static_cast<int8_t>(seen[k]); };
  for (size_t k = 1; k < seen.size(); ++k) {
    CHECK(value(k - 1) <= value(k));
  }
  CHECK(value(seen.size() - 1) - value(0) > 100);
}

// A float output is (integer - zero point) * scale; two elements determine both parameters.
void check_output(const Tensor& tensor, const Bytes& npu) {
  if (tensor.scalar_type() != ScalarType::Float) {
    CHECK(tensor.nbytes() == npu.size() && std::memcmp(tensor.const_data_ptr(), npu.data(), npu.size()) == 0);
    return;
  }
  CHECK(tensor.nbytes() == npu.size() * sizeof(float));
  const auto* values = tensor.const_data_ptr<float>();
  const auto integer = [&npu](size_t k) { return static_cast<float>(static_cast<int8_t>(npu[k])); };
  const float scale = (values[1] - values[0]) / (integer(1) - integer(0));
  CHECK(scale > 0);
  for (size_t k = 0; k < npu.size(); ++k) {
    CHECK(std::abs(values[k] - values[0] - scale * (integer(k) - integer(0))) < scale / 100);
  }
}

// Byte that the fake NPU writes to this address of the output region.
uint8_t output_byte(uint64_t address) { return static_cast<uint8_t>(7 * address + 3); }

void run_program(const char* path) {
  using namespace executorch::runtime;
  using executorch::extension::BufferDataLoader;
  using executorch::extension::MallocMemoryAllocator;
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The program contains the payload unchanged: find it to get the placement of tensors.
  const std::string text(bytes.begin(), bytes.end());
  const size_t start = text.find("vela_bin_stream");
  const size_t end = text.find("vela_end_stream");
  CHECK(start != std::string::npos && end != std::string::npos);
  EthosUPayload payload;
  CHECK(read_ethosu_payload(bytes.data() + start, end + 32 - start, &payload).ok());
  script.npu = [](Regions& regions) {
    for (size_t i = 0; i < regions.outputs.size(); ++i) {
      regions.outputs[i] = output_byte(i);
    }
  };
  BufferDataLoader loader(bytes.data(), bytes.size());
  auto program = Program::load(&loader);
  CHECK(program.ok());
  auto meta = program->method_meta("forward");
  CHECK(meta.ok());
  std::vector<Bytes> planned;
  std::vector<Span<uint8_t>> spans;
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
    planned.emplace_back(static_cast<size_t>(*meta->memory_planned_buffer_size(i)));
    spans.emplace_back(planned.back().data(), planned.back().size());
  }
  HierarchicalAllocator planned_memory({spans.data(), spans.size()});
  MallocMemoryAllocator allocator, temporary;
  MemoryManager memory(&allocator, &planned_memory, &temporary);
  {
    auto method = program->load_method("forward", &memory);
    CHECK(method.ok());
    CHECK(method->inputs_size() == payload.inputs.count() && method->outputs_size() == payload.outputs.count());
    for (int round = 0; round < 3; ++round) {
      Arguments arguments(Payload{Bytes{}, Bytes{}, 0, {}, {}});
      for (uint32_t i = 0; i < payload.inputs.count(); ++i) {
        const auto info = method->method_meta().input_tensor_meta(i);
        Bytes data = input_data(*info, i, round);
        std::vector<SizesType> sizes(info->sizes().begin(), info->sizes().end());
        std::vector<TensorImpl::DimOrderType> order(info->dim_order().begin(), info->dim_order().end());
        std::vector<TensorImpl::StridesType> strides(sizes.size(), 1);
        for (size_t d = sizes.size() - 1; d > 0; --d) {
          strides[order[d - 1]] = strides[order[d]] * sizes[order[d]];
        }
        TensorImpl impl(info->scalar_type(), static_cast<ssize_t>(sizes.size()), sizes.data(), data.data(),
                        order.data(), strides.data());
        CHECK(method->set_input(EValue(Tensor(&impl)), i) == Error::Ok);
        arguments.data.push_back(data);
      }
      CHECK(method->execute() == Error::Ok);
      for (uint32_t i = 0; i < payload.inputs.count(); ++i) {
        const PayloadTensor tensor = payload.inputs.at(i);
        check_input(*method->method_meta().input_tensor_meta(i), arguments.data[i],
                    part(record.started.back().inputs, static_cast<size_t>(tensor.offset), tensor.nbytes));
      }
      for (uint32_t i = 0; i < payload.outputs.count(); ++i) {
        const PayloadTensor place = payload.outputs.at(i);
        Bytes npu(place.nbytes);
        for (size_t k = 0; k < npu.size(); ++k) {
          npu[k] = output_byte(static_cast<uint64_t>(place.offset) + k);
        }
        check_output(method->get_output(i).toTensor(), npu);
      }
    }
  }
  CHECK(record.networks.size() == 1 && record.networks[0].size() == payload.commands.size);
  CHECK(record.started.back().constants.size() == payload.weights.size);
  CHECK(record.started.back().intermediate.size() == payload.scratch_size);
  CHECK(nothing_is_alive() && log_lines.empty());
}

}  // namespace

int main(int count, char** arguments) {
  executorch::runtime::runtime_init();
  CHECK(executorch::runtime::register_pal(executorch::runtime::PalImpl::create(record_errors, __FILE__)));
  if (count == 2) {
    run_program(arguments[1]);
    std::puts("ok");
    return 0;
  }
  const std::pair<const char*, void (*)()> tests[] = {
#define TEST(name) {#name, name}
      TEST(tensors_are_at_offsets_of_payload),
      TEST(single_tensor_fills_its_region),
      TEST(inputs_may_be_unused_and_outputs_repeated),
      TEST(device_and_timeout_are_configurable),
      TEST(counters_are_configurable),
      TEST(loading_is_traced),
      TEST(incompatible_payloads_are_refused),
      TEST(checksums_are_checked),
      TEST(truncated_payloads_are_refused),
      TEST(driver_exceptions_become_errors),
      TEST(failed_inferences_are_reported),
      TEST(signals_do_not_end_the_wait),
      TEST(wrong_arguments_are_refused),
      TEST(programs_share_no_buffers),
#undef TEST
  };
  for (const auto& [name, test] : tests) {
    fake_driver::reset();
    log_lines.clear();
    test();
    CHECK(log_lines.empty());
    std::printf("%s ok\n", name);
  }
  return 0;
}
