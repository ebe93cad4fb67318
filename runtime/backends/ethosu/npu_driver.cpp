// SPDX-License-Identifier: Apache-2.0
#include "backends/ethosu/npu_driver.h"

#include <ethosu_driver.h>

#include "backends/ethosu/ethosu_backend.h"
#include "common/executorch.h"
#include "common/log.h"

extern "C" {
__attribute__((weak)) unsigned char* ethosu_fast_scratch = nullptr;
__attribute__((weak)) size_t ethosu_fast_scratch_size = 0;

// Some versions of the driver lack this function. The versions that have it can be built for several kinds of NPU. In
// such a build, ethosu_reserve_driver() returns null.
__attribute__((weak)) struct ethosu_driver* ethosu_reserve_driver_ex(uint32_t product, uint32_t log2_macs);

// Performance counters, which firmware may omit. They are declared here, because the name of their header depends on
// the version of the driver.
__attribute__((weak)) void ETHOSU_PMU_Enable(struct ethosu_driver* drv);
__attribute__((weak)) void ETHOSU_PMU_Disable(struct ethosu_driver* drv);
__attribute__((weak)) void ETHOSU_PMU_CYCCNT_Reset(struct ethosu_driver* drv);
__attribute__((weak)) void ETHOSU_PMU_CNTR_Enable(struct ethosu_driver* drv, uint32_t mask);
__attribute__((weak)) uint64_t ETHOSU_PMU_Get_CCNTR(struct ethosu_driver* drv);
}

#define ARM_RUNTIME_BACKEND_ID "EthosUBackend"

namespace arm_runtime {
namespace {

// Base pointers in the order of Region.
constexpr int kBaseCount = 3;

// Overloads for the two signatures of ethosu_flush_dcache(): the first since version 1.0 of the driver, the second in
// earlier versions.
[[maybe_unused]] void clean_lines(void (*flush)(const uint64_t*, const size_t*, int), uintptr_t start, size_t size) {
  const uint64_t base = start;
  flush(&base, &size, 1);
}

[[maybe_unused]] void clean_lines(void (*flush)(uint32_t*, size_t), uintptr_t start, size_t size) {
  flush(reinterpret_cast<uint32_t*>(start), size);
}

uint64_t address(const void* pointer) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer)); }

// Reserves a driver during this object's lifetime. get() is null if no NPU of the program's kind was initialized.
class ReservedDriver {
 public:
  explicit ReservedDriver(const EthosUPayload& payload)
      : ReservedDriver(ethosu_reserve_driver_ex != nullptr
                           ? ethosu_reserve_driver_ex(payload.product_code, payload.log2_macs)
                           : ethosu_reserve_driver()) {}
  explicit ReservedDriver(ethosu_driver* driver) : driver_(driver) {}
  ~ReservedDriver() {
    if (driver_ != nullptr) {
      ethosu_release_driver(driver_);
    }
  }
  ReservedDriver(const ReservedDriver&) = delete;
  ReservedDriver& operator=(const ReservedDriver&) = delete;

  ethosu_driver* get() const { return driver_; }

 private:
  ethosu_driver* driver_;
};

// Counts the NPU's cycles during this object's lifetime. Enabled counters keep the NPU powered. Without power, the
// counters would lose their values at the end of a run.
class CycleCounter {
 public:
  CycleCounter(ethosu_driver* driver, uint64_t* cycles) : driver_(driver), cycles_(counts() ? cycles : nullptr) {
    if (cycles_ != nullptr) {
      ETHOSU_PMU_Enable(driver_);
      ETHOSU_PMU_CYCCNT_Reset(driver_);
      ETHOSU_PMU_CNTR_Enable(driver_, kCycles);
    }
  }
  ~CycleCounter() {
    if (cycles_ != nullptr) {
      *cycles_ = ETHOSU_PMU_Get_CCNTR(driver_);
      ETHOSU_PMU_Disable(driver_);
    }
  }
  CycleCounter(const CycleCounter&) = delete;
  CycleCounter& operator=(const CycleCounter&) = delete;

 private:
  static constexpr uint32_t kCycles = uint32_t{1} << 31;

  static bool counts() {
    return ETHOSU_PMU_Enable != nullptr && ETHOSU_PMU_Disable != nullptr && ETHOSU_PMU_CYCCNT_Reset != nullptr &&
           ETHOSU_PMU_CNTR_Enable != nullptr && ETHOSU_PMU_Get_CCNTR != nullptr;
  }

  ethosu_driver* driver_;
  uint64_t* cycles_;
};

// The complete cache lines in the firmware's buffer ethosu_fast_scratch.
struct FirmwareMemory {
  unsigned char* data = nullptr;
  size_t size = 0;
};

FirmwareMemory firmware_memory() {
  const size_t skipped = (kCacheLine - address(ethosu_fast_scratch) % kCacheLine) % kCacheLine;
  if (ethosu_fast_scratch == nullptr || skipped >= ethosu_fast_scratch_size) {
    return {};
  }
  return {ethosu_fast_scratch + skipped, (ethosu_fast_scratch_size - skipped) / kCacheLine * kCacheLine};
}

// Whether the firmware's buffer or the memory given to ethosu_init() is large enough. If both exist, the driver uses
// the memory given to ethosu_init(). If only the firmware's buffer is large enough, this function then returns true,
// but ethosu_invoke_v3() fails.
bool has_fast_scratch(const ethosu_driver* driver, const FastScratchSize& needed) {
  return round_up_to_cache_lines(needed.size) <= firmware_memory().size ||
         (driver != nullptr && driver->fast_memory != 0 && needed.size <= driver->fast_memory_size);
}

