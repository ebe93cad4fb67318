// SPDX-License-Identifier: Apache-2.0
// Events of ExecuTorch's tracer, with CMake's option ARM_RUNTIME_EVENT_TRACER.
#pragma once

#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/core/event_tracer_hooks_delegate.h>

#include <cstddef>
#include <cstdint>

namespace arm_runtime {

// Whether somebody sees what is counted for an event.
inline bool traces(const executorch::runtime::EventTracer* tracer) {
#ifdef ET_EVENT_TRACER_ENABLED
  return tracer != nullptr;
#else
  return false;
#endif
}

// One event, from here to the end of the scope, and what is counted meanwhile: the event's metadata are text, as in
// "npu_cycles=1234 pmu_event0=56".
class TraceScope {
 public:
  TraceScope(executorch::runtime::EventTracer* tracer, const char* name)
      : tracer_(tracer),
        // Of an event that has a name, the number says that it has no number.
        entry_(executorch::runtime::event_tracer_start_profiling_delegate(
            tracer, name,
            static_cast<executorch::runtime::DebugHandle>(executorch::runtime::kUnsetDelegateDebugIntId))) {}
  ~TraceScope() {
    executorch::runtime::event_tracer_end_profiling_delegate(tracer_, entry_, size_ == 0 ? nullptr : text_, size_);
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  // Left out where there is no room. `name` is short.
  void add(const char* name, uint64_t value) {
    char digits[20];
    size_t count = 0;
    // By hand: the C library of small targets prints no 64-bit numbers.
    do {
      digits[count++] = static_cast<char>('0' + value % 10);
      value /= 10;
    } while (value != 0);
    size_t length = 0;
    while (name[length] != '\0') {
      ++length;
    }
    const size_t needed = (size_ == 0 ? 0 : 1) + length + 1 + count;
    if (needed > sizeof(text_) - size_) {
      return;
    }
    if (size_ > 0) {
      text_[size_++] = ' ';
    }
    for (size_t i = 0; i < length; ++i) {
      text_[size_++] = name[i];
    }
    text_[size_++] = '=';
    while (count > 0) {
      text_[size_++] = digits[--count];
    }
  }

 private:
  executorch::runtime::EventTracer* tracer_;
  executorch::runtime::EventTracerEntry entry_;
  size_t size_ = 0;
  char text_[160];
};

}  // namespace arm_runtime
