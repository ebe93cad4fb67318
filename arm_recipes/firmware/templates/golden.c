/* SPDX-License-Identifier: Apache-2.0
 *
 * @NAME@: see golden.h. Made by arm_recipes; made again with each export.
 */
#include "golden.h"

#include <stddef.h>

#define ALIGNED __attribute__((aligned(16)))

@TABLES@
const arm_model_case arm_model_cases[ARM_MODEL_CASE_COUNT] = {
@CASES@
};
