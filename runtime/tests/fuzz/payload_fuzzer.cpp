// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the payload reader through its C interface and checks the properties of accepted payloads.
// Build: clang++-14 -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Iruntime
//        runtime/tests/fuzz/payload_fuzzer.cpp runtime/payload/ethosu_payload.cpp
//        runtime/tests/payload/payload_abi.cpp
// Run:   ./a.out -dict=runtime/tests/fuzz/payload.dict -max_len=4096 new/ runtime/tests/fuzz/corpus/
// Corpus: the fuzzer found the files whose name is a hash. Other files are compiled programs (u55_..., u65_...,
// u85_..., cop2...) or written by hand. -merge=1 corpus/ new/ adds inputs that reach new code.

#include <cstdint>
#include <cstring>

#include "tests/payload/payload_abi.h"

namespace {

void require(bool holds) {
  if (!holds) {
    __builtin_trap();
  }
}

// Reads every byte, for the address sanitizer.
void touch(const uint8_t* data, uint64_t size) {
  volatile uint8_t sum = 0;
  for (uint64_t i = 0; i < size; ++i) {
    sum = static_cast<uint8_t>(sum + data[i]);
  }
}

void check_tensor(const arm_payload_info& info, const arm_payload_tensor& tensor) {
  uint64_t nbytes = static_cast<uint64_t>(tensor.element_size);
  for (const int32_t extent : tensor.shape) {
    require(extent > 0);
    nbytes *= static_cast<uint64_t>(extent);
    require(nbytes <= UINT32_MAX);
  }
  require(tensor.offset >= -1);
  require(tensor.region == 1 || info.stream_kind == 2);
  if (tensor.region == 1 && tensor.offset >= 0) {
    require(static_cast<uint64_t>(tensor.offset) + nbytes <= info.scratch_size);
  }
}

void check_tensors(const uint8_t* data, uint64_t size, const arm_payload_info& info, int32_t side, uint32_t count) {
  arm_payload_tensor tensor;
  // Check at most 16 tensors, because each call reads the payload again.
  const uint32_t step = count / 16 + 1;
  for (uint32_t i = 0; i < count; i += step) {
    require(arm_payload_tensor_at(data, size, side, i, &tensor) == 0);
    check_tensor(info, tensor);
  }
  require(arm_payload_tensor_at(data, size, side, count, &tensor) != 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  arm_payload_info info;
  char message[128];
  const uint64_t message_size = size % (sizeof(message) + 1);
  std::memset(message, 0x7F, sizeof(message));
  if (arm_payload_read(data, size, &info, message, message_size) != 0) {
    require(message_size == 0 || std::memchr(message, 0, message_size) != nullptr);
    arm_payload_tensor tensor;
    require(arm_payload_tensor_at(data, size, 0, 0, &tensor) != 0);
    return 0;
  }
  require(info.command_offset + info.command_size <= size && info.weight_offset + info.weight_size <= size);
  touch(data + info.command_offset, info.command_size);
  touch(data + info.weight_offset, info.weight_size);
  check_tensors(data, size, info, 0, info.input_count);
  check_tensors(data, size, info, 1, info.output_count);
  return 0;
}
