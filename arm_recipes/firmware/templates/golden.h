/* SPDX-License-Identifier: Apache-2.0
 *
 * @NAME@: test vectors of self_test.cpp: inputs, and the outputs of the program on the exporting machine.
 */
#ifndef ARM_MODEL_GOLDEN_H
#define ARM_MODEL_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ARM_MODEL_CASE_COUNT @CASE_COUNT@

/* Tolerance of float32 outputs, relative to max(1, |expected value|). @WHY@
 * Outputs of other types must be equal. */
#ifndef ARM_MODEL_FLOAT_TOLERANCE
#define ARM_MODEL_FLOAT_TOLERANCE @TOLERANCE@f
#endif

typedef struct {
  uint32_t method; /* index into arm_model_methods */
  const uint8_t *const *inputs;
  const uint8_t *const *outputs;
} arm_model_case;

/* Run in this order: a program may have state. */
extern const arm_model_case arm_model_cases[ARM_MODEL_CASE_COUNT];

/* Measurements. The self-test prints a line of JSON for each case, for `arm-recipes measured log.jsonl`: cycles of the
 * core and of the NPU, and counters. Firmware may define these functions, in place of the weak defaults. */
typedef struct {
  const char *name;
  uint64_t value;
} arm_model_counter;

/* A counter of the core's cycles. Default: the cycle counter of the DWT on a Cortex-M that has one; else 0. */
uint64_t arm_model_cpu_cycles(void);
/* Writes up to `capacity` counters of the last case, such as events of the NPU's PMU, and returns their number. */
size_t arm_model_read_counters(arm_model_counter *counters, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif
