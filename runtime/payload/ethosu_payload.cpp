// SPDX-License-Identifier: Apache-2.0
#include "payload/ethosu_payload.h"

#include <cstring>

#include "common/little_endian.h"

namespace arm_runtime {
namespace {

// A block: name (16 bytes, zero padded), uint32 length of the data, uint8 flag (1: the data is external), 11 reserved
// bytes, and the data, padded to a multiple of 16 bytes. All numbers are little endian.
constexpr size_t kNameSize = 16;
constexpr size_t kBlockHeaderSize = 32;
constexpr size_t kLengthAt = 16;
constexpr size_t kExternalAt = 20;
// An input or output: shape[6], element size, offset, region; int32 each.
constexpr size_t kTensorSize = 4 * (kPayloadRank + 3);

enum BlockId : uint32_t { kHeader, kCommands, kWeights, kScratch, kInputs, kOutputs, kFooter, kBlockCount };

constexpr char kNames[kBlockCount][kNameSize] = {
    "vela_bin_stream", "cmd_data", "weight_data", "scratch_size", "inputs", "outputs", "vela_end_stream",
};

PayloadStatus failure(PayloadError error, const char* block, uint64_t offset, const char* reason, int64_t first = 0,
                      int64_t second = 0, int64_t third = 0) {
  return make_failure(error, block, offset, reason, first, second, third);
}

int64_t signed_size(size_t size) { return static_cast<int64_t>(size); }

struct Block {
  const uint8_t* data = nullptr;
  size_t size = 0;
  // Offset of the data in the payload.
  size_t offset = 0;
  bool present = false;
  // The data is external: the block contains the key of named data.
  bool external = false;
};

bool is_named_data_key(const uint8_t* data, size_t size) {
  size_t printable = 0;
  while (printable < size && data[printable] > 0x20 && data[printable] < 0x7F) {
    ++printable;
  }
  return size == kNamedDataKeySize && printable == size;
}

// Splits the payload into its blocks. It checks names, headers and lengths, but not contents.
class BlockReader {
 public:
  BlockReader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  PayloadStatus read() {
    while (position_ < size_) {
      const PayloadStatus status = next();
      if (!status.ok()) {
        return status;
      }
      if (blocks_[kFooter].present && position_ < size_) {
        return failure(PayloadError::kTrailingData, kNames[kFooter], position_, "% bytes follow the last block",
                       signed_size(size_ - position_));
      }
    }
    for (uint32_t id = 0; id < kBlockCount; ++id) {
      if (!blocks_[id].present) {
        return failure(PayloadError::kMissingBlock, kNames[id], size_, "the payload ends without this block");
      }
    }
    return {};
  }

  const Block& block(BlockId id) const { return blocks_[id]; }

 private:
  PayloadStatus next() {
    const size_t start = position_;
    const size_t left = size_ - start;
    if (left < kBlockHeaderSize) {
      return failure(PayloadError::kTruncated, kNames[last_], start,
                     start == 0 ? "a block header has 32 bytes, but the payload has % bytes"
                                : "a block header has 32 bytes, but only % bytes follow this block",
                     signed_size(left));
    }
    uint32_t id = 0;
    while (id < kBlockCount && std::memcmp(data_ + start, kNames[id], kNameSize) != 0) {
      ++id;
    }
    if (start == 0 && id != kHeader) {
      return failure(PayloadError::kNotAPayload, kNames[kHeader], 0,
                     "the bytes do not start with this block: not a program compiled for an Ethos-U");
    }
    if (id == kBlockCount) {
      return failure(PayloadError::kUnknownBlock, kNames[last_], start, "the next block has an unknown name");
    }
    if (blocks_[id].present) {
      return failure(PayloadError::kDuplicateBlock, kNames[id], start, "the block occurs twice");
    }
    return header(id, start);
  }

