// SPDX-License-Identifier: Apache-2.0
// Weights that several methods share, as named data of the program.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "common/checksum.h"
#include "common/executorch.h"
#include "common/log.h"
#include "payload/ethosu_payload.h"

namespace arm_runtime {

// The compile spec with the CRC-32 of these weights.
inline constexpr char kWeightsChecksumSpec[] = "weight_data_crc32";

// If the payload has shared weights, loads them and makes `payload` refer to them. They stay in memory as long as the
// result. Returns InvalidProgram, with the reason in the log, if the weights are missing or changed.
inline Result<FreeableBuffer> find_weights(const char* backend, const BackendInitContext& context,
                                           ArrayRef<CompileSpec> specs, EthosUPayload* payload) {
  if (payload->weights_name.size == 0) {
    return FreeableBuffer();
  }
  const auto* name = reinterpret_cast<const char*>(payload->weights_name.data);
  const auto* map = context.get_named_data_map();
  if (map == nullptr) {
    ET_LOG(Error, "%s: the program has no named data, in which the weights are that its methods share", backend);
    return Error::InvalidProgram;
  }
  auto found = map->get_data(std::string_view(name, payload->weights_name.size));
  if (!found.ok()) {
    ET_LOG(Error, "%s: the weights that methods share are not among the program's named data: export it again",
           backend);
    return Error::InvalidProgram;
  }
  const auto data = found->data_safe();
  if (!data.ok()) {
    return data.error();
  }
  payload->weights = {static_cast<const uint8_t*>(*data), found->size()};
  payload->aligned = payload->aligned && reinterpret_cast<uintptr_t>(*data) % kNpuAlignment == 0;
  const Error error = check_data(backend, "weight data", kWeightsChecksumSpec, *data, found->size(), specs);
  if (error != Error::Ok) {
    return error;
  }
  return found;
}

}  // namespace arm_runtime
