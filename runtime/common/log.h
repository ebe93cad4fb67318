// SPDX-License-Identifier: Apache-2.0
// Log lines of the backends: "<backend id>: <what is wrong, where, why, what to do>".
#pragma once

#include <executorch/runtime/platform/log.h>

// Logs with the id of the backend. Each source file of a backend defines ARM_RUNTIME_BACKEND_ID, a string literal.
#define ARM_RUNTIME_LOG(level, ...) ET_LOG(level, ARM_RUNTIME_BACKEND_ID ": " __VA_ARGS__)

namespace arm_runtime {

// Type to which sizes are cast for "%lu": the C library of small targets supports neither "%zu" nor 64-bit numbers.
using PrintfUnsigned = unsigned long;

}  // namespace arm_runtime
