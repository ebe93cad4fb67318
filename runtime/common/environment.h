// SPDX-License-Identifier: Apache-2.0
// Environment variables of backends under an operating system.
#pragma once

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdlib>

#include "common/executorch.h"
#include "common/log.h"

namespace arm_runtime {

// If the environment variable is set, overwrites `nanoseconds` with its value, which is in milliseconds. Returns
// InvalidArgument, with the reason in the log, if the value is not a number. Returns the same error if `nanoseconds` is
// not positive afterwards, even if the variable is not set: drivers interpret 0 and negative timeouts as infinite.
inline Error read_timeout(const char* backend, const char* variable, int64_t* nanoseconds) {
  if (const char* text = std::getenv(variable)) {
    char* end = nullptr;
    errno = 0;
    const long long milliseconds = std::strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 ||
        __builtin_mul_overflow(milliseconds, int64_t{1'000'000}, nanoseconds)) {
      ET_LOG(Error, "%s: %s='%s' is not a number of milliseconds", backend, variable, text);
      return Error::InvalidArgument;
    }
  }
  if (*nanoseconds <= 0) {
    ET_LOG(Error, "%s: a timeout of %" PRId64 " ns; it must be positive", backend, *nanoseconds);
    return Error::InvalidArgument;
  }
  return Error::Ok;
}

}  // namespace arm_runtime
