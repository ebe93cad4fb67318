/* SPDX-License-Identifier: Apache-2.0
 *
 * @NAME@: see model.h. Made by arm_recipes; made again with each export.
 */
#include "model.h"

ARM_MODEL_PLACED(ARM_MODEL_PTE_SECTION, 16)
const uint8_t arm_model_pte[ARM_MODEL_PTE_SIZE] = {
@PTE@
};

@TABLES@
const arm_model_method arm_model_methods[ARM_MODEL_METHOD_COUNT] = {
@METHODS@
};
