// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/status.h"

namespace arm_runtime::npu {

enum class Product : uint8_t { kU55, kU65, kU85 };

// Bytes of lookup tables in the NPU's internal memory. On U55 and U65, tables are the last bytes of this memory, the
// SHRAM. On U85, they have a separate address space.
constexpr int kTableBytes = 2048;

// The NPU for which a stream was compiled.
struct Configuration {
  Product product = Product::kU55;
  uint32_t macs = 0;          // multiply-accumulates per cycle, of all cores
  uint32_t cores = 1;         // number of weight streams: two on U65-512, up to four on U85
  int64_t table_address = 0;  // address of the first table

  bool is_u85() const { return product == Product::kU85; }
};

// The key of a command is its opcode, plus 0x400 if a second word follows.
constexpr uint16_t kWithWord = 0x400;

enum Opcode : uint16_t {
  kOpStop = 0,
  kOpIrq = 1,
  kOpConv = 2,
  kOpDepthwise = 3,
  kOpPool = 5,
  kOpElementwise = 6,
  kOpResize = 7,
  kOpDmaStart = 16,
  kOpDmaWait = 17,
  kOpKernelWait = 18,
  kOpPmuMask = 19,
  kIfmPadTop = 256,
  kIfmPadLeft,
  kIfmPadRight,
  kIfmPadBottom,
  kIfmDepthM1,
  kIfmPrecision = 261,
  kIfmUpscale = 263,
  kIfmBroadcast = 264,
  kIfmZeroPoint = 265,
  kIfmWidth0M1,
  kIfmHeight0M1,
  kIfmHeight1M1,
  kIfmIbEnd = 269,
  kIfmRegion = 271,
  kOfmWidthM1 = 273,
  kOfmHeightM1,
  kOfmDepthM1,
  kOfmPrecision,
  kOfmBlkWidthM1 = 277,
  kOfmBlkHeightM1,
  kOfmBlkDepthM1,
  kOfmZeroPoint = 280,
  kOfmWidth0M1 = 282,
  kOfmHeight0M1,
  kOfmHeight1M1,
  kOfmRegion = 287,
  kKernelWidthM1 = 288,
  kKernelHeightM1,
  kKernelStride = 290,
  kParallelMode = 291,
  kAccFormat = 292,
  kActivation = 293,
  kActivationMin,
  kActivationMax,
  kWeightRegion = 296,
  kScaleRegion = 297,
  kResizeXScaleNM1 = 298,
  kResizeYScaleNM1,
  kResizeXOffset = 300,
  kResizeYOffset,
  kAbStart = 301,  // on U55 and U65; on U85, 301 is kResizeYOffset
  kWeightFormat = 302,
  kBlockdep = 303,
  kDmaSrcRegion = 304,
  kDmaDstRegion,
  kDmaSize0,
  kDmaSize1,
  kDmaIdxRegion = 308,
  kIfm2Broadcast = 384,
  kIfm2Scalar = 385,
  kIfm2Precision = 389,
  kIfm2ZeroPoint = 393,
  kIfm2Width0M1,
  kIfm2Height0M1,
  kIfm2Height1M1,
  kIfm2IbStart = 397,
  kIfm2Region = 399,

  kIfmBase0 = kWithWord + 0,
  kIfmStrideX = kWithWord + 4,
  kIfmStrideY,
  kIfmStrideC,
  kOfmBase0 = kWithWord + 16,
  kOfmStrideX = kWithWord + 20,
  kOfmStrideY,
  kOfmStrideC,
  kWeightBase = kWithWord + 32,
  kWeightLength,
  kScaleBase = kWithWord + 34,
  kScaleLength,
  kOfmScale = kWithWord + 36,
  kOpaScale = kWithWord + 37,  // U85: IFM_SCALE
  kOpbScale = kWithWord + 38,  // U85: IFM2_SCALE
  kOpScalar = kWithWord + 39,
  kDmaSrc = kWithWord + 48,
  kDmaDst,
  kDmaLen,
  kDmaSrcStride0 = kWithWord + 51,  // U55 and U65: SKIP0
  kDmaSrcStride1,                   // U55 and U65: SKIP1
  kDmaDstStride0,
  kDmaDstStride1,
  kDmaIdx = kWithWord + 55,
  kDmaIdxMax,
  kDmaIdxSkip1,
  kIfm2Base0 = kWithWord + 128,
  kIfm2StrideX = kWithWord + 132,
  kIfm2StrideY,
  kIfm2StrideC,
  kWeight1Base = kWithWord + 144,
  kWeight1Length,
  kScale1Base = kWithWord + 146,  // U55 and U65
  kWeight2Base = kScale1Base,     // U85: the same register
  kScale1Length,
  kWeight3Base = kWithWord + 148,
  kWeight3Length,
  kResizeXStep = kWithWord + 150,
  kResizeYStep,
  kOpBranch = kWithWord + 256,
};

// A command sets a register, starts or awaits an operation, raises an interrupt, or ends the stream.
struct Command {
  uint16_t key = 0;
  uint16_t parameter = 0;
  uint32_t word = 0;
  uint64_t offset = 0;
  const char* name = "";

  bool sets_register() const { return key >= 256 && key != kOpBranch; }
};

// Reads the commands of a stream one by one. The stream is in Vela's container COP1 or COP2 (COP: custom operator
// payload).
class CommandReader {
 public:
  // `data` must outlive the reader.
  Status open(const uint8_t* data, size_t size);

  const Configuration& configuration() const { return configuration_; }
  bool done() const { return position_ >= end_; }
  // Reads the next command. Fails if the product does not have this command, or if the stream ends within it.
  Status next(Command* command);

 private:
  Status open_cop1();
  Status open_cop2();
  Status configure(uint32_t config);

  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  size_t position_ = 0;
  size_t end_ = 0;
  Configuration configuration_;
};

// The register file. A register that was never written reads as zero.
class Registers {
 public:
  void set(const Command& command) { value_[command.key] = uint64_t{command.parameter} << 32 | command.word; }
  uint32_t parameter(int key) const { return static_cast<uint32_t>(value_[key] >> 32); }
  uint32_t word(int key) const { return static_cast<uint32_t>(value_[key]); }
  // Returns bits [first, first + count) of the parameter.
  uint32_t bits(int key, int first, int count) const { return parameter(key) >> first & ((uint32_t{1} << count) - 1); }
  int32_t signed16(int key) const { return static_cast<int16_t>(parameter(key)); }
  // Returns a signed address or stride of 40 bits. On U55, a negative stride reverses an axis.
  int64_t address(int key) const {
    const uint64_t raw = uint64_t{parameter(key) & 0xFF} << 32 | word(key);
    return static_cast<int64_t>(raw << 24) >> 24;
  }

 private:
  uint64_t value_[2048] = {};
};

}  // namespace arm_runtime::npu
