// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

// C interface of the Ethos-U emulator.

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ethosu_emulator_program ethosu_emulator_program;

// An error: NUL-terminated text, truncated if it is too long, and the byte offset of the failed command from the start
// of the stream's header (0 if the error concerns no command).
typedef struct {
  uint64_t offset;
  char text[512];
} ethosu_emulator_error;

// Loads a command stream with its header. sizes[i] is the maximum size of region i (0 to 7). A stream whose tensors
// exceed this size is refused; a DMA that exceeds it fails when it is executed. `weights` is region 0; it has sizes[0]
// bytes and must outlive the program. On failure, returns NULL with the reason in `error`.
__attribute__((visibility("default"))) ethosu_emulator_program* ethosu_emulator_load(
    const void* stream, uint64_t stream_size, const void* weights, const uint64_t* sizes, ethosu_emulator_error* error);

// Executes the program. `regions` are the addresses of 8 regions. Region i must have at least
// ethosu_emulator_required_size(program, i) bytes. One program must not be executed by two threads at once. Returns 0,
// or an error number with the reason in `error`.
__attribute__((visibility("default"))) int32_t ethosu_emulator_execute(ethosu_emulator_program* program,
                                                                       void* const* regions,
                                                                       ethosu_emulator_error* error);

// Returns the size in bytes that a region must have: an upper bound of the end of all accesses during execution.
// Weights and scales in region 0, which ethosu_emulator_load() decodes, do not count.
__attribute__((visibility("default"))) uint64_t ethosu_emulator_required_size(const ethosu_emulator_program* program,
                                                                              int32_t region);

// A range of bytes in a region.
typedef struct {
  uint64_t region, offset, size;
} ethosu_emulator_byte_range;

// Findings of the access checker, as bits. Findings in `fatal_findings` end an execution; others are only counted.
#define ETHOSU_EMULATOR_UNINITIALIZED 1u  // a read of uninitialized memory, or an output that was not written
#define ETHOSU_EMULATOR_HAZARD 2u         // no wait and no block dependency orders two conflicting accesses

// Enables the access checker for all following executions. Weights and `inputs` count as written. Returns 0, or -1 with
// the reason in `error` if memory is exhausted.
__attribute__((visibility("default"))) int32_t
ethosu_emulator_enable_access_checker(ethosu_emulator_program* program, const ethosu_emulator_byte_range* inputs,
                                      uint64_t input_count, const ethosu_emulator_byte_range* outputs,
                                      uint64_t output_count, uint32_t fatal_findings, ethosu_emulator_error* error);

// Statistics of the last execution. Arrays have an entry for each region: bytes read and written, the end offset of the
// last accessed byte (peak), and the number of distinct accessed bytes (touched). An operation counts each byte of an
// operand once, even if hardware accesses it several times.
typedef struct {
  uint64_t operations, commands, macs, uninitialized, hazards;
  uint64_t bytes_read[8], bytes_written[8], peak[8], touched[8];
} ethosu_emulator_statistics;

// Reads the statistics. Without ethosu_emulator_enable_access_checker(), all except `operations` and `commands` are
// zero.
__attribute__((visibility("default"))) void ethosu_emulator_get_statistics(ethosu_emulator_program* program,
                                                                           ethosu_emulator_statistics* statistics);

// An operation and the tensor that it writes. A tensor that stays inside the NPU (chained) is a dense int32 array
// (element_size 4) with the OFM's shape [height, width, channels] before transposition and reversal.
typedef struct {
  const char* name;
  uint64_t offset;  // byte offset of its command in the stream
  uint64_t commands, macs;
  uint64_t bytes_read[8], bytes_written[8];  // by region
  int64_t address;                           // of the first element in `region`; for a DMA, of its target
  int32_t shape[3];  // height, width, channels in memory; for a DMA: outer count, inner count, bytes (0 for a scatter)
  int32_t region;    // -1: the tensor stays inside the NPU; 8: the NPU's memory for lookup tables
  int32_t element_size;  // in bytes; 0 if the operation writes nothing, and for a scatter
  int32_t is_signed, zero_point;
  int32_t indexed;  // 1 for a DMA that gathers or scatters
} ethosu_emulator_operation;

// Returns 0, or -1 if there is no operation `index`. Without ethosu_emulator_enable_access_checker(), MACs and bytes
// are zero.
__attribute__((visibility("default"))) int32_t ethosu_emulator_get_operation(ethosu_emulator_program* program,
                                                                             uint64_t index,
                                                                             ethosu_emulator_operation* operation);

// Executes only operation `index`. Calls for 0, 1, 2, ... together perform one execution. Returns the same values as
// ethosu_emulator_execute().
__attribute__((visibility("default"))) int32_t ethosu_emulator_step(ethosu_emulator_program* program, uint64_t index,
                                                                    void* const* regions, ethosu_emulator_error* error);

// Copies the output of operation `index` to `to`, in the order of `shape`. This operation must be the one that was
// executed last. Returns 0, or -1 if there is no operation `index` or its output does not have `size` bytes.
__attribute__((visibility("default"))) int32_t ethosu_emulator_copy_output(const ethosu_emulator_program* program,
                                                                           uint64_t index, void* to, uint64_t size);

__attribute__((visibility("default"))) void ethosu_emulator_free(ethosu_emulator_program* program);

#ifdef __cplusplus
}
#endif
