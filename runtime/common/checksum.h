// SPDX-License-Identifier: Apache-2.0
// Checksums of a payload and of its external blocks, stored by arm_recipes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/compile_specs.h"
#include "common/executorch.h"
#include "common/log.h"

// Set by the CMake option of the same name.
#ifndef ARM_RUNTIME_CHECK_PAYLOADS
#define ARM_RUNTIME_CHECK_PAYLOADS 1
#endif

namespace arm_runtime {

inline constexpr bool kCheckPayloads = ARM_RUNTIME_CHECK_PAYLOADS != 0;

// Compile spec with the CRC-32 of the payload: 4 bytes, little endian.
inline constexpr char kChecksumSpec[] = "payload_crc32";

// The CRC-32 of zlib: polynomial 0xEDB88320, lowest bit first, inverted before and after.
inline uint32_t crc32(const void* data, size_t size) {
  // The table covers half a byte, so it occupies 64 bytes of firmware. A table for whole bytes would occupy 1 KiB.
  static constexpr uint32_t kTable[16] = {
      0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
      0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C, 0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C,
  };
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = 0xFFFFFFFF;
  for (size_t i = 0; i < size; ++i) {
    crc ^= bytes[i];
    crc = crc >> 4 ^ kTable[crc & 0xF];
    crc = crc >> 4 ^ kTable[crc & 0xF];
  }
  return ~crc;
}

// Compares data with the checksum in compile spec `key`. The log names the data by `what`. Returns Ok if the option
// ARM_RUNTIME_CHECK_PAYLOADS is off, or if there is no such spec: programs of other exporters have none. Returns
// InvalidProgram, with the reason in the log, if the checksums differ or the spec does not have 4 bytes.
inline Error verify_checksum(const char* backend, const char* what, const char* key, const void* data, size_t size,
                             ArrayRef<CompileSpec> specs) {
  if (!kCheckPayloads) {
    return Error::Ok;
  }
  CompileSpecNumber recorded;
  const Error error = read_spec_number(backend, specs, key, &recorded);
  if (error != Error::Ok || !recorded.found) {
    return error;
  }
  const uint32_t actual = crc32(data, size);
  if (actual != recorded.value) {
    ET_LOG(Error,
           "%s: the %s of %lu bytes has changed since it was exported: its CRC-32 is %08lx, recorded "
           "is %08lx: export or flash the program again",
           backend, what, static_cast<PrintfUnsigned>(size), static_cast<PrintfUnsigned>(actual),
           static_cast<PrintfUnsigned>(recorded.value));
    return Error::InvalidProgram;
  }
  return Error::Ok;
}

// Compares the payload with the checksum in its compile specs.
inline Error verify_payload_checksum(const char* backend, const void* data, size_t size, ArrayRef<CompileSpec> specs) {
  return verify_checksum(backend, "payload", kChecksumSpec, data, size, specs);
}

}  // namespace arm_runtime
