// SPDX-License-Identifier: Apache-2.0
#include "tests/payload/payload_abi.h"

#include <cstring>

#include "payload/ethosu_payload.h"

namespace {

using arm_runtime::ByteView;
using arm_runtime::EthosUPayload;
using arm_runtime::PayloadStatus;
using arm_runtime::PayloadTensor;
using arm_runtime::PayloadTensors;

constexpr int32_t kNoSuchTensor = -1;

uint64_t offset_of(const ByteView& view, const void* data) {
  return static_cast<uint64_t>(view.data - static_cast<const uint8_t*>(data));
}

}  // namespace

int32_t arm_payload_read(const void* data, uint64_t size, arm_payload_info* info, char* message,
                         uint64_t message_size) {
  EthosUPayload payload;
  const PayloadStatus status = arm_runtime::read_ethosu_payload(data, static_cast<size_t>(size), &payload);
  std::memset(info, 0, sizeof(*info));
  if (!status.ok()) {
    status.describe(message, static_cast<size_t>(message_size));
    return static_cast<int32_t>(status.error);
  }
  info->command_offset = offset_of(payload.commands, data);
  info->command_size = payload.commands.size;
  info->weight_offset = payload.weights.data == nullptr ? 0 : offset_of(payload.weights, data);
  info->weight_size = payload.weights.size;
  info->scratch_size = payload.scratch_size;
  info->fast_scratch_size = payload.fast_scratch_size;
  info->input_count = payload.inputs.count();
  info->output_count = payload.outputs.count();
  info->product = payload.product;
  info->macs = payload.macs();
  info->stream_kind = static_cast<uint32_t>(payload.kind);
  return 0;
}

int32_t arm_payload_tensor_at(const void* data, uint64_t size, int32_t side, uint32_t index,
                              arm_payload_tensor* tensor) {
  EthosUPayload payload;
  const PayloadStatus status = arm_runtime::read_ethosu_payload(data, static_cast<size_t>(size), &payload);
  if (!status.ok()) {
    return static_cast<int32_t>(status.error);
  }
  const PayloadTensors& tensors = side == 0 ? payload.inputs : payload.outputs;
  if (side < 0 || side > 1 || index >= tensors.count()) {
    return kNoSuchTensor;
  }
  const PayloadTensor found = tensors.at(index);
  std::memcpy(tensor->shape, found.shape, sizeof(tensor->shape));
  tensor->element_size = found.element_size;
  tensor->offset = found.offset;
  tensor->region = found.region;
  return 0;
}
