// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

// C interface of the payload reader for the fuzzer and for tests that compare it with the reader in Python. It keeps no
// state between calls.

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t shape[6];
  int32_t element_size;
  int64_t offset;  // bytes into the region; -1: not allocated
  int32_t region;
} arm_payload_tensor;

typedef struct {
  // Byte offsets from the start of the payload.
  uint64_t command_offset, command_size, weight_offset, weight_size, scratch_size, fast_scratch_size;
  uint32_t input_count, output_count;
  uint32_t product;      // 55, 65 or 85
  uint32_t macs;         // multiply-accumulates per cycle
  uint32_t stream_kind;  // 1: COP1, 2: COP2
} arm_payload_info;

// Reads and validates a payload. Returns 0, or the number of an arm_runtime::PayloadError with the reason in `message`.
// The message is NUL-terminated and truncated to `message_size` bytes, which may be 0.
__attribute__((visibility("default"))) int32_t arm_payload_read(const void* data, uint64_t size, arm_payload_info* info,
                                                                char* message, uint64_t message_size);

// Describes an input (`side` 0) or output (1). Returns 0, or nonzero if there is no such tensor or the payload is not
// valid.
__attribute__((visibility("default"))) int32_t arm_payload_tensor_at(const void* data, uint64_t size, int32_t side,
                                                                     uint32_t index, arm_payload_tensor* tensor);

#ifdef __cplusplus
}
#endif
