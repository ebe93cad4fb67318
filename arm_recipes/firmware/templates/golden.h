/* SPDX-License-Identifier: Apache-2.0
 *
 * @NAME@: inputs, and what the program returned for them on the machine that exported it. For self_test.cpp.
 */
#ifndef ARM_MODEL_GOLDEN_H
#define ARM_MODEL_GOLDEN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ARM_MODEL_CASE_COUNT @CASE_COUNT@

/* By how much an output of floating point may differ, in parts of the larger of 1 and what was returned: @WHY@ */
#ifndef ARM_MODEL_FLOAT_TOLERANCE
#define ARM_MODEL_FLOAT_TOLERANCE @TOLERANCE@f
#endif

typedef struct {
  uint32_t method; /* of arm_model_methods */
  const uint8_t *const *inputs;
  const uint8_t *const *outputs;
} arm_model_case;

/* In this order: a program with state remembers. */
extern const arm_model_case arm_model_cases[ARM_MODEL_CASE_COUNT];

#ifdef __cplusplus
}
#endif

#endif
