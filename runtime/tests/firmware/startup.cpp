// SPDX-License-Identifier: Apache-2.0
// Start-up code of a Cortex-M55. A reset calls run_firmware(). A fault ends QEMU.
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {
// Symbols of the linker script.
extern uint8_t data_load[], data_start[], data_end[], bss_start[], bss_end[], stack_top[];

int run_firmware();
// Functions of the C library: static constructors, and the streams of semihosting.
void __libc_init_array();
void initialise_monitor_handles();
void _init() {}
void _fini() {}
// Handle that the C++ ABI passes when it registers destructors. It may be null, because there is only one image.
void* __dso_handle = nullptr;

[[noreturn]] void reset();
[[noreturn]] void fault();
}

namespace {

using Handler = void (*)();
constexpr int kCoreExceptions = 16;

// Coprocessor Access Control Register (Armv8-M reference manual): full access to CP10 and CP11, which are the floating
// point unit and the vector extension.
void enable_vectors() {
  auto* access = reinterpret_cast<volatile uint32_t*>(0xE000ED88);
  *access = *access | 0xF << 20;
  __asm__ volatile("dsb\n isb" ::: "memory");
}

// Arm semihosting: the operation is in r0, its argument in r1.
void semihosting(uint32_t operation, const void* argument) {
  register uint32_t r0 __asm__("r0") = operation;
  register const void* r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
}

}  // namespace

// Vector table: the first word is the stack pointer, the others are exceptions from 1 (reset) on.
__attribute__((section(".vectors"), used)) const struct {
  const void* stack;
  Handler handlers[kCoreExceptions - 1];
} vectors = {stack_top,
             {reset, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault}};

void reset() {
  enable_vectors();
  std::memcpy(data_start, data_load, static_cast<size_t>(data_end - data_start));
  std::memset(bss_start, 0, static_cast<size_t>(bss_end - bss_start));
  initialise_monitor_handles();
  __libc_init_array();
  std::exit(run_firmware());
}

void fault() {
  constexpr uint32_t kWrite0 = 0x04, kExit = 0x18, kRunTimeError = 0x20023;
  semihosting(kWrite0, "firmware: a fault of the processor\n");
  semihosting(kExit, reinterpret_cast<const void*>(kRunTimeError));
  while (true) {
  }
}
