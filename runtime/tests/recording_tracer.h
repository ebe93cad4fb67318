// SPDX-License-Identifier: Apache-2.0
// An EventTracer that records the events of backends.
#pragma once

#include <executorch/runtime/core/event_tracer.h>

#include <string>
#include <vector>

class RecordingTracer final : public executorch::runtime::EventTracer {
 public:
  // Events in the order of their ends: "name" or "name: metadata".
  std::vector<std::string> events;
  int open = 0;

  using DelegateDebugIntId = executorch::runtime::DelegateDebugIntId;
  using EventTracerEntry = executorch::runtime::EventTracerEntry;
  template <typename T>
  using Result = executorch::runtime::Result<T>;

  // An event must have either a name or a number. ExecuTorch's own tracer aborts the process if it has both or none.
  EventTracerEntry start_profiling_delegate(const char* name, DelegateDebugIntId number) override {
    const bool named = name != nullptr && number == executorch::runtime::kUnsetDelegateDebugIntId;
    EventTracerEntry entry{};
    entry.event_id = static_cast<int64_t>(names_.size());
    names_.emplace_back(named ? name : "an event without a name");
    ++open;
    return entry;
  }
  void end_profiling_delegate(EventTracerEntry entry, const void* metadata, size_t size) override {
    std::string event = names_[static_cast<size_t>(entry.event_id)];
    if (size > 0) {
      event += ": " + std::string(static_cast<const char*>(metadata), size);
    }
    events.push_back(event);
    --open;
  }

  void create_event_block(const char*) override {}
  EventTracerEntry start_profiling(const char*, executorch::runtime::ChainID,
                                   executorch::runtime::DebugHandle) override {
    return {};
  }
  void log_profiling_delegate(const char*, DelegateDebugIntId, et_timestamp_t, et_timestamp_t, const void*,
                              size_t) override {}
  void end_profiling(EventTracerEntry) override {}
  void track_allocation(executorch::runtime::AllocatorID, size_t) override {}
  executorch::runtime::AllocatorID track_allocator(const char*) override { return 0; }
  Result<bool> log_evalue(const executorch::runtime::EValue&, executorch::runtime::LoggedEValueType) override {
    return true;
  }
  Result<bool> log_intermediate_output_delegate(const char*, DelegateDebugIntId,
                                                const executorch::aten::Tensor&) override {
    return true;
  }
  Result<bool> log_intermediate_output_delegate(
      const char*, DelegateDebugIntId, const executorch::runtime::ArrayRef<executorch::aten::Tensor>) override {
    return true;
  }
  Result<bool> log_intermediate_output_delegate(const char*, DelegateDebugIntId, const int&) override { return true; }
  Result<bool> log_intermediate_output_delegate(const char*, DelegateDebugIntId, const bool&) override { return true; }
  Result<bool> log_intermediate_output_delegate(const char*, DelegateDebugIntId, const double&) override {
    return true;
  }
  void set_delegation_intermediate_output_filter(executorch::runtime::EventTracerFilterBase*) override {}

 private:
  std::vector<std::string> names_;
};