Error report_missing_fast_scratch(const ethosu_driver* driver, const FastScratchSize& needed) {
  const bool has_driver_memory = driver != nullptr && driver->fast_memory != 0;
  ARM_RUNTIME_LOG(Error,
                  "the program needs %lu bytes of fast scratch, and there are %lu: set "
                  "ethosu_fast_scratch(_size) to %lu bytes at a multiple of %lu, or give ethosu_init() that memory, or "
                  "export without Dedicated_Sram",
                  static_cast<PrintfUnsigned>(needed.size),
                  static_cast<PrintfUnsigned>(has_driver_memory ? driver->fast_memory_size : firmware_memory().size),
                  static_cast<PrintfUnsigned>(round_up_to_cache_lines(needed.size)),
                  static_cast<PrintfUnsigned>(kCacheLine));
  return Error::MemoryAllocationFailed;
}

// Reports that the program was compiled for another NPU. The NPU's registers state its MACs, but not its product.
Error report_other_npu(const EthosUPayload& payload, const ethosu_hw_info& hardware) {
  ARM_RUNTIME_LOG(Error,
                  "the program was compiled for Ethos-U%lu-%lu, and the NPU has %lu multiply-accumulates a "
                  "cycle: export for the NPU of this device",
                  static_cast<PrintfUnsigned>(payload.product), static_cast<PrintfUnsigned>(payload.macs()),
                  static_cast<PrintfUnsigned>(uint32_t{1} << (hardware.cfg.macs_per_cc & 15)));
  return Error::DelegateInvalidCompatibility;
}

Error report_missing_npu(const EthosUPayload& payload) {
  // If the driver is built for one kind of NPU, ethosu_reserve_driver() returns the driver of an NPU of that kind. In
  // this case, the program was compiled for another kind.
  const ReservedDriver any(ethosu_reserve_driver_ex != nullptr ? ethosu_reserve_driver() : nullptr);
  if (any.get() != nullptr) {
    ethosu_hw_info hardware = {};
    ethosu_get_hw_info(any.get(), &hardware);
    return report_other_npu(payload, hardware);
  }
  ARM_RUNTIME_LOG(Error,
                  "the driver has no Ethos-U%lu-%lu: call ethosu_init() or ethosu_init_ex() for it, or export "
                  "for the NPU that the driver has",
                  static_cast<PrintfUnsigned>(payload.product), static_cast<PrintfUnsigned>(payload.macs()));
  return Error::InvalidState;
}

Error report_failure(const EthosUPayload& payload, ethosu_driver* driver, int result) {
  ethosu_hw_info hardware = {};
  ethosu_get_hw_info(driver, &hardware);
  if (hardware.cfg.macs_per_cc != payload.log2_macs) {
    return report_other_npu(payload, hardware);
  }
  ARM_RUNTIME_LOG(Error,
                  "the driver failed with %d on a program for Ethos-U%lu-%lu: see the driver's own log; the NPU "
                  "stopped with a fault, or is another product",
                  result, static_cast<PrintfUnsigned>(payload.product), static_cast<PrintfUnsigned>(payload.macs()));
  return Error::Internal;
}

}  // namespace

void clean_cache(const void* data, size_t size) {
  const auto start = reinterpret_cast<uintptr_t>(data);
  const size_t before = start % kCacheLine;
  clean_lines(&ethosu_flush_dcache, start - before, round_up_to_cache_lines(before + size));
}

Error check_fast_scratch(const EthosUPayload& payload, const FastScratchSize& needed) {
  if (has_fast_scratch(nullptr, needed)) {
    return Error::Ok;
  }
  const ReservedDriver driver(payload);
  return has_fast_scratch(driver.get(), needed) ? Error::Ok : report_missing_fast_scratch(driver.get(), needed);
}

Error run_on_npu(const EthosUPayload& payload, const FastScratchSize& fast_scratch, uint8_t* scratch,
                 uint64_t* cycles) {
  const ReservedDriver reserved(payload);
  ethosu_driver* driver = reserved.get();
  if (driver == nullptr) {
    return report_missing_npu(payload);
  }
  // With several NPUs, this driver may be another one than the driver that check_fast_scratch() reserved.
  if (!has_fast_scratch(driver, fast_scratch)) {
    return report_missing_fast_scratch(driver, fast_scratch);
  }
  const FirmwareMemory memory = firmware_memory();
  const bool has_driver_memory = driver->fast_memory != 0;
  // If ethosu_init() was called with fast memory, the driver replaces the third base by the address of that memory. The
  // driver fails if the third size is larger than that memory. Therefore, pass 0 if the needed size is unknown.
  uint64_t bases[kBaseCount] = {address(payload.weights.data), address(scratch), address(memory.data)};
  const size_t sizes[kBaseCount] = {payload.weights.size, round_up_to_cache_lines(payload.scratch_size),
                                    fast_scratch.known  ? fast_scratch.size
                                    : has_driver_memory ? 0
                                                        : memory.size};
  // Without fast scratch, pass no third base: some versions of the driver take a null pointer as "invalidate the whole
  // cache".
  const bool has_third = fast_scratch.known ? fast_scratch.size > 0 : has_driver_memory || memory.data != nullptr;
  int result = 0;
  {
    const CycleCounter counter(driver, cycles);
    result = ethosu_invoke_v3(driver, payload.commands.data, static_cast<int>(payload.commands.size), bases, sizes,
                              has_third ? kBaseCount : kBaseCount - 1, nullptr);
  }
  return result == 0 ? Error::Ok : report_failure(payload, driver, result);
}

}  // namespace arm_runtime
