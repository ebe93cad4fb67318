// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/executorch.h"

extern "C" {
// Symbols that firmware may define. Fast scratch and hooks have the same names as in ExecuTorch's own backend, so that
// firmware works with either backend. Their defaults are weak: no fast scratch, and hooks that do nothing.

// Fast scratch: SRAM in which programs of a Dedicated_Sram memory mode keep activations, and its size in bytes. The
// backend uses only complete cache lines of 32 bytes. A partial line at the start or end stays unused. If ethosu_init()
// was called with fast memory, the driver uses that memory instead.
extern unsigned char* ethosu_fast_scratch;
extern size_t ethosu_fast_scratch_size;
// Called before and after every execution, including failed ones, for example to read cycle counters.
void EthosUBackend_execute_begin(void);
void EthosUBackend_execute_end(void);

// If firmware defines this function, the backend passes the NPU's cycles to it after each run. The backend counts the
// cycles with the driver's PMU functions. It does not call this function if firmware lacks the PMU functions.
__attribute__((weak)) void arm_runtime_npu_measured(uint64_t npu_cycles);

// Result of the registration before main(). A reference to it makes the linker keep the backend.
extern const executorch::runtime::Error arm_runtime_ethosu_registered;
}

namespace arm_runtime {

// Executes Ethos-U payloads on Cortex-M through ethos-u-core-driver. It registers itself as "EthosUBackend".
//
// While the method is loaded, the payload must stay at its address. The address must be a multiple of 16 in memory that
// the NPU can reach. The same holds for external commands and weights, which are named data of the program or of its
// .ptd. Loading cleans the data cache for all of them. With the compile spec planned_scratch_argument, the scratch
// memory of the payload is a part of the first planned memory. This memory must start at a multiple of 32 bytes. If the
// memory plan places an input or output at the offset in the scratch that the payload states for it, the backend does
// not copy it. Without this compile spec, each execution allocates the scratch, in whole cache lines of 32 bytes, from
// the method's temp allocator. It copies inputs into the scratch and outputs out of it. The scratch must be in memory
// that the NPU can write. A method runs one execution at a time. Executions of different methods wait in the driver for
// a free NPU.
class EthosUBackend final : public BackendInterface {
 public:
  // Bytes that each delegate takes from the method allocator, aligned to 8. A delegate with external commands takes a
  // FreeableBuffer in addition.
  static constexpr size_t kMethodAllocatorBytes = sizeof(void*) == 4 ? 128 : 168;

  bool is_available() const override { return true; }

  // Errors: InvalidProgram if the payload is damaged or not aligned, if its CRC-32 is not that of its compile spec
  // payload_crc32, if external commands or weights are missing or damaged, or if a compile spec is invalid;
  // DelegateInvalidCompatibility if the command stream is not a COP1 stream below 2 GiB; MemoryAllocationFailed if the
  // method allocator is too small, or if there is less fast scratch than the compile spec fast_scratch_size states.
  // Programs of other exporters lack that spec, so their fast scratch is not checked.
  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> compile_specs) const override;

  // Errors: InvalidArgument if the tensors differ from those of the payload, or the scratch in planned memory is not
  // aligned; MemoryAllocationFailed if there is too little scratch or fast scratch; DelegateInvalidCompatibility if the
  // NPU has another number of MACs than the program, or if the driver is built only for another kind of NPU;
  // InvalidState if the driver otherwise has no NPU for the program; Internal if the driver or the NPU fails.
  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override;

  void destroy(DelegateHandle* handle) const override;
};

}  // namespace arm_runtime
