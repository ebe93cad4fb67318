// SPDX-License-Identifier: Apache-2.0
// The C interface between the host plugin and the executors that Python registers.
//
// The plugin stands in ExecuTorch's runtime for the backends that have no device here. It does not know TOSA,
// Vulkan or NPUs: it hands each delegate's payload and tensors to an executor.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define ARM_HOST_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define ARM_HOST_EXPORT extern "C"
#endif

extern "C" {

// A tensor of the program, in its own memory: nothing is copied.
typedef struct {
  void* data;
  uint64_t nbytes;
  const int32_t* sizes;
  const uint8_t* dim_order;  // order of the dimensions in memory, outermost first; `rank` entries
  int32_t rank;
  int32_t dtype;  // executorch::aten::ScalarType
} arm_host_tensor;

// A compile spec of the delegate.
typedef struct {
  const char* key;
  const void* data;
  uint64_t size;
} arm_host_compile_spec;

// What runs the delegates of one backend id. `context` is given back as the first argument of each call.
// An executor reports what went wrong by itself; the plugin only turns it into an ExecuTorch error.
typedef struct {
  void* context;
  // Prepares a delegate. The payload lives until destroy. Returns a handle above 0, or 0 where it failed.
  int64_t (*init)(void* context, const void* payload, uint64_t size, const arm_host_compile_spec* specs,
                  uint64_t spec_count);
  // Runs it: `tensors` are the delegate's inputs, then its outputs. Returns 0 on success.
  int32_t (*execute)(void* context, int64_t handle, const arm_host_tensor* tensors, uint64_t count);
  void (*destroy)(void* context, int64_t handle);
} arm_host_executor;

// Registers the backends and kernels of this plugin with the ExecuTorch runtime of the process, once.
// Returns 0, or 1 with the reason in `message`: another copy of this plugin, or another implementation of one of
// its backends, is registered already (the runtime itself would abort the process).
ARM_HOST_EXPORT int32_t arm_host_install(char* message, uint64_t message_size);

// Sets what executes the delegates of `backend_id` ("TOSABackend", "VgfBackend", "EthosUBackend"); the struct is
// copied.
// Returns 0, or 1 with the reason in `message`.
ARM_HOST_EXPORT int32_t arm_host_set_executor(const char* backend_id, const arm_host_executor* executor, char* message,
                                              uint64_t message_size);

// The two below are for an executor, while it executes a delegate, on the thread that it was called on.
//
// Logs that the operation `id` of the delegate ran from `start` to `end`, in nanoseconds from the delegate's start on.
// Returns 0, or 1 where there is no tracer.
ARM_HOST_EXPORT int32_t arm_host_log_duration(int32_t id, uint64_t start, uint64_t end, const char* metadata,
                                              uint64_t metadata_size);

// Logs what the operation `id` gave; the tracer copies it.
// Returns 0, or 1 where there is no tracer or it has no room left.
ARM_HOST_EXPORT int32_t arm_host_log_output(int32_t id, const arm_host_tensor* output);
}
