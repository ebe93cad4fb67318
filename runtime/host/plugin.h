// SPDX-License-Identifier: Apache-2.0
// C interface between the host plugin and the executors that Python registers.
//
// The plugin implements ExecuTorch backends, so that programs for these backends run on a machine without the devices.
// The plugin does not interpret payloads: it passes the payload and the tensors of each delegate to an executor.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define ARM_HOST_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define ARM_HOST_EXPORT extern "C"
#endif

extern "C" {

// A tensor of the program, without a copy of its data.
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

// Functions that execute the delegates of one backend. Each receives `context` as its first argument. An executor
// stores its error messages itself; the plugin returns only an ExecuTorch error code.
typedef struct {
  void* context;
  // Prepares a delegate. The payload stays valid until destroy. Returns a handle above 0, or 0 on failure.
  int64_t (*init)(void* context, const void* payload, uint64_t size, const arm_host_compile_spec* specs,
                  uint64_t spec_count);
  // Runs a delegate. `tensors` are its inputs, then its outputs. Returns 0 on success.
  int32_t (*execute)(void* context, int64_t handle, const arm_host_tensor* tensors, uint64_t count);
  void (*destroy)(void* context, int64_t handle);
} arm_host_executor;

// Registers the backends and kernels of this plugin with the ExecuTorch runtime of the process. Returns 0, or 1 with
// the reason in `message`. It fails if the plugin or another implementation of a backend is already registered, because
// the runtime accepts only one backend of a name. It also fails if the runtime has no room for a backend or refuses a
// kernel.
ARM_HOST_EXPORT int32_t arm_host_install(char* message, uint64_t message_size);

// Sets the executor of `backend_id` ("TOSABackend", "VgfBackend", "EthosUBackend") to a copy of `executor`. Returns 0,
// or 1 with the reason in `message`.
ARM_HOST_EXPORT int32_t arm_host_set_executor(const char* backend_id, const arm_host_executor* executor, char* message,
                                              uint64_t message_size);

// An executor may call the two functions below while it executes a delegate, on the same thread.
//
// Logs that operation `id` of the delegate ran from `start` to `end`, in nanoseconds since the delegate's execution
// started. Returns 0, or 1 if there is no tracer.
ARM_HOST_EXPORT int32_t arm_host_log_duration(int32_t id, uint64_t start, uint64_t end, const char* metadata,
                                              uint64_t metadata_size);

// Logs the output of operation `id`. The tracer copies the output. Returns 0, or 1 if there is no tracer or the tracer
// has no room left.
ARM_HOST_EXPORT int32_t arm_host_log_output(int32_t id, const arm_host_tensor* output);
}
