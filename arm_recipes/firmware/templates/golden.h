/* SPDX-License-Identifier: Apache-2.0
 *
 * @NAME@: test vectors of self_test.cpp: inputs, and the outputs of the program on the exporting machine.
 */
#ifndef ARM_MODEL_GOLDEN_H
#define ARM_MODEL_GOLDEN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ARM_MODEL_CASE_COUNT @CASE_COUNT@

/* Tolerance of floating-point outputs, relative to max(1, |expected value|): @WHY@ */
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

#ifdef __cplusplus
}
#endif

#endif
