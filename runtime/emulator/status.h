// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace arm_runtime::npu {

// What is wrong with a program. A NPU would do something, or hang; the emulator says where.
enum class Error : int32_t {
  kNone = 0,
  kStream = 1,       // not a command stream, or cut off
  kCommand = 2,      // unknown command or register
  kUnsupported = 3,  // known, but not emulated
  kMemory = 4,       // an access outside its region
  kWeights = 5,      // weights or scales cannot be decoded
  kShape = 6,        // registers contradict each other
  kIndex = 7,        // an index of a gather or scatter is out of range
  kUnwritten = 8,    // the watch: a read of what nothing has written
  kHazard = 9,       // the watch: nothing makes an access wait for one that must come before
};

// Outcome of loading or executing; texts have static storage.
struct Status {
  Error error = Error::kNone;
  const char* command = "";
  // Byte of the command stream, counted from its header.
  uint64_t offset = 0;
  // Each '%' in it stands for the next of `values`.
  const char* reason = "";
  int64_t values[3] = {0, 0, 0};

  bool ok() const { return error == Error::kNone; }

  // Writes "NPU_OP_CONV at byte 96: ..." and a NUL, cut off at `size` bytes.
  void describe(char* text, size_t size) const;
};

inline Status failure(Error error, const char* reason, int64_t first = 0, int64_t second = 0, int64_t third = 0) {
  Status status;
  status.error = error;
  status.reason = reason;
  status.values[0] = first;
  status.values[1] = second;
  status.values[2] = third;
  return status;
}

}  // namespace arm_runtime::npu
