// SPDX-License-Identifier: Apache-2.0
// Events of ExecuTorch's tracer, enabled by CMake's option ARM_RUNTIME_EVENT_TRACER.
#pragma once

#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/core/event_tracer_hooks_delegate.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/executorch.h"
#include "common/text_buffer.h"

namespace arm_runtime {

// Whether a tracer records events.
inline bool is_tracing(const EventTracer* tracer) {
#ifdef ET_EVENT_TRACER_ENABLED
  return tracer != nullptr;
#else
  return false;
#endif
}

// A traced event that lasts from construction to destruction. Its metadata are counters as text, for example
// "npu_cycles=1234 pmu_event0=56".
class TraceScope {
 public:
  TraceScope(EventTracer* tracer, const char* name)
      : tracer_(tracer),
        // An event has either a name or a debug id.
        entry_(executorch::runtime::event_tracer_start_profiling_delegate(
            tracer, name,
            static_cast<executorch::runtime::DebugHandle>(executorch::runtime::kUnsetDelegateDebugIntId))) {}
  ~TraceScope() {
    executorch::runtime::event_tracer_end_profiling_delegate(tracer_, entry_, size_ == 0 ? nullptr : text_, size_);
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  // Adds a counter if the metadata have room for it. An entry that does not fit is dropped.
  void add(const char* name, uint64_t value) {
    // The buffer holds one character more than `text_`, and a NUL. An entry that is truncated here is therefore too
    // long for `text_`, and is not added.
    char entry[sizeof(text_) + 2];
    TextBuffer out(entry, sizeof(entry));
    out.add(size_ == 0 ? "" : " ");
    out.add(name);
    out.add("=");
    out.add_number(value);
    const size_t length = std::strlen(entry);
    if (length <= sizeof(text_) - size_) {
      std::memcpy(text_ + size_, entry, length);
      size_ += length;
    }
  }

 private:
  EventTracer* tracer_;
  executorch::runtime::EventTracerEntry entry_;
  size_t size_ = 0;
  char text_[160];
};

}  // namespace arm_runtime