  PayloadStatus header(uint32_t id, size_t start) {
    const uint8_t* header = data_ + start;
    const bool external = header[kExternalAt] == 1;
    if (external && id != kWeights && id != kCommands) {
      return failure(
          PayloadError::kBlockHeader, kNames[id], start + kExternalAt,
          "its data is outside the payload, where only commands and weights may be: export this block inline");
    }
    for (size_t i = kExternalAt + (external ? 1 : 0); i < kBlockHeaderSize; ++i) {
      if (header[i] != 0) {
        return failure(PayloadError::kBlockHeader, kNames[id], start + i, "reserved byte is %, not 0", header[i]);
      }
    }
    const size_t length = read_u32(header + kLengthAt);
    const size_t left = size_ - start - kBlockHeaderSize;
    // Compare before rounding up the length: the rounding could overflow on a 32-bit machine.
    if (length > left) {
      return failure(PayloadError::kTruncated, kNames[id], start + kLengthAt,
                     "its length is % bytes, % are left in the payload", signed_size(length), signed_size(left));
    }
    const size_t padding = (kNpuAlignment - length % kNpuAlignment) % kNpuAlignment;
    if (padding > left - length) {
      return failure(PayloadError::kTruncated, kNames[id], start + kBlockHeaderSize + length,
                     "it needs % bytes of padding, % are left in the payload", signed_size(padding),
                     signed_size(left - length));
    }
    if (external && !is_named_data_key(header + kBlockHeaderSize, length)) {
      return failure(PayloadError::kBlockHeader, kNames[id], start + kExternalAt,
                     "the key of its external data (% bytes) is not % printable characters: export the program again",
                     signed_size(length), signed_size(kNamedDataKeySize));
    }
    blocks_[id] = {header + kBlockHeaderSize, length, start + kBlockHeaderSize, true, external};
    position_ = start + kBlockHeaderSize + length + padding;
    last_ = id;
    return {};
  }

