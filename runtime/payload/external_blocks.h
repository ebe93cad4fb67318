// SPDX-License-Identifier: Apache-2.0
// Command streams and weights outside the payload: named data of the program, or of a data file (.ptd) beside it.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "common/checksum.h"
#include "common/executorch.h"
#include "common/log.h"
#include "payload/ethosu_payload.h"

namespace arm_runtime {

// A block that may be external: its description for the log, and the compile spec with its CRC-32.
struct ExternalBlockKind {
  const char* what;
  const char* checksum_spec;
};
inline constexpr ExternalBlockKind kExternalCommands = {"command stream", "cmd_data_crc32"};
inline constexpr ExternalBlockKind kExternalWeights = {"weight data", "weight_data_crc32"};

// Loads the external block with this key. An empty key means that the payload contains the block; the result is then
// empty. The block stays in memory until the result is destroyed. Returns InvalidProgram, with the reason in the log,
// if the block is missing or does not have the recorded checksum. If FreeableBuffer::data_safe() fails, returns
// its error.
inline Result<FreeableBuffer> find_external_block(const char* backend, const ExternalBlockKind& kind,
                                                  const BackendInitContext& context, ArrayRef<CompileSpec> specs,
                                                  const ByteView& key) {
  if (key.size == 0) {
    return FreeableBuffer();
  }
  const auto* map = context.get_named_data_map();
  if (map == nullptr) {
    ET_LOG(Error, "%s: the %s is outside the payload, and there is no named data: load the program with its .ptd",
           backend, kind.what);
    return Error::InvalidProgram;
  }
  auto found = map->get_data(std::string_view(reinterpret_cast<const char*>(key.data), key.size));
  if (!found.ok()) {
    ET_LOG(Error, "%s: the %s is not among the named data: load the program with the .ptd of the same export", backend,
           kind.what);
    return Error::InvalidProgram;
  }
  const auto data = found->data_safe();
  if (!data.ok()) {
    return data.error();
  }
  const Error error = verify_checksum(backend, kind.what, kind.checksum_spec, *data, found->size(), specs);
  if (error != Error::Ok) {
    return error;
  }
  return found;
}

inline ByteView view_of(const FreeableBuffer& buffer) {
  return {static_cast<const uint8_t*>(buffer.data()), buffer.size()};
}

}  // namespace arm_runtime
