// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/status.h"

namespace arm_runtime::npu {

// Errors of a program. The emulator reports the error and its location. Except for kUnsupported, an NPU that executes
// the program may hang or compute wrong results.
enum class Error : int32_t {
  kNone = 0,
  kStream = 1,         // not a command stream, or cut off
  kCommand = 2,        // unknown command or register
  kUnsupported = 3,    // known, but not emulated
  kMemory = 4,         // an access outside its region
  kWeights = 5,        // weights or scales cannot be decoded
  kShape = 6,          // registers contradict each other
  kIndex = 7,          // an index of a gather or scatter is out of range
  kUninitialized = 8,  // access checker: a read of uninitialized memory, or an output that was not written
  kHazard = 9,         // access checker: nothing orders two conflicting accesses
};

// Result of loading or executing. The place is a command, with its byte offset from the start of the stream's header.
using Status = BasicStatus<Error>;

inline Status failure(Error error, const char* reason, int64_t first = 0, int64_t second = 0, int64_t third = 0) {
  return make_failure(error, "", 0, reason, first, second, third);
}

}  // namespace arm_runtime::npu