  const uint8_t* data_;
  size_t size_;
  size_t position_ = 0;
  // The block before position_.
  uint32_t last_ = kHeader;
  Block blocks_[kBlockCount];
};

PayloadStatus bad_commands(const Block& block, size_t at, const char* reason, int64_t first = 0, int64_t second = 0,
                           int64_t third = 0) {
  return failure(PayloadError::kCommandStream, kNames[kCommands], block.offset + at, reason, first, second, third);
}

// Reads the configuration word, which drivers compare with the NPU's CONFIG register.
PayloadStatus read_configuration(const Block& block, size_t at, EthosUPayload* payload) {
  constexpr uint32_t kProducts[] = {55, 65, 85};
  const uint32_t word = read_u32(block.data + at);
  const uint32_t product = word >> 28;
  const uint32_t log2_macs = word & 0xF;
  if (product >= sizeof(kProducts) / sizeof(kProducts[0])) {
    return bad_commands(block, at, "unknown product % in its configuration", product);
  }
  if (log2_macs < 5 || log2_macs > 11) {
    return bad_commands(block, at, "its configuration has 2**% multiply-accumulates; Ethos-U NPUs have 32 to 2048",
                        log2_macs);
  }
  payload->product = kProducts[product];
  payload->product_code = product;
  payload->log2_macs = log2_macs;
  return {};
}

// COP1: the magic, then records that begin with a tag word. The low byte of the tag is the type of the record. For
// commands, the tag also contains their length in words (bits 8-15: high part, bits 16-31: low part).
PayloadStatus read_cop1(const Block& block, EthosUPayload* payload) {
  enum : uint8_t { kConfiguration = 1, kCommandStream = 2, kNop = 5 };
  constexpr size_t kConfigurationSize = 12;
  size_t at = 4;
  bool configured = false;
  while (block.size - at >= 4) {
    const uint32_t tag = read_u32(block.data + at);
    const size_t left = block.size - at;
    switch (tag & 0xFF) {
      case kNop:
        at += 4;
        break;
      case kConfiguration: {
        if (left < kConfigurationSize) {
          return bad_commands(block, at, "its configuration is cut off");
        }
        const PayloadStatus status = read_configuration(block, at + 4, payload);
        if (!status.ok()) {
          return status;
        }
        configured = true;
        at += kConfigurationSize;
        break;
      }
      case kCommandStream: {
        const size_t words = (tag >> 8 & 0xFF) << 16 | tag >> 16;
        if (!configured) {
          return bad_commands(block, at, "commands without a configuration before them");
        }
        if (words == 0 || left - 4 != 4 * words) {
          return bad_commands(block, at, "its header gives % bytes of commands, but % bytes follow",
                              signed_size(4 * words), signed_size(left - 4));
        }
        if ((at + 4) % kNpuAlignment != 0) {
          return bad_commands(block, at, "the commands do not start at a multiple of 16 bytes");
        }
        payload->kind = StreamKind::kCop1;
        return {};
      }
      default:
        return bad_commands(block, at, "unknown record %", tag & 0xFF);
    }
  }
  return bad_commands(block, at, "it ends without commands");
}

// Header of a COP2 stream. Fields without a type are uint32.
//   offset  field
//    0      magic
//    4      major version, uint16
//    6      minor version, uint16
//    8      number of bytes from offset 16 to the end, uint64
//   16      entry kind (1: commands)
//   20      number of bytes from offset 24 to the end
//   24      number of bytes from offset 28 to the commands
//   28      "VEUM"
//   32      major version of the metadata, uint16
//   34      minor version of the metadata, uint16
//   36      number of bytes from offset 40 to offset 60
//   40      configuration
//   44      architecture
//   48      addressing
//   52      fast scratch size, uint64
//   60      filler
PayloadStatus read_cop2(const Block& block, EthosUPayload* payload) {
  constexpr size_t kFixedSize = 60;
  constexpr size_t kMetadataAt = 28;
  constexpr uint16_t kMajorVersion = 1;
  const uint8_t* data = block.data;
  if (block.size < kFixedSize) {
    return bad_commands(block, 0, "the header of a COP2 stream has % bytes, this stream has % bytes", kFixedSize,
                        signed_size(block.size));
  }
  // A newer minor version only adds fields, which the lengths include.
  if (read_u16(data + 4) != kMajorVersion) {
    return bad_commands(block, 4, "its major version is %, not %", read_u16(data + 4), kMajorVersion);
  }
  if (read_u32(data + 12) != 0 || read_u32(data + 8) != block.size - 16) {
    return bad_commands(block, 8, "its length field is % (upper 32 bits: %), but % bytes follow", read_u32(data + 8),
                        read_u32(data + 12), signed_size(block.size - 16));
  }
  if (read_u32(data + 16) != 1 || read_u32(data + 20) != block.size - 24) {
    return bad_commands(block, 16, "its entry has kind % and % bytes, instead of kind 1 and all bytes up to the end",
                        read_u32(data + 16), read_u32(data + 20));
  }
  if (std::memcmp(data + kMetadataAt, "VEUM", 4) != 0 || read_u32(data + 36) < kFixedSize - 40) {
    return bad_commands(block, kMetadataAt, "its metadata is not of the known kind");
  }
  if (read_u16(data + 32) != kMajorVersion) {
    return bad_commands(block, 32, "the major version of its metadata is %, not %", read_u16(data + 32), kMajorVersion);
  }
  const size_t metadata = read_u32(data + 24);
  if (metadata == block.size - kMetadataAt) {
    return bad_commands(block, block.size, "it ends without commands");
  }
  if (metadata < kFixedSize - kMetadataAt || metadata > block.size - kMetadataAt ||
      (kMetadataAt + metadata) % kNpuAlignment != 0 || (block.size - kMetadataAt - metadata) % 4 != 0) {
    return bad_commands(block, 24,
                        "after % bytes of metadata, the commands must start at a multiple of 16 bytes and fill the % "
                        "bytes of the stream with whole words",
                        signed_size(metadata), signed_size(block.size));
  }
  const uint32_t addressing = read_u32(data + 48);
  if (addressing != 1 && addressing != 2) {
    return bad_commands(block, 48, "unknown addressing %", addressing);
  }
  payload->kind = StreamKind::kCop2;
  payload->separate_io = addressing == 2;
  payload->fast_scratch_size = uint64_t{read_u32(data + 56)} << 32 | read_u32(data + 52);
  return read_configuration(block, 40, payload);
}

PayloadStatus read_commands(const Block& block, EthosUPayload* payload) {
  payload->commands = {block.data, block.size};
  if (block.size == 0) {
    return bad_commands(block, 0,
                        block.external ? "the command stream is outside the payload and was not found: load the "
                                         "program with the .ptd of the same export"
                                       : "the command stream is empty");
  }
  if (block.size >= 4 && std::memcmp(block.data, "COP1", 4) == 0) {
    return read_cop1(block, payload);
  }
  if (block.size >= 4 && std::memcmp(block.data, "COP2", 4) == 0) {
    return read_cop2(block, payload);
  }
  return bad_commands(block, 0, "it starts neither with COP1 nor with COP2");
}

// Checks one input or output. `io_region` is the region of inputs or outputs in streams with separate regions for them.
PayloadStatus check_tensor(const PayloadTensor& tensor, const char* name, size_t at, int64_t index, Region io_region,
                           const EthosUPayload& payload) {
  uint64_t nbytes = 1;
  const int32_t size = tensor.element_size;
  if (size != 1 && size != 2 && size != 4 && size != 8) {
    return failure(PayloadError::kTensor, name, at + 4 * kPayloadRank, "tensor % has elements of % bytes", index, size);
  }
  nbytes = static_cast<uint64_t>(size);
  for (size_t i = 0; i < kPayloadRank; ++i) {
    const int32_t extent = tensor.shape[i];
    if (extent <= 0) {
      return failure(PayloadError::kTensor, name, at + 4 * i, "dimension % of tensor % is %", static_cast<int64_t>(i),
                     index, extent);
    }
    // Offsets have 32 bits, so a larger tensor cannot be addressed. The bound also prevents overflow below.
    if (__builtin_mul_overflow(nbytes, static_cast<uint64_t>(extent), &nbytes) || nbytes > UINT32_MAX) {
      return failure(PayloadError::kTensor, name, at, "tensor % is larger than 4 GiB", index);
    }
  }
  const bool in_io_region = tensor.is_in(io_region);
  if (!in_io_region && !tensor.is_in(Region::kScratch)) {
    return failure(PayloadError::kTensor, name, at + 4 * (kPayloadRank + 2), "tensor % is in region %, not in 1 or %",
                   index, tensor.region, static_cast<int64_t>(io_region));
  }
  if (in_io_region && !payload.separate_io) {
    return failure(PayloadError::kTensor, name, at + 4 * (kPayloadRank + 2),
                   "tensor % is in region %, which its commands do not address", index, tensor.region);
  }
  if (tensor.offset < -1) {
    return failure(PayloadError::kTensor, name, at + 4 * (kPayloadRank + 1), "tensor % is at offset %", index,
                   tensor.offset);
  }
  if (tensor.is_allocated() && !in_io_region && static_cast<uint64_t>(tensor.offset) + nbytes > payload.scratch_size) {
    return failure(PayloadError::kTensor, name, at + 4 * (kPayloadRank + 1),
                   "tensor % ends at byte % of a scratch of % bytes", index,
                   static_cast<int64_t>(static_cast<uint64_t>(tensor.offset) + nbytes), payload.scratch_size);
  }
  return {};
}

bool are_overlapping(const PayloadTensor& a, const PayloadTensor& b) {
  if (a.region != b.region || !a.is_allocated() || !b.is_allocated()) {
    return false;
  }
  const uint64_t a_start = static_cast<uint64_t>(a.offset);
  const uint64_t b_start = static_cast<uint64_t>(b.offset);
  return a_start < b_start + b.nbytes && b_start < a_start + a.nbytes;
}

bool have_same_place(const PayloadTensor& a, const PayloadTensor& b) {
  return a.offset == b.offset && a.nbytes == b.nbytes;
}

// Checks that no two inputs, or no two outputs, overlap. An input and an output may overlap: Vela may place an output
// in the memory of an input. With `may_repeat`, two tensors may have the same address and size: a model may return a
// tensor twice.
PayloadStatus check_overlaps(const PayloadTensors& tensors, const char* name, size_t at, bool may_repeat) {
  for (uint32_t i = 1; i < tensors.count(); ++i) {
    const PayloadTensor tensor = tensors.at(i);
    for (uint32_t j = 0; j < i; ++j) {
      const PayloadTensor other = tensors.at(j);
      if (are_overlapping(tensor, other) && !(may_repeat && have_same_place(tensor, other))) {
        return failure(PayloadError::kOverlap, name, at + 4 + kTensorSize * i, "tensors % and % overlap in region %", j,
                       i, tensor.region);
      }
    }
  }
  return {};
}

PayloadStatus read_tensors(const Block& block, BlockId id, const EthosUPayload& payload, PayloadTensors* tensors) {
  const char* name = kNames[id];
  if (block.size < 4) {
    return failure(PayloadError::kLength, name, block.offset, "% bytes cannot hold a count", signed_size(block.size));
  }
  const uint32_t count = read_u32(block.data);
  if (count > kMaxPayloadTensors || block.size != 4 + kTensorSize * count) {
    return failure(
        PayloadError::kLength, name, block.offset,
        "% tensors of 36 bytes and their count must fill the % bytes of the block; at most % tensors are allowed",
        count, signed_size(block.size), kMaxPayloadTensors);
  }
  *tensors = PayloadTensors(block.data + 4, count);
  const Region io_region = id == kInputs ? Region::kInput : Region::kOutput;
  for (uint32_t i = 0; i < count; ++i) {
    const PayloadStatus status =
        check_tensor(tensors->at(i), name, block.offset + 4 + kTensorSize * i, i, io_region, payload);
    if (!status.ok()) {
      return status;
    }
  }
  return check_overlaps(*tensors, name, block.offset, id == kOutputs);
}

PayloadStatus check_length(const Block& block, BlockId id, size_t length) {
  if (block.size == length) {
    return {};
  }
  return failure(PayloadError::kLength, kNames[id], block.offset - kBlockHeaderSize + kLengthAt,
                 "its length is % bytes, not %", signed_size(block.size), signed_size(length));
}

ByteView external_key(const Block& block) { return block.external ? ByteView{block.data, block.size} : ByteView(); }

// Replaces the key of an external block by the contents. Offsets in errors then count from the start of the contents.
Block resolve(Block block, const ByteView& contents) {
  if (block.external) {
    block.data = contents.data;
    block.size = contents.size;
    block.offset = 0;
  }
  return block;
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kNpuAlignment == 0; }

}  // namespace

PayloadTensor PayloadTensors::at(uint32_t index) const {
  const uint8_t* record = records_ + kTensorSize * index;
  PayloadTensor tensor;
  for (size_t i = 0; i < kPayloadRank; ++i) {
    tensor.shape[i] = read_i32(record + 4 * i);
  }
  tensor.element_size = read_i32(record + 4 * kPayloadRank);
  tensor.offset = read_i32(record + 4 * (kPayloadRank + 1));
  tensor.region = read_i32(record + 4 * (kPayloadRank + 2));
  // Unsigned arithmetic, because the product of unchecked values may wrap around.
  tensor.nbytes = static_cast<uint64_t>(tensor.element_size);
  for (const int32_t extent : tensor.shape) {
    tensor.nbytes *= static_cast<uint64_t>(extent);
  }
  return tensor;
}

ExternalKeys read_external_keys(const void* data, size_t size) {
  BlockReader reader(static_cast<const uint8_t*>(data), data == nullptr ? 0 : size);
  if (!reader.read().ok()) {
    return {};
  }
  return {external_key(reader.block(kCommands)), external_key(reader.block(kWeights))};
}

PayloadStatus read_ethosu_payload(const void* data, size_t size, EthosUPayload* payload, const ExternalData& external) {
  *payload = EthosUPayload();
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  if (bytes == nullptr || size == 0) {
    return failure(PayloadError::kTruncated, kNames[kHeader], 0, "the payload is empty");
  }
  BlockReader reader(bytes, size);
  PayloadStatus status = reader.read();
  if (status.ok()) {
    status = check_length(reader.block(kHeader), kHeader, 0);
  }
  if (status.ok()) {
    status = check_length(reader.block(kFooter), kFooter, 0);
  }
  if (status.ok()) {
    status = check_length(reader.block(kScratch), kScratch, 4);
  }
  if (status.ok()) {
    const Block weights = resolve(reader.block(kWeights), external.weights);
    payload->weights = {weights.data, weights.size};
    payload->scratch_size = read_u32(reader.block(kScratch).data);
    status = read_commands(resolve(reader.block(kCommands), external.commands), payload);
    payload->aligned = is_aligned(data) && is_aligned(payload->commands.data) && is_aligned(payload->weights.data);
  }
  if (status.ok()) {
    status = read_tensors(reader.block(kInputs), kInputs, *payload, &payload->inputs);
  }
  if (status.ok()) {
    status = read_tensors(reader.block(kOutputs), kOutputs, *payload, &payload->outputs);
  }
  return status;
}

}  // namespace arm_runtime
