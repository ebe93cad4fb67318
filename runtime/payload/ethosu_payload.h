// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"

namespace arm_runtime {

// Alignment of an Ethos-U's reads through its bus, in bytes.
constexpr size_t kNpuAlignment = 16;
constexpr size_t kPayloadRank = 6;
// Version of the payload format. Firmware that arm_recipes generates checks at compile time that its program was
// exported for this version.
constexpr int kPayloadFormat = 1;
// Maximum number of inputs, and of outputs. The limit bounds the work of the overlap check. A payload with more tensors
// is refused as damaged.
constexpr uint32_t kMaxPayloadTensors = 1024;
// Length of the key of an external block. ExecuTorch's own EthosUBackend accepts no other length.
constexpr size_t kNamedDataKeySize = 64;

// Memory regions of a command stream, with Vela's numbers. Each has a base pointer, to which offsets are relative.
enum class Region : int32_t {
  kWeights = 0,
  kScratch = 1,
  kFastScratch = 2,
  // Only in streams with separate regions for inputs and outputs.
  kInput = 3,
  kOutput = 4,
};

// Vela's containers of commands (custom operator payload): COP1 for ethos-u-core-driver, COP2 for Direct Drive.
enum class StreamKind : uint32_t { kCop1 = 1, kCop2 = 2 };

enum class PayloadError : int32_t {
  kNone = 0,
  kTruncated = 1,
  kNotAPayload = 2,
  kUnknownBlock = 3,
  kDuplicateBlock = 4,
  kMissingBlock = 5,
  kTrailingData = 6,
  // The header of a block has an invalid flag or reserved byte, or the key of an external block is invalid. Errors in
  // the header of the command stream itself are kCommandStream.
  kBlockHeader = 7,
  // A block of fixed length has another length, or the descriptions of inputs or outputs are too many or do not fill
  // their block.
  kLength = 8,
  kCommandStream = 9,
  kTensor = 10,
  kOverlap = 11,
};

template <>
inline constexpr const char* kPlaceNoun<PayloadError> = "block";

// Result of reading a payload. The place of an error is a block. The offset counts from the start of the payload, or,
// for an external block, from the start of its contents.
using PayloadStatus = BasicStatus<PayloadError>;

// A view into the caller's bytes.
struct ByteView {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// An input or output of the command stream.
struct PayloadTensor {
  int32_t shape[kPayloadRank];  // 1 for the axes that a tensor of lower rank lacks
  int32_t element_size;         // 1, 2, 4 or 8 bytes
  int32_t offset;               // in bytes from the start of the region; -1: not allocated
  int32_t region;
  uint64_t nbytes;

  bool is_allocated() const { return offset >= 0; }
  bool is_in(Region which) const { return region == static_cast<int32_t>(which); }
};

// The inputs or outputs of a payload, decoded one by one.
class PayloadTensors {
 public:
  PayloadTensors() = default;
  PayloadTensors(const uint8_t* records, uint32_t count) : records_(records), count_(count) {}

  uint32_t count() const { return count_; }
  // Requires `index` < count().
  PayloadTensor at(uint32_t index) const;

 private:
  const uint8_t* records_ = nullptr;
  uint32_t count_ = 0;
};

// A compiled program for an Ethos-U: views into the payload and its external blocks, which must outlive it.
struct EthosUPayload {
  ByteView commands;  // including Vela's header, which drivers expect
  ByteView weights;
  uint32_t scratch_size = 0;  // bytes, including inputs and outputs in Region::kScratch
  PayloadTensors inputs;
  PayloadTensors outputs;
  StreamKind kind = StreamKind::kCop1;
  // The NPU for which the program was compiled.
  uint32_t product = 0;            // 55, 65 or 85
  uint32_t product_code = 0;       // the driver's number of the product: 0, 1 or 2
  uint32_t log2_macs = 0;          // log2 of multiply-accumulates per cycle
  uint64_t fast_scratch_size = 0;  // bytes of Region::kFastScratch; 0 for COP1, whose header does not state it
  bool separate_io = false;        // COP2 only: inputs and outputs have separate regions
  bool aligned = false;            // payload, commands and weights start at multiples of kNpuAlignment

  uint32_t macs() const { return uint32_t{1} << log2_macs; }
};

// Keys of the named data that contain the external blocks of a payload. Blocks are external if methods share them, or
// if they are in a data file beside the program. The key is empty for a block that is in the payload.
struct ExternalKeys {
  ByteView commands;
  ByteView weights;
};

// The external blocks of a payload.
struct ExternalData {
  ByteView commands;
  ByteView weights;
};

// Returns the keys of external blocks. If the payload is damaged, both keys are empty; read_ethosu_payload() reports
// the damage.
ExternalKeys read_external_keys(const void* data, size_t size);

// Reads and validates the payload at `data`, at any alignment. `payload` is complete only if the status is ok. If the
// payload refers to external commands, `external` must contain them. If it refers to external weights and `external`
// has none, `weights` is empty. This function neither allocates memory nor throws nor writes to `data`.
PayloadStatus read_ethosu_payload(const void* data, size_t size, EthosUPayload* payload,
                                  const ExternalData& external = {});

}  // namespace arm_runtime
