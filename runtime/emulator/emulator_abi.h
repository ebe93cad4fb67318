// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

// C interface of the emulator.

#ifdef __cplusplus
extern "C" {
#endif

typedef struct arm_npu_program arm_npu_program;

// An error: NUL-terminated text, cut off if it is too long, and the byte offset in the stream of the command at fault,
// header included (0 if the error is about no command).
typedef struct {
  uint64_t offset;
  char text[512];
} arm_npu_message;

// Loads a command stream with its header. `sizes` are the upper bounds of the sizes of 8 regions. `weights` has
// sizes[0] bytes and must outlive the program. Returns NULL with the reason in `message`.
__attribute__((visibility("default"))) arm_npu_program* arm_npu_load(const void* stream, uint64_t stream_size,
                                                                     const void* weights, const uint64_t* sizes,
                                                                     arm_npu_message* message);

// Executes the program over 8 regions of these sizes, or of arm_npu_reach() bytes. Not thread-safe for one program.
// Returns 0, or an error number with the reason in `message`.
__attribute__((visibility("default"))) int32_t arm_npu_execute(arm_npu_program* program, void* const* regions,
                                                               arm_npu_message* message);

// Returns one past the last byte that execution accesses in a region.
__attribute__((visibility("default"))) uint64_t arm_npu_reach(const arm_npu_program* program, int32_t region);

// Bytes of a region.
typedef struct {
  uint64_t region, offset, size;
} arm_npu_span;

// Findings of the access checker, as bits. `fatal_findings` are those that make an execution fail; others are counted.
#define ARM_NPU_UNWRITTEN 1u  // a read of unwritten memory, or an output that was not written
#define ARM_NPU_HAZARD 2u     // no wait and no block dependency orders two conflicting accesses

// Checks the accesses of all following executions. Weights and `inputs` count as written. Returns 0, or an error number
// with the reason in `message`.
__attribute__((visibility("default"))) int32_t arm_npu_check_accesses(arm_npu_program* program,
                                                                      const arm_npu_span* inputs, uint64_t input_count,
                                                                      const arm_npu_span* outputs,
                                                                      uint64_t output_count, uint32_t fatal_findings,
                                                                      arm_npu_message* message);

// Figures of the last execution. Arrays have an entry for each region: bytes read and written (an operation reads each
// byte of an operand once, however often hardware does), one past the last byte accessed, and the number of distinct
// bytes accessed.
typedef struct {
  uint64_t operations, commands, macs, unwritten, hazards;
  uint64_t bytes_read[8], bytes_written[8], peak[8], touched[8];
} arm_npu_figures;

// Without arm_npu_check_accesses(), all figures but operations and commands are zero.
__attribute__((visibility("default"))) void arm_npu_measure(arm_npu_program* program, arm_npu_figures* figures);

// An operation and the tensor that it writes.
typedef struct {
  const char* name;
  uint64_t offset;  // of its command in the stream
  uint64_t commands, macs;
  uint64_t bytes_read[8], bytes_written[8];  // by region
  int64_t address;                           // of the first element in `region`; of a DMA: the target
  int32_t shape[3];                          // height, width, channels in memory; of a DMA: rows of rows, rows, bytes
  int32_t region;                            // -1: the tensor stays inside the NPU; 8: the memory for tables
  int32_t element_size;                      // bytes; 0 if nothing is written
  int32_t is_signed, zero_point;
  int32_t indexed;  // 1 for a DMA that gathers or scatters
} arm_npu_operation;

// Returns 0, or -1 if there is no operation `index`. Without arm_npu_check_accesses(), MACs and bytes are zero.
__attribute__((visibility("default"))) int32_t arm_npu_describe(arm_npu_program* program, uint64_t index,
                                                                arm_npu_operation* operation);

// Executes operation `index` alone. Called for 0, 1, 2, ... it performs one execution. Returns as arm_npu_execute().
__attribute__((visibility("default"))) int32_t arm_npu_step(arm_npu_program* program, uint64_t index,
                                                            void* const* regions, arm_npu_message* message);

// Copies the output of operation `index`, the last one executed, in the order of `shape`. Returns 0, or -1 if the
// output does not have `size` bytes.
__attribute__((visibility("default"))) int32_t arm_npu_result(const arm_npu_program* program, uint64_t index, void* to,
                                                              uint64_t size);

__attribute__((visibility("default"))) void arm_npu_free(arm_npu_program* program);

#ifdef __cplusplus
}
#endif
