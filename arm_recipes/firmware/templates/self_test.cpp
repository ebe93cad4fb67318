// SPDX-License-Identifier: Apache-2.0
//
// Runs the program on what golden.h has and compares, in pools of exactly the sizes in model.h. It is how firmware loads
// and runs the program, too: copy from it what you need. Made by arm_recipes; made again with each export.
//
// The firmware calls arm_model_self_test() when clocks, memory and NPU are on: ethosu_init() comes before it. With
// ARM_MODEL_SELF_TEST_MAIN this file has a main() that does nothing but that.
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "arm_model_layout.h"
#include "firmware/model_method.h"
#include "golden.h"
#include "model.h"
#include "common/checksum.h"
#include "payload/ethosu_payload.h"

static_assert(ARM_MODEL_PAYLOAD_FORMAT == arm_runtime::kPayloadFormat,
              "model.pte has payloads of another format than the backend reads: save the firmware again, and build it "
              "with the backend in its folder");
// CMakeLists.txt finds these out; other builds may define them.
#if defined(ARM_MODEL_BUILT_WITH_MAJOR) && defined(ARM_MODEL_BUILT_WITH_MINOR)
static_assert(ARM_MODEL_EXECUTORCH_MAJOR == ARM_MODEL_BUILT_WITH_MAJOR &&
                  ARM_MODEL_EXECUTORCH_MINOR == ARM_MODEL_BUILT_WITH_MINOR,
              "model.pte was exported with another minor version of ExecuTorch than the firmware is built with: use "
              "that of ARM_MODEL_EXECUTORCH_VERSION, or export again");
#endif

// Where the pools are. The NPU reads and writes the temp pool and the fast scratch, and reads the program.
#ifndef ARM_MODEL_TEMP_SECTION
#define ARM_MODEL_TEMP_SECTION ".bss.arm_model_temp"
#endif
#ifndef ARM_MODEL_FAST_SCRATCH_SECTION
#define ARM_MODEL_FAST_SCRATCH_SECTION ".bss.arm_model_fast_scratch"
#endif
#ifndef ARM_MODEL_POOL_SECTION
#define ARM_MODEL_POOL_SECTION ".bss.arm_model_pools"
#endif

namespace {

using arm_runtime::ModelMethod;
using executorch::runtime::Error;
using executorch::runtime::Program;

constexpr size_t kMethods = ARM_MODEL_METHOD_COUNT;
constexpr size_t kShared = ARM_MODEL_SHARED_COUNT;
constexpr size_t kPoolSizes[] = ARM_MODEL_METHOD_POOL_SIZES;
constexpr size_t kPlannedSizes[] = ARM_MODEL_PLANNED_SIZES;
constexpr size_t kSharedSizes[kShared + 1] = ARM_MODEL_SHARED_SIZES;

constexpr size_t aligned(size_t size) {
  return (size + ARM_MODEL_POOL_ALIGNMENT - 1) / ARM_MODEL_POOL_ALIGNMENT * ARM_MODEL_POOL_ALIGNMENT;
}

// For an array, which is never of nothing.
constexpr size_t room(size_t size) { return size == 0 ? ARM_MODEL_POOL_ALIGNMENT : aligned(size); }

constexpr size_t room(const size_t* sizes, size_t count) {
  size_t all = 0;
  for (size_t i = 0; i < count; ++i) {
    all += aligned(sizes[i]);
  }
  return room(all);
}

ARM_MODEL_PLACED(ARM_MODEL_TEMP_SECTION, ARM_MODEL_POOL_ALIGNMENT) uint8_t temp_pool[room(ARM_MODEL_TEMP_POOL_SIZE)];
ARM_MODEL_PLACED(ARM_MODEL_POOL_SECTION, ARM_MODEL_POOL_ALIGNMENT) uint8_t pools[room(kPoolSizes, kMethods)];
ARM_MODEL_PLACED(ARM_MODEL_POOL_SECTION, ARM_MODEL_POOL_ALIGNMENT) uint8_t planned[room(kPlannedSizes, kMethods)];
ARM_MODEL_PLACED(ARM_MODEL_POOL_SECTION, ARM_MODEL_POOL_ALIGNMENT) uint8_t shared[room(kSharedSizes, kShared)];
#if ARM_MODEL_FAST_SCRATCH_SIZE > 0
ARM_MODEL_PLACED(ARM_MODEL_FAST_SCRATCH_SECTION, ARM_MODEL_POOL_ALIGNMENT)
uint8_t fast_scratch[room(ARM_MODEL_FAST_SCRATCH_SIZE)];
#endif

ModelMethod::Bytes memories[kMethods][kShared + 1];

// Takes `size` bytes of a pool, and leaves the next at their end.
ModelMethod::Bytes take(uint8_t** next, size_t size) {
  uint8_t* start = *next;
  *next += aligned(size);
  return {start, size};
}

bool failed(const char* what, const char* name, Error error) {
  std::printf("self-test: %s %s: error 0x%02lx of ExecuTorch; the lines above tell why, where logging is on\n", what,
              name, static_cast<unsigned long>(error));
  return false;
}

bool load(const Program& program, executorch::runtime::MemoryAllocator* temp, ModelMethod* methods) {
  ModelMethod::Bytes of_all[kShared + 1];
  uint8_t* next = shared;
  for (size_t i = 0; i < kShared; ++i) {
    of_all[i] = take(&next, kSharedSizes[i]);
  }
  uint8_t *next_pool = pools, *next_planned = planned;
  for (size_t m = 0; m < kMethods; ++m) {
    memories[m][0] = take(&next_planned, kPlannedSizes[m]);
    std::copy_n(of_all, kShared, memories[m] + 1);
    const Error error = methods[m].load(program, arm_model_methods[m].name, take(&next_pool, kPoolSizes[m]),
                                        {memories[m], kShared + 1}, temp);
    if (error != Error::Ok) {
      return failed("cannot load the method", arm_model_methods[m].name, error);
    }
  }
  return true;
}

bool equal(const arm_model_tensor& tensor, const uint8_t* seen, const uint8_t* expected) {
  if (std::memcmp(seen, expected, tensor.bytes) == 0) {
    return true;
  }
  const bool is_float = tensor.scalar_type == static_cast<int8_t>(executorch::aten::ScalarType::Float);
  if (!is_float) {
    return false;
  }
  for (size_t at = 0; at < tensor.bytes; at += sizeof(float)) {
    float a = 0, b = 0;
    std::memcpy(&a, seen + at, sizeof(a));
    std::memcpy(&b, expected + at, sizeof(b));
    const bool near = std::fabs(a - b) <= ARM_MODEL_FLOAT_TOLERANCE * std::fmax(1.0f, std::fabs(b));
    if (!near && !(std::isnan(a) && std::isnan(b))) {
      return false;
    }
  }
  return true;
}

bool run(const arm_model_case& given, unsigned long number, ModelMethod* methods) {
  const arm_model_method& method = arm_model_methods[given.method];
  ModelMethod& loaded = methods[given.method];
  for (uint32_t i = 0; i < method.input_count; ++i) {
    const arm_model_tensor& input = method.inputs[i];
    const arm_runtime::TensorMetadata form = {static_cast<executorch::aten::ScalarType>(input.scalar_type), input.rank,
                                          input.shape, input.dim_order};
    const Error error = loaded.set_input(i, form, given.inputs[i]);
    if (error != Error::Ok) {
      return failed("cannot set the input", input.name, error);
    }
  }
  const Error error = loaded.execute();
  if (error != Error::Ok) {
    return failed("cannot run the method", method.name, error);
  }
  for (uint32_t i = 0; i < method.output_count; ++i) {
    const arm_model_tensor& output = method.outputs[i];
    const auto seen = loaded.output(i);
    if (seen.data() == nullptr || seen.size() != output.bytes) {
      std::printf("self-test: output %s has %lu bytes, model.h tells %lu: it is of another export\n", output.name,
                  static_cast<unsigned long>(seen.size()), static_cast<unsigned long>(output.bytes));
      return false;
    }
    if (!equal(output, seen.data(), given.outputs[i])) {
      std::printf("self-test: case %lu: output %s differs from what it was at export\n", number, output.name);
      return false;
    }
  }
  return true;
}

// The program in memory is the one that model.h tells of.
bool check_program() {
  const uint32_t crc = arm_runtime::crc32(arm_model_pte, ARM_MODEL_PTE_SIZE);
  if (crc != ARM_MODEL_PTE_CRC32) {
    std::printf("self-test: the program in memory has CRC-32 %08lx, model.h tells %08lx: build or flash all files of "
                "one export\n",
                static_cast<unsigned long>(crc), static_cast<unsigned long>(ARM_MODEL_PTE_CRC32));
  }
  return crc == ARM_MODEL_PTE_CRC32;
}

}  // namespace

