// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

// The emulator for other languages.

#ifdef __cplusplus
extern "C" {
#endif

typedef struct arm_npu_program arm_npu_program;

// What is wrong, NUL-terminated, cut off where it is longer; and the byte of the stream with the command that it is
// about, counted from the stream's header: 0 if it is about none.
typedef struct {
  uint64_t offset;
  char text[512];
} arm_npu_message;

// Loads a command stream with its header. `sizes` are those of 8 regions, at most; `weights`, of sizes[0] bytes,
// must outlive the program. Returns NULL with the reason in `message`.
__attribute__((visibility("default"))) arm_npu_program* arm_npu_load(const void* stream, uint64_t stream_size,
                                                                     const void* weights, const uint64_t* sizes,
                                                                     arm_npu_message* message);

// Executes it over 8 regions of these sizes, or of what it reaches of them; not in two threads at once. Returns 0, or a
// number with the reason in `message`.
__attribute__((visibility("default"))) int32_t arm_npu_execute(arm_npu_program* program, void* const* regions,
                                                               arm_npu_message* message);

// One past the last byte of a region that executing it touches: the region need not have more.
__attribute__((visibility("default"))) uint64_t arm_npu_reach(const arm_npu_program* program, int32_t region);

// Bytes of a region.
typedef struct {
  uint64_t region, offset, size;
} arm_npu_span;

// What the watch finds; as bits, those that make an execution fail instead of being counted.
#define ARM_NPU_UNWRITTEN 1u  // a read of what nothing has written in this execution, or a result of such bytes
#define ARM_NPU_HAZARD 2u     // an access that nothing makes wait for one that must come before it

// From now on, executions are watched. Weights and `inputs` count as written. Returns 0, or a
// number with the reason in `message`.
__attribute__((visibility("default"))) int32_t arm_npu_check_accesses(arm_npu_program* program,
                                                                      const arm_npu_span* inputs, uint64_t input_count,
                                                                      const arm_npu_span* outputs,
                                                                      uint64_t output_count, uint32_t fatal_findings,
                                                                      arm_npu_message* message);

// Of the last execution, for each region: bytes read and written (an operation reads each byte of an operand once,
// however often hardware does), the byte after the last one, and how many different ones.
typedef struct {
  uint64_t operations, commands, macs, unwritten, hazards;
  uint64_t bytes_read[8], bytes_written[8], peak[8], touched[8];
} arm_npu_figures;

// Zeros but for operations and commands if the program is not watched.
__attribute__((visibility("default"))) void arm_npu_measure(arm_npu_program* program, arm_npu_figures* figures);

// An operation, and the tensor that it writes.
typedef struct {
  const char* name;
  uint64_t offset;  // of its command, in the stream
  uint64_t commands, macs;
  uint64_t bytes_read[8], bytes_written[8];  // by region
  int64_t address;                           // of the first element, in `region`; for a DMA the target
  int32_t shape[3];                          // height, width, channels in memory; for a DMA rows of rows, rows, bytes
  int32_t region;                            // -1: the tensor stays inside of the NPU; 8: its memory for tables
  int32_t element_size;                      // bytes; 0 where nothing is written
  int32_t is_signed, zero_point;
  int32_t indexed;  // 1 for a DMA that gathers or scatters
} arm_npu_operation;

// Returns 0, or -1 if there is no operation `index`. Of a program that is not watched, MACs and bytes are zero.
__attribute__((visibility("default"))) int32_t arm_npu_describe(arm_npu_program* program, uint64_t index,
                                                                arm_npu_operation* operation);

// Executes operation `index` alone; one after the other from 0 on, they are one execution. Returns as arm_npu_execute.
__attribute__((visibility("default"))) int32_t arm_npu_step(arm_npu_program* program, uint64_t index,
                                                            void* const* regions, arm_npu_message* message);

// Copies what operation `index`, the last one executed, has written, in the order of `shape`. Returns 0, or -1 if it
// is not of `size` bytes.
__attribute__((visibility("default"))) int32_t arm_npu_result(const arm_npu_program* program, uint64_t index, void* to,
                                                              uint64_t size);

__attribute__((visibility("default"))) void arm_npu_free(arm_npu_program* program);

#ifdef __cplusplus
}
#endif
