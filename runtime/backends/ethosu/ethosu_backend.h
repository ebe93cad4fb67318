// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "common/executorch.h"

extern "C" {
// What firmware may define for itself; the names are those of ExecuTorch's own backend, so that the same
// firmware works with both. The defaults are weak: no fast scratch, and hooks that do nothing.

// SRAM for what Vela spills with a Dedicated_Sram memory mode, and its size in bytes; used from its first multiple
// of 32 bytes on. Where ethosu_init() got such memory, the driver uses that instead.
extern unsigned char* ethosu_fast_scratch;
extern size_t ethosu_fast_scratch_size;
// Called around every execution, failed ones too: a place to read cycle counters.
void EthosUBackend_execute_begin(void);
void EthosUBackend_execute_end(void);

// Outcome of the registration, made before main(). A reference to it makes the linker keep the backend.
extern const executorch::runtime::Error arm_runtime_ethosu_registered;
}

namespace arm_runtime {

// Executes Ethos-U payloads on Cortex-M through ethos-u-core-driver; it registers itself as "EthosUBackend".
//
// The bytes of the payload must stay where they are, at a multiple of 16 bytes that the NPU can reach, while
// the method is loaded; loading cleans them from the data cache. So must weights that methods share, which are named
// data of the program. Each execution takes the scratch of the
// payload, in whole cache lines of 32 bytes, from the method's temp allocator, which must be in memory that the NPU can
// write, and copies the inputs into it and the outputs out of it as bytes. One execution at a
// time for each method; executions of different methods wait for each other in the driver.
class EthosUBackend final : public BackendInterface {
 public:
  // Bytes of the method allocator that loading a payload takes, at a multiple of 8.
  static constexpr size_t kLoadedBytes = sizeof(void*) == 4 ? 120 : 168;

  bool is_available() const override { return true; }

  // Errors: InvalidProgram where the payload is damaged, not that of its compile spec payload_crc32, or not
  // aligned, DelegateInvalidCompatibility where it was compiled for another way to run it,
  // MemoryAllocationFailed, also where there is less fast scratch than its compile spec fast_scratch_size. The
  // programs of other exporters lack that: what they spill is not checked.
  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> compile_specs) const override;

  // Errors: InvalidArgument where the tensors are not those of the payload, MemoryAllocationFailed,
  // DelegateInvalidCompatibility where the NPU has other MACs than the program was compiled for, InvalidState where
  // the driver has no NPU, Internal where the driver or the NPU refuses or fails.
  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override;

  void destroy(DelegateHandle* handle) const override;
};

}  // namespace arm_runtime
