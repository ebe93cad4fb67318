/* SPDX-License-Identifier: Apache-2.0
 *
 * @NAME@: what firmware has to know of the program in model.pte. Made by arm_recipes; made again with each export.
 * For C11 and C++17.
 */
#ifndef ARM_MODEL_H
#define ARM_MODEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What it was made with. self_test.cpp compares it with what the firmware is built with, and when it is loaded. */
#define ARM_MODEL_EXECUTORCH_VERSION "@EXECUTORCH@"
#define ARM_MODEL_EXECUTORCH_MAJOR @EXECUTORCH_MAJOR@
#define ARM_MODEL_EXECUTORCH_MINOR @EXECUTORCH_MINOR@
#define ARM_MODEL_VELA_VERSION "@VELA@"
/* The NPU, the form of its command streams, and the release of the architecture that they tell the driver. */
#define ARM_MODEL_NPU "@NPU@"
#define ARM_MODEL_STREAM_FORMAT "@STREAM@"
#define ARM_MODEL_STREAM_ARCHITECTURE "@ARCHITECTURE@"
/* Of the payloads around the streams: arm_runtime::kPayloadFormat of the backend. */
#define ARM_MODEL_PAYLOAD_FORMAT @PAYLOAD_FORMAT@

/* The program, at a multiple of 16 bytes, in memory that the NPU reads. A linker script that gives .rodata.* a place
 * there needs nothing else; others name the section, or -DARM_MODEL_PTE_SECTION=... names theirs. */
#define ARM_MODEL_PTE_SIZE @PTE_SIZE@u
#define ARM_MODEL_PTE_CRC32 @PTE_CRC32@u
#ifndef ARM_MODEL_PTE_SECTION
#define ARM_MODEL_PTE_SECTION ".rodata.arm_model_pte"
#endif
#define ARM_MODEL_PLACED(section_name, alignment) __attribute__((section(section_name), aligned(alignment)))
extern const uint8_t arm_model_pte[ARM_MODEL_PTE_SIZE];

/* Memory, in bytes: it runs with exactly these and not with one less, which was tried on the machine that exported it,
 * with its own figures where pointers count. Each starts at a multiple of ARM_MODEL_POOL_ALIGNMENT.
 * @EXACT@ */
#define ARM_MODEL_POOL_ALIGNMENT @ALIGNMENT@

/* The temp allocator, which all methods share, in memory that the NPU reads and writes. */
#ifndef ARM_MODEL_TEMP_POOL_SIZE
#if UINTPTR_MAX > 0xFFFFFFFFu
#define ARM_MODEL_TEMP_POOL_SIZE @TEMP_64@u
#else
#define ARM_MODEL_TEMP_POOL_SIZE @TEMP@u
#endif
#endif

/* SRAM that the NPU spills to (Dedicated_Sram): ethosu_fast_scratch of the backend, or what ethosu_init() gets. */
#ifndef ARM_MODEL_FAST_SCRATCH_SIZE
#define ARM_MODEL_FAST_SCRATCH_SIZE @FAST_SCRATCH@u
#endif

/* Memories of the plan from the second on, which methods share. */
#define ARM_MODEL_SHARED_COUNT @SHARED_COUNT@
#define ARM_MODEL_SHARED_SIZES {@SHARED@}

/* By method: the method allocator, and the first memory of the plan. */
#define ARM_MODEL_METHOD_COUNT @METHOD_COUNT@
@METHOD_POOLS@
#define ARM_MODEL_METHOD_POOL_SIZES {@METHOD_POOL_LIST@}
#define ARM_MODEL_PLANNED_SIZES {@PLANNED_LIST@}

/* Inputs and outputs. An integer stands for the real number (integer - ZERO_POINT) * SCALE. */
@TENSORS@
typedef struct {
  const char *name;
  int8_t scalar_type; /* as executorch::aten::ScalarType numbers them */
  uint8_t rank;
  uint8_t quantized; /* 1 where scale and zero_point mean something */
  const int32_t *shape;
  const uint8_t *dim_order; /* from the outermost dimension in memory to the innermost */
  uint32_t bytes;
  float scale;
  int32_t zero_point;
} arm_model_tensor;

typedef struct {
  const char *name;
  uint32_t input_count;
  const arm_model_tensor *inputs;
  uint32_t output_count;
  const arm_model_tensor *outputs;
} arm_model_method;

extern const arm_model_method arm_model_methods[ARM_MODEL_METHOD_COUNT];

#ifdef __cplusplus
}
#endif

#endif
