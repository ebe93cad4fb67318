// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

// The emulator for other languages.

#ifdef __cplusplus
extern "C" {
#endif

typedef struct arm_npu_program arm_npu_program;

// Loads a command stream with its header. `sizes` are those of 8 regions, at most; `weights`, of sizes[0] bytes,
// must outlive the program. Returns NULL with the reason in `message`: NUL-terminated, cut off at `message_size`
// bytes.
__attribute__((visibility("default"))) arm_npu_program* arm_npu_load(const void* stream, uint64_t stream_size,
                                                                     const void* weights, const uint64_t* sizes,
                                                                     char* message, uint64_t message_size);

// Executes it over 8 regions of these sizes, or of what it reaches of them; not in two threads at once. Returns 0, or a
// number with the reason in `message`.
__attribute__((visibility("default"))) int32_t arm_npu_execute(arm_npu_program* program, void* const* regions,
                                                               char* message, uint64_t message_size);

// One past the last byte of a region that executing it touches: the region need not have more.
__attribute__((visibility("default"))) uint64_t arm_npu_reach(const arm_npu_program* program, int32_t region);

__attribute__((visibility("default"))) void arm_npu_free(arm_npu_program* program);

#ifdef __cplusplus
}
#endif
