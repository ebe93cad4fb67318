// SPDX-License-Identifier: Apache-2.0
#include "emulator/command_stream.h"

#include <cstring>

#include "common/little_endian.h"

namespace arm_runtime::npu {
namespace {

// Bits of CommandName::products: the products that have the command.
constexpr uint8_t kOnU55U65 = 1;
constexpr uint8_t kOnU85 = 2;
constexpr uint8_t kOnAll = kOnU55U65 | kOnU85;

struct CommandName {
  uint16_t key;
  uint8_t products;
  const char* name;
};

// Unsorted, because loading searches it only once for each command.
constexpr CommandName kCommandNames[] = {
    {kOpStop, kOnAll, "NPU_OP_STOP"},
    {kOpIrq, kOnAll, "NPU_OP_IRQ"},
    {kOpConv, kOnAll, "NPU_OP_CONV"},
    {kOpDepthwise, kOnAll, "NPU_OP_DEPTHWISE"},
    {kOpPool, kOnAll, "NPU_OP_POOL"},
    {kOpElementwise, kOnAll, "NPU_OP_ELEMENTWISE"},
    {kOpResize, kOnU85, "NPU_OP_RESIZE"},
    {kOpDmaStart, kOnAll, "NPU_OP_DMA_START"},
    {kOpDmaWait, kOnAll, "NPU_OP_DMA_WAIT"},
    {kOpKernelWait, kOnAll, "NPU_OP_KERNEL_WAIT"},
    {kOpPmuMask, kOnAll, "NPU_OP_PMU_MASK"},
    {kOpBranch, kOnU85, "NPU_OP_BRANCH"},
    {kIfmPadTop, kOnAll, "NPU_SET_IFM_PAD_TOP"},
    {kIfmPadLeft, kOnAll, "NPU_SET_IFM_PAD_LEFT"},
    {kIfmPadRight, kOnAll, "NPU_SET_IFM_PAD_RIGHT"},
    {kIfmPadBottom, kOnAll, "NPU_SET_IFM_PAD_BOTTOM"},
    {kIfmDepthM1, kOnAll, "NPU_SET_IFM_DEPTH_M1"},
    {kIfmPrecision, kOnAll, "NPU_SET_IFM_PRECISION"},
    {kIfmUpscale, kOnAll, "NPU_SET_IFM_UPSCALE"},
    {kIfmBroadcast, kOnU85, "NPU_SET_IFM_BROADCAST"},
    {kIfmZeroPoint, kOnAll, "NPU_SET_IFM_ZERO_POINT"},
    {kIfmWidth0M1, kOnAll, "NPU_SET_IFM_WIDTH0_M1"},
    {kIfmHeight0M1, kOnAll, "NPU_SET_IFM_HEIGHT0_M1"},
    {kIfmHeight1M1, kOnAll, "NPU_SET_IFM_HEIGHT1_M1"},
    {kIfmIbEnd, kOnU55U65, "NPU_SET_IFM_IB_END"},
    {kIfmRegion, kOnAll, "NPU_SET_IFM_REGION"},
    {kOfmWidthM1, kOnAll, "NPU_SET_OFM_WIDTH_M1"},
    {kOfmHeightM1, kOnAll, "NPU_SET_OFM_HEIGHT_M1"},
    {kOfmDepthM1, kOnAll, "NPU_SET_OFM_DEPTH_M1"},
    {kOfmPrecision, kOnAll, "NPU_SET_OFM_PRECISION"},
    {kOfmBlkWidthM1, kOnAll, "NPU_SET_OFM_BLK_WIDTH_M1"},
    {kOfmBlkHeightM1, kOnAll, "NPU_SET_OFM_BLK_HEIGHT_M1"},
    {kOfmBlkDepthM1, kOnAll, "NPU_SET_OFM_BLK_DEPTH_M1"},
    {kOfmZeroPoint, kOnAll, "NPU_SET_OFM_ZERO_POINT"},
    {kOfmWidth0M1, kOnAll, "NPU_SET_OFM_WIDTH0_M1"},
    {kOfmHeight0M1, kOnAll, "NPU_SET_OFM_HEIGHT0_M1"},
    {kOfmHeight1M1, kOnAll, "NPU_SET_OFM_HEIGHT1_M1"},
    {kOfmRegion, kOnAll, "NPU_SET_OFM_REGION"},
    {kKernelWidthM1, kOnAll, "NPU_SET_KERNEL_WIDTH_M1"},
    {kKernelHeightM1, kOnAll, "NPU_SET_KERNEL_HEIGHT_M1"},
    {kKernelStride, kOnAll, "NPU_SET_KERNEL_STRIDE"},
    {kParallelMode, kOnU55U65, "NPU_SET_PARALLEL_MODE"},
    {kAccFormat, kOnAll, "NPU_SET_ACC_FORMAT"},
    {kActivation, kOnAll, "NPU_SET_ACTIVATION"},
    {kActivationMin, kOnAll, "NPU_SET_ACTIVATION_MIN"},
    {kActivationMax, kOnAll, "NPU_SET_ACTIVATION_MAX"},
    {kWeightRegion, kOnAll, "NPU_SET_WEIGHT_REGION"},
    {kScaleRegion, kOnAll, "NPU_SET_SCALE_REGION"},
    {kResizeXScaleNM1, kOnU85, "NPU_SET_RESIZE_X_SCALE_N_M1"},
    {kResizeYScaleNM1, kOnU85, "NPU_SET_RESIZE_Y_SCALE_N_M1"},
    {kResizeXOffset, kOnU85, "NPU_SET_RESIZE_X_OFFSET"},
    {kResizeYOffset, kOnU85, "NPU_SET_RESIZE_Y_OFFSET"},
    {kAbStart, kOnU55U65, "NPU_SET_AB_START"},
    {kWeightFormat, kOnU85, "NPU_SET_WEIGHT_FORMAT"},
    {kBlockdep, kOnAll, "NPU_SET_BLOCKDEP"},
    {kDmaSrcRegion, kOnAll, "NPU_SET_DMA0_SRC_REGION"},
    {kDmaDstRegion, kOnAll, "NPU_SET_DMA0_DST_REGION"},
    {kDmaSize0, kOnAll, "NPU_SET_DMA0_SIZE0"},
    {kDmaSize1, kOnAll, "NPU_SET_DMA0_SIZE1"},
    {kDmaIdxRegion, kOnU85, "NPU_SET_DMA0_IDX_REGION"},
    {kIfm2Broadcast, kOnAll, "NPU_SET_IFM2_BROADCAST"},
    {kIfm2Scalar, kOnU55U65, "NPU_SET_IFM2_SCALAR"},
    {kIfm2Precision, kOnAll, "NPU_SET_IFM2_PRECISION"},
    {kIfm2ZeroPoint, kOnAll, "NPU_SET_IFM2_ZERO_POINT"},
    {kIfm2Width0M1, kOnAll, "NPU_SET_IFM2_WIDTH0_M1"},
    {kIfm2Height0M1, kOnAll, "NPU_SET_IFM2_HEIGHT0_M1"},
    {kIfm2Height1M1, kOnAll, "NPU_SET_IFM2_HEIGHT1_M1"},
    {kIfm2IbStart, kOnU55U65, "NPU_SET_IFM2_IB_START"},
    {kIfm2Region, kOnAll, "NPU_SET_IFM2_REGION"},
    {kIfmBase0, kOnAll, "NPU_SET_IFM_BASE0"},
    {kIfmBase0 + 1, kOnAll, "NPU_SET_IFM_BASE1"},
    {kIfmBase0 + 2, kOnAll, "NPU_SET_IFM_BASE2"},
    {kIfmBase0 + 3, kOnAll, "NPU_SET_IFM_BASE3"},
    {kIfmStrideX, kOnAll, "NPU_SET_IFM_STRIDE_X"},
    {kIfmStrideY, kOnAll, "NPU_SET_IFM_STRIDE_Y"},
    {kIfmStrideC, kOnAll, "NPU_SET_IFM_STRIDE_C"},
    {kOfmBase0, kOnAll, "NPU_SET_OFM_BASE0"},
    {kOfmBase0 + 1, kOnAll, "NPU_SET_OFM_BASE1"},
    {kOfmBase0 + 2, kOnAll, "NPU_SET_OFM_BASE2"},
    {kOfmBase0 + 3, kOnAll, "NPU_SET_OFM_BASE3"},
    {kOfmStrideX, kOnAll, "NPU_SET_OFM_STRIDE_X"},
    {kOfmStrideY, kOnAll, "NPU_SET_OFM_STRIDE_Y"},
    {kOfmStrideC, kOnAll, "NPU_SET_OFM_STRIDE_C"},
    {kWeightBase, kOnAll, "NPU_SET_WEIGHT_BASE"},
    {kWeightLength, kOnAll, "NPU_SET_WEIGHT_LENGTH"},
    {kScaleBase, kOnAll, "NPU_SET_SCALE_BASE"},
    {kScaleLength, kOnAll, "NPU_SET_SCALE_LENGTH"},
    {kOfmScale, kOnAll, "NPU_SET_OFM_SCALE"},
    {kOpaScale, kOnU55U65, "NPU_SET_OPA_SCALE"},
    {kOpaScale, kOnU85, "NPU_SET_IFM_SCALE"},
    {kOpbScale, kOnU55U65, "NPU_SET_OPB_SCALE"},
    {kOpbScale, kOnU85, "NPU_SET_IFM2_SCALE"},
    {kOpScalar, kOnU85, "NPU_SET_OP_SCALAR"},
    {kDmaSrc, kOnAll, "NPU_SET_DMA0_SRC"},
    {kDmaDst, kOnAll, "NPU_SET_DMA0_DST"},
    {kDmaLen, kOnAll, "NPU_SET_DMA0_LEN"},
    {kDmaSrcStride0, kOnU55U65, "NPU_SET_DMA0_SKIP0"},
    {kDmaSrcStride1, kOnU55U65, "NPU_SET_DMA0_SKIP1"},
    {kDmaSrcStride0, kOnU85, "NPU_SET_DMA0_SRC_STRIDE0"},
    {kDmaSrcStride1, kOnU85, "NPU_SET_DMA0_SRC_STRIDE1"},
    {kDmaDstStride0, kOnU85, "NPU_SET_DMA0_DST_STRIDE0"},
    {kDmaDstStride1, kOnU85, "NPU_SET_DMA0_DST_STRIDE1"},
    {kDmaIdx, kOnU85, "NPU_SET_DMA0_IDX"},
    {kDmaIdxMax, kOnU85, "NPU_SET_DMA0_IDX_MAX"},
    {kDmaIdxSkip1, kOnU85, "NPU_SET_DMA0_IDX_SKIP1"},
    {kIfm2Base0, kOnAll, "NPU_SET_IFM2_BASE0"},
    {kIfm2Base0 + 1, kOnAll, "NPU_SET_IFM2_BASE1"},
    {kIfm2Base0 + 2, kOnAll, "NPU_SET_IFM2_BASE2"},
    {kIfm2Base0 + 3, kOnAll, "NPU_SET_IFM2_BASE3"},
    {kIfm2StrideX, kOnAll, "NPU_SET_IFM2_STRIDE_X"},
    {kIfm2StrideY, kOnAll, "NPU_SET_IFM2_STRIDE_Y"},
    {kIfm2StrideC, kOnAll, "NPU_SET_IFM2_STRIDE_C"},
    {kWeight1Base, kOnAll, "NPU_SET_WEIGHT1_BASE"},
    {kWeight1Length, kOnAll, "NPU_SET_WEIGHT1_LENGTH"},
    {kScale1Base, kOnU55U65, "NPU_SET_SCALE1_BASE"},
    {kWeight2Base, kOnU85, "NPU_SET_WEIGHT2_BASE"},
    {kScale1Length, kOnU55U65, "NPU_SET_SCALE1_LENGTH"},
    {kScale1Length, kOnU85, "NPU_SET_WEIGHT2_LENGTH"},
    {kWeight3Base, kOnU85, "NPU_SET_WEIGHT3_BASE"},
    {kWeight3Length, kOnU85, "NPU_SET_WEIGHT3_LENGTH"},
    {kResizeXStep, kOnU85, "NPU_SET_RESIZE_X_STEP"},
    {kResizeYStep, kOnU85, "NPU_SET_RESIZE_Y_STEP"},
};

const char* name_of(uint16_t key, uint8_t product) {
  for (const CommandName& command : kCommandNames) {
    if (command.key == key && (command.products & product) != 0) {
      return command.name;
    }
  }
  return nullptr;
}

constexpr uint32_t kConfigTag = 1;
constexpr uint32_t kCommandsTag = 2;
constexpr uint32_t kNopTag = 5;

}  // namespace

Status CommandReader::open(const uint8_t* data, size_t size) {
  data_ = data;
  size_ = size;
  if (size < 16) {
    return failure(Error::kStream, "a command stream has a header of at least 16 bytes, but has % bytes",
                   static_cast<int64_t>(size));
  }
  if (std::memcmp(data, "COP1", 4) == 0) {
    return open_cop1();
  }
  if (std::memcmp(data, "COP2", 4) == 0) {
    return open_cop2();
  }
  return failure(Error::kStream, "it begins neither with COP1 nor with COP2");
}

// "COP1", then driver actions: OPTCFG (with the configuration and the id), NOPs, and the number of command words. The
// commands follow.
Status CommandReader::open_cop1() {
  size_t at = 4;
  bool configured = false;
  while (at + 4 <= size_) {
    const uint32_t action = read_u32(data_ + at);
    const uint32_t tag = action & 0xFF;
    at += 4;
    if (tag == kConfigTag && at + 8 <= size_) {
      const Status status = configure(read_u32(data_ + at));
      if (!status.ok()) {
        return status;
      }
      configured = true;
      at += 8;
    } else if (tag == kCommandsTag && configured) {
      const uint64_t words = (uint64_t{action >> 8 & 0xFF} << 16) | action >> 16;
      if (words * 4 > size_ - at) {
        return failure(Error::kStream, "% words of commands are announced, % bytes follow", static_cast<int64_t>(words),
                       static_cast<int64_t>(size_ - at));
      }
      position_ = at;
      end_ = at + static_cast<size_t>(words) * 4;
      return {};
    } else if (tag != kNopTag) {
      return failure(Error::kStream, "the header has an unknown action % at byte %", action,
                     static_cast<int64_t>(at - 4));
    }
  }
  return failure(Error::kStream, "the header announces no commands");
}

// Fields by byte offset: 4: major version (uint16); 24: length of the metadata, which extend from 28 to the commands;
// 28: "VEUM"; 40: configuration. The payload parser (payload/ethosu_payload.h) checks lengths and versions; this reader
// only stays in bounds.
Status CommandReader::open_cop2() {
  constexpr size_t kMetadataAt = 28;
  constexpr size_t kFixedSize = 60;
  if (size_ < kFixedSize || std::memcmp(data_ + kMetadataAt, "VEUM", 4) != 0) {
    return failure(Error::kStream, "its metadata is not of the known kind");
  }
  const size_t metadata = read_u32(data_ + 24);
  if (metadata < kFixedSize - kMetadataAt || metadata > size_ - kMetadataAt ||
      (size_ - kMetadataAt - metadata) % 4 != 0) {
    return failure(Error::kStream,
                   "after % bytes of metadata, the commands must fill the % bytes of the stream with whole words",
                   static_cast<int64_t>(metadata), static_cast<int64_t>(size_));
  }
  position_ = kMetadataAt + metadata;
  end_ = size_;
  return configure(read_u32(data_ + 40));
}

Status CommandReader::configure(uint32_t config) {
  const uint32_t product = config >> 28;
  const uint32_t log2_macs = config & 0xF;
  if (product > 2) {
    return failure(Error::kStream, "the header names an unknown product, %", product);
  }
  configuration_.product = static_cast<Product>(product);
  configuration_.macs = uint32_t{1} << log2_macs;
  const uint32_t least = product == 0 ? 5 : product == 1 ? 8 : 7;
  const uint32_t most = product == 0 ? 8 : product == 1 ? 9 : 11;
  if (log2_macs < least || log2_macs > most) {
    return failure(Error::kStream, "the header names % MACs, which this product does not have", configuration_.macs);
  }
  const uint32_t macs = configuration_.macs;
  const int64_t shram_bytes = static_cast<int64_t>(config >> 8 & 0xFF) << 10;  // U55 and U65: of all cores
  configuration_.cores = product == 1 ? macs / 256 : product == 0 || macs < 512 ? 1 : macs == 512 ? 2 : 4;
  configuration_.table_address = product == 2 ? 0 : shram_bytes / configuration_.cores - kTableBytes;
  return {};
}

Status CommandReader::next(Command* command) {
  const uint32_t head = read_u32(data_ + position_);
  const uint32_t control = head >> 14 & 3;
  *command = Command{};
  command->offset = position_;
  command->key = static_cast<uint16_t>((head & 0x3FF) | (control == 1 ? uint32_t{kWithWord} : 0));
  command->parameter = static_cast<uint16_t>(head >> 16);
  const char* name = control < 2 ? name_of(command->key, configuration_.is_u85() ? kOnU85 : kOnU55U65) : nullptr;
  position_ += 4;
  Status status;
  if (name == nullptr) {
    status = failure(Error::kCommand, "unknown: opcode %, control %", head & 0x3FF, control);
    status.place = "a command";
  } else if (control == 1 && position_ + 4 > end_) {
    status = failure(Error::kStream, "the stream ends before the command's second word");
    status.place = name;
  } else if (control == 1) {
    command->word = read_u32(data_ + position_);
    position_ += 4;
  }
  command->name = name;
  status.offset = command->offset;
  return status;
}

}  // namespace arm_runtime::npu
