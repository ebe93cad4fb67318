// SPDX-License-Identifier: Apache-2.0
#include "emulator/command_stream.h"

#include <cstring>

#include "common/little_endian.h"

namespace arm_runtime::npu {
namespace {

constexpr uint8_t kOld = 1;  // U55 and U65
constexpr uint8_t kNew = 2;  // U85
constexpr uint8_t kAll = kOld | kNew;

struct Known {
  uint16_t key;
  uint8_t products;
  const char* name;
};

// Sorted by nothing: looked through once for each command, while a program is loaded.
constexpr Known kKnown[] = {
    {kOpStop, kAll, "NPU_OP_STOP"},
    {kOpIrq, kAll, "NPU_OP_IRQ"},
    {kOpConv, kAll, "NPU_OP_CONV"},
    {kOpDepthwise, kAll, "NPU_OP_DEPTHWISE"},
    {kOpPool, kAll, "NPU_OP_POOL"},
    {kOpElementwise, kAll, "NPU_OP_ELEMENTWISE"},
    {kOpResize, kNew, "NPU_OP_RESIZE"},
    {kOpDmaStart, kAll, "NPU_OP_DMA_START"},
    {kOpDmaWait, kAll, "NPU_OP_DMA_WAIT"},
    {kOpKernelWait, kAll, "NPU_OP_KERNEL_WAIT"},
    {kOpPmuMask, kAll, "NPU_OP_PMU_MASK"},
    {kOpBranch, kNew, "NPU_OP_BRANCH"},
    {kIfmPadTop, kAll, "NPU_SET_IFM_PAD_TOP"},
    {kIfmPadLeft, kAll, "NPU_SET_IFM_PAD_LEFT"},
    {kIfmPadRight, kAll, "NPU_SET_IFM_PAD_RIGHT"},
    {kIfmPadBottom, kAll, "NPU_SET_IFM_PAD_BOTTOM"},
    {kIfmDepthM1, kAll, "NPU_SET_IFM_DEPTH_M1"},
    {kIfmPrecision, kAll, "NPU_SET_IFM_PRECISION"},
    {kIfmUpscale, kAll, "NPU_SET_IFM_UPSCALE"},
    {kIfmBroadcast, kNew, "NPU_SET_IFM_BROADCAST"},
    {kIfmZeroPoint, kAll, "NPU_SET_IFM_ZERO_POINT"},
    {kIfmWidth0M1, kAll, "NPU_SET_IFM_WIDTH0_M1"},
    {kIfmHeight0M1, kAll, "NPU_SET_IFM_HEIGHT0_M1"},
    {kIfmHeight1M1, kAll, "NPU_SET_IFM_HEIGHT1_M1"},
    {kIfmIbEnd, kOld, "NPU_SET_IFM_IB_END"},
    {kIfmRegion, kAll, "NPU_SET_IFM_REGION"},
    {kOfmWidthM1, kAll, "NPU_SET_OFM_WIDTH_M1"},
    {kOfmHeightM1, kAll, "NPU_SET_OFM_HEIGHT_M1"},
    {kOfmDepthM1, kAll, "NPU_SET_OFM_DEPTH_M1"},
    {kOfmPrecision, kAll, "NPU_SET_OFM_PRECISION"},
    {kOfmBlkWidthM1, kAll, "NPU_SET_OFM_BLK_WIDTH_M1"},
    {kOfmBlkHeightM1, kAll, "NPU_SET_OFM_BLK_HEIGHT_M1"},
    {kOfmBlkDepthM1, kAll, "NPU_SET_OFM_BLK_DEPTH_M1"},
    {kOfmZeroPoint, kAll, "NPU_SET_OFM_ZERO_POINT"},
    {kOfmWidth0M1, kAll, "NPU_SET_OFM_WIDTH0_M1"},
    {kOfmHeight0M1, kAll, "NPU_SET_OFM_HEIGHT0_M1"},
    {kOfmHeight1M1, kAll, "NPU_SET_OFM_HEIGHT1_M1"},
    {kOfmRegion, kAll, "NPU_SET_OFM_REGION"},
    {kKernelWidthM1, kAll, "NPU_SET_KERNEL_WIDTH_M1"},
    {kKernelHeightM1, kAll, "NPU_SET_KERNEL_HEIGHT_M1"},
    {kKernelStride, kAll, "NPU_SET_KERNEL_STRIDE"},
    {kParallelMode, kOld, "NPU_SET_PARALLEL_MODE"},
    {kAccFormat, kAll, "NPU_SET_ACC_FORMAT"},
    {kActivation, kAll, "NPU_SET_ACTIVATION"},
    {kActivationMin, kAll, "NPU_SET_ACTIVATION_MIN"},
    {kActivationMax, kAll, "NPU_SET_ACTIVATION_MAX"},
    {kWeightRegion, kAll, "NPU_SET_WEIGHT_REGION"},
    {kScaleRegion, kAll, "NPU_SET_SCALE_REGION"},
    {kResizeXScaleNM1, kNew, "NPU_SET_RESIZE_X_SCALE_N_M1"},
    {kResizeYScaleNM1, kNew, "NPU_SET_RESIZE_Y_SCALE_N_M1"},
    {kResizeXOffset, kNew, "NPU_SET_RESIZE_X_OFFSET"},
    {kResizeYOffset, kNew, "NPU_SET_RESIZE_Y_OFFSET"},
    {kAbStart, kOld, "NPU_SET_AB_START"},
    {kWeightFormat, kNew, "NPU_SET_WEIGHT_FORMAT"},
    {kBlockdep, kAll, "NPU_SET_BLOCKDEP"},
    {kDmaSrcRegion, kAll, "NPU_SET_DMA0_SRC_REGION"},
    {kDmaDstRegion, kAll, "NPU_SET_DMA0_DST_REGION"},
    {kDmaSize0, kAll, "NPU_SET_DMA0_SIZE0"},
    {kDmaSize1, kAll, "NPU_SET_DMA0_SIZE1"},
    {kDmaIdxRegion, kNew, "NPU_SET_DMA0_IDX_REGION"},
    {kIfm2Broadcast, kAll, "NPU_SET_IFM2_BROADCAST"},
    {kIfm2Scalar, kOld, "NPU_SET_IFM2_SCALAR"},
    {kIfm2Precision, kAll, "NPU_SET_IFM2_PRECISION"},
    {kIfm2ZeroPoint, kAll, "NPU_SET_IFM2_ZERO_POINT"},
    {kIfm2Width0M1, kAll, "NPU_SET_IFM2_WIDTH0_M1"},
    {kIfm2Height0M1, kAll, "NPU_SET_IFM2_HEIGHT0_M1"},
    {kIfm2Height1M1, kAll, "NPU_SET_IFM2_HEIGHT1_M1"},
    {kIfm2IbStart, kOld, "NPU_SET_IFM2_IB_START"},
    {kIfm2Region, kAll, "NPU_SET_IFM2_REGION"},
    {kIfmBase0, kAll, "NPU_SET_IFM_BASE0"},
    {kIfmBase0 + 1, kAll, "NPU_SET_IFM_BASE1"},
    {kIfmBase0 + 2, kAll, "NPU_SET_IFM_BASE2"},
    {kIfmBase0 + 3, kAll, "NPU_SET_IFM_BASE3"},
    {kIfmStrideX, kAll, "NPU_SET_IFM_STRIDE_X"},
    {kIfmStrideY, kAll, "NPU_SET_IFM_STRIDE_Y"},
    {kIfmStrideC, kAll, "NPU_SET_IFM_STRIDE_C"},
    {kOfmBase0, kAll, "NPU_SET_OFM_BASE0"},
    {kOfmBase0 + 1, kAll, "NPU_SET_OFM_BASE1"},
    {kOfmBase0 + 2, kAll, "NPU_SET_OFM_BASE2"},
    {kOfmBase0 + 3, kAll, "NPU_SET_OFM_BASE3"},
    {kOfmStrideX, kAll, "NPU_SET_OFM_STRIDE_X"},
    {kOfmStrideY, kAll, "NPU_SET_OFM_STRIDE_Y"},
    {kOfmStrideC, kAll, "NPU_SET_OFM_STRIDE_C"},
    {kWeightBase, kAll, "NPU_SET_WEIGHT_BASE"},
    {kWeightLength, kAll, "NPU_SET_WEIGHT_LENGTH"},
    {kScaleBase, kAll, "NPU_SET_SCALE_BASE"},
    {kScaleLength, kAll, "NPU_SET_SCALE_LENGTH"},
    {kOfmScale, kAll, "NPU_SET_OFM_SCALE"},
    {kOpaScale, kOld, "NPU_SET_OPA_SCALE"},
    {kOpaScale, kNew, "NPU_SET_IFM_SCALE"},
    {kOpbScale, kOld, "NPU_SET_OPB_SCALE"},
    {kOpbScale, kNew, "NPU_SET_IFM2_SCALE"},
    {kOpScalar, kNew, "NPU_SET_OP_SCALAR"},
    {kDmaSrc, kAll, "NPU_SET_DMA0_SRC"},
    {kDmaDst, kAll, "NPU_SET_DMA0_DST"},
    {kDmaLen, kAll, "NPU_SET_DMA0_LEN"},
    {kDmaSrcStride0, kOld, "NPU_SET_DMA0_SKIP0"},
    {kDmaSrcStride1, kOld, "NPU_SET_DMA0_SKIP1"},
    {kDmaSrcStride0, kNew, "NPU_SET_DMA0_SRC_STRIDE0"},
    {kDmaSrcStride1, kNew, "NPU_SET_DMA0_SRC_STRIDE1"},
    {kDmaDstStride0, kNew, "NPU_SET_DMA0_DST_STRIDE0"},
    {kDmaDstStride1, kNew, "NPU_SET_DMA0_DST_STRIDE1"},
    {kDmaIdx, kNew, "NPU_SET_DMA0_IDX"},
    {kDmaIdxMax, kNew, "NPU_SET_DMA0_IDX_MAX"},
    {kDmaIdxSkip1, kNew, "NPU_SET_DMA0_IDX_SKIP1"},
    {kIfm2Base0, kAll, "NPU_SET_IFM2_BASE0"},
    {kIfm2Base0 + 1, kAll, "NPU_SET_IFM2_BASE1"},
    {kIfm2Base0 + 2, kAll, "NPU_SET_IFM2_BASE2"},
    {kIfm2Base0 + 3, kAll, "NPU_SET_IFM2_BASE3"},
    {kIfm2StrideX, kAll, "NPU_SET_IFM2_STRIDE_X"},
    {kIfm2StrideY, kAll, "NPU_SET_IFM2_STRIDE_Y"},
    {kIfm2StrideC, kAll, "NPU_SET_IFM2_STRIDE_C"},
    {kWeight1Base, kAll, "NPU_SET_WEIGHT1_BASE"},
    {kWeight1Length, kAll, "NPU_SET_WEIGHT1_LENGTH"},
    {kScale1Base, kOld, "NPU_SET_SCALE1_BASE"},
    {kScale1Base, kNew, "NPU_SET_WEIGHT2_BASE"},
    {kScale1Length, kOld, "NPU_SET_SCALE1_LENGTH"},
    {kScale1Length, kNew, "NPU_SET_WEIGHT2_LENGTH"},
    {kWeight3Base, kNew, "NPU_SET_WEIGHT3_BASE"},
    {kWeight3Length, kNew, "NPU_SET_WEIGHT3_LENGTH"},
    {kResizeXStep, kNew, "NPU_SET_RESIZE_X_STEP"},
    {kResizeYStep, kNew, "NPU_SET_RESIZE_Y_STEP"},
};

const char* name_of(uint16_t key, uint8_t product) {
  for (const Known& known : kKnown) {
    if (known.key == key && (known.products & product) != 0) {
      return known.name;
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
    return failure(Error::kStream, "a command stream has a header of 16 bytes at least, this has %",
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

// "COP1", then actions: OPTCFG (with the config and the id word), NOPs, and the commands' length in words.
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

// Bytes: 4 major version (uint16), 24 length of the metadata from 28 to the commands, 28 "VEUM", 40 configuration.
// What runs Direct Drive streams reads their lengths and versions (payload/ethosu_payload.h); here they bound.
Status CommandReader::open_cop2() {
  constexpr size_t kMetadataAt = 28;
  constexpr size_t kFixedSize = 60;
  if (size_ < kFixedSize || std::memcmp(data_ + kMetadataAt, "VEUM", 4) != 0) {
    return failure(Error::kStream, "its metadata is not of the known kind");
  }
  const size_t metadata = read_u32(data_ + 24);
  if (metadata < kFixedSize - kMetadataAt || metadata > size_ - kMetadataAt ||
      (size_ - kMetadataAt - metadata) % 4 != 0) {
    return failure(Error::kStream, "% bytes of metadata do not leave commands in % bytes",
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
    return failure(Error::kStream, "there is no such NPU with % MACs", configuration_.macs);
  }
  const uint32_t macs = configuration_.macs;
  const int64_t own_memory = static_cast<int64_t>(config >> 8 & 0xFF) << 10;  // of all cores
  configuration_.cores = product == 1 ? macs / 256 : product == 0 || macs < 512 ? 1 : macs == 512 ? 2 : 4;
  configuration_.tables = product == 2 ? 0 : own_memory / configuration_.cores - kTableBytes;
  return {};
}

Status CommandReader::next(Command* command) {
  const uint32_t head = read_u32(data_ + position_);
  const uint32_t control = head >> 14 & 3;
  *command = Command{};
  command->offset = position_;
  command->key = static_cast<uint16_t>((head & 0x3FF) | (control == 1 ? uint32_t{kWithWord} : 0));
  command->parameter = static_cast<uint16_t>(head >> 16);
  const char* name = control < 2 ? name_of(command->key, configuration_.u85() ? kNew : kOld) : nullptr;
  position_ += 4;
  Status status;
  if (name == nullptr) {
    status = failure(Error::kCommand, "unknown: opcode %, control %", head & 0x3FF, control);
    status.place = "a command";
  } else if (control == 1 && position_ + 4 > end_) {
    status = failure(Error::kStream, "the stream ends before its second word");
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