extern "C" {
#if ARM_MODEL_FAST_SCRATCH_SIZE > 0
// Take the place of the backend's weak ones.
unsigned char* ethosu_fast_scratch = fast_scratch;
size_t ethosu_fast_scratch_size = ARM_MODEL_FAST_SCRATCH_SIZE;
#endif

// 0 where all is as it was at export; otherwise what differs is printed.
int arm_model_self_test(void);
int arm_model_self_test(void) {
  executorch::runtime::runtime_init();
  std::printf("self-test: %s, Vela %s, ExecuTorch %s\n", ARM_MODEL_NPU, ARM_MODEL_VELA_VERSION,
              ARM_MODEL_EXECUTORCH_VERSION);
  if (!check_program()) {
    return 1;
  }
  executorch::extension::BufferDataLoader loader(arm_model_pte, ARM_MODEL_PTE_SIZE);
  const auto program = Program::load(&loader);
  if (!program.ok()) {
    failed("cannot load", "the program", program.error());
    return 1;
  }
  arm_runtime::PeakAllocator temp(ARM_MODEL_TEMP_POOL_SIZE, temp_pool);
  ModelMethod methods[kMethods];
  if (!load(*program, &temp, methods)) {
    return 1;
  }
  for (unsigned long i = 0; i < ARM_MODEL_CASE_COUNT; ++i) {
    if (!run(arm_model_cases[i], i, methods)) {
      return 1;
    }
  }
  for (size_t m = 0; m < kMethods; ++m) {
    std::printf("self-test: method %s used %lu of %lu bytes of its pool\n", arm_model_methods[m].name,
                static_cast<unsigned long>(methods[m].pool_used()), static_cast<unsigned long>(kPoolSizes[m]));
  }
  std::printf("self-test: %lu of %lu bytes of the temp pool\n", static_cast<unsigned long>(temp.peak()),
              static_cast<unsigned long>(ARM_MODEL_TEMP_POOL_SIZE));
  std::printf("self-test: ok, %d cases\n", ARM_MODEL_CASE_COUNT);
  return 0;
}

}  // extern "C"

#ifdef ARM_MODEL_SELF_TEST_MAIN
int main() { return arm_model_self_test(); }
#endif
