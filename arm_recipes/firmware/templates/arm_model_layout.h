// SPDX-License-Identifier: Apache-2.0
//
// The sizes in model.h were computed with these types of ExecuTorch @EXECUTORCH@. If the types of another version
// differ, the sizes are wrong and the build stops.
#pragma once

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/freeable_buffer.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <optional>

@NPU?@
#include "backends/ethosu/ethosu_backend.h"

@END?@
#define ARM_MODEL_HAS_LAYOUT(size, alignment, ...)                                         \
  static_assert(sizeof(__VA_ARGS__) == (size) && alignof(__VA_ARGS__) == (alignment),      \
                "the pool sizes in model.h were computed for another ExecuTorch: install " \
                "@EXECUTORCH@, or export again with the ExecuTorch that the firmware has")

@ASSERTS@

#undef ARM_MODEL_HAS_LAYOUT
