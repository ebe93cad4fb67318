// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "emulator/activation.h"
#include "emulator/command_stream.h"
#include "emulator/feature_map.h"
#include "emulator/scaling.h"
#include "emulator/weight_decoder.h"

namespace arm_runtime::npu {

enum class Kind : uint8_t { kConv, kDepthwise, kPool, kElementwise, kResize, kDma };

enum PoolMode : uint8_t { kMax, kAverage, kReduceSum, kSum, kNoPool, kMin, kArgmaxX, kArgmaxY };

enum ElementwiseMode : uint8_t {
  kMul = 0,
  kAdd = 1,
  kSub = 2,
  kMinimum = 3,
  kMaximum = 4,
  kLeakyRelu = 5,
  kAbs = 6,
  kClz = 7,
  kShiftRight = 8,
  kShiftLeft = 9,
  kLogicalShiftRight = 10,
  kDiv = 11,
  kEqual = 16,
  kNotEqual = 17,
  kGreaterEqual = 18,
  kGreater = 19,
  kAnd = 33,
  kOr = 34,
  kXor = 35,
  kNot = 36,
  kAndNot = 42,
};

enum class Upscale : uint8_t { kNone, kNearest, kZeros };

struct Kernel {
  int32_t height = 1, width = 1;  // without dilation
  int32_t stride_y = 1, stride_x = 1;
  int32_t dilation_y = 1, dilation_x = 1;
  int32_t top = 0, left = 0, bottom = 0, right = 0;  // padding
  bool part_kernel = false;

  bool is_padded() const { return (top | left | bottom | right) != 0; }
};

enum class Table : uint8_t { kNone, k8to8, k8to16, k8to32, k16 };

// Parameters of the output stage, which converts accumulators to stored values.
struct OutputParameters {
  bool per_channel = false;
  Scale scale;
  Rounding rounding = Rounding::kNatural;
  bool clip = true;
  int64_t low = 0, high = 0;
  Table table = Table::kNone;
  uint16_t table_at = 0;              // byte offset in the memory for lookup tables
  bool table_full_precision = false;  // k16: 32-bit results without rounding
  bool table_signed = true;
  ActivationFunction function = ActivationFunction::kNone;  // replaces a table; its input is not clipped
  uint8_t transpose = 0, reverse = 0;
};

// Scaling of an operand before an elementwise operation.
struct OperandScale {
  bool is_scaled = false;
  Scale scale;
  Rounding rounding = Rounding::kDouble;
  uint8_t left_shift = 0;  // before the scaling
};

enum Broadcast : uint8_t { kBroadcastH = 1, kBroadcastW = 2, kBroadcastC = 4 };

struct Dma {
  uint8_t source_region = 0, target_region = 0, index_region = 0;
  bool to_tables = false, from_tables = false;
  bool is_gather = false, is_scatter = false;
  int64_t source = 0, target = 0, length = 0;
  int64_t count0 = 1, count1 = 1;
  int64_t source_stride0 = 0, source_stride1 = 0, target_stride0 = 0, target_stride1 = 0;
  int64_t index = 0, index_max = 0, index_skip = 0;
};

struct Resize {
  uint8_t mode = 0;  // 0: bilinear, 1: replicate, 2: nearest
  int32_t scale_x = 1, scale_y = 1;
  int32_t offset_x = 0, offset_y = 0;
  int32_t step_x = 0, step_y = 0;  // in units of 1/scale_x and 1/scale_y of a pixel
};

// A range of bytes in a region.
struct ByteRange {
  uint8_t region = 0;
  int64_t start = 0, end = 0;
};

// Registers and waits that determine which earlier operations may still run when an operation starts. Only the access
// checker uses them.
struct SchedulingInfo {
  static constexpr uint8_t kNoWait = 0xFF;
  // Maximum number of kernels (operations other than DMAs) and of DMAs in flight when the operation starts.
  uint8_t kernel_wait = kNoWait, dma_wait = kNoWait;
  uint8_t blockdep = 0;
  int32_t ofm_block[3] = {1, 1, 1};  // height, width, depth
  int32_t ifm_block = 1;             // depth; used if the operation sums channels
  uint32_t commands = 0;             // number of commands, including those that set the operation's registers
};

// An operation, with the contents of all registers that it uses. read_operation() decodes and validates the registers.
struct Operation {
  Kind kind = Kind::kDma;
  uint8_t mode = 0;
  const char* name = "";
  uint64_t offset = 0;
  FeatureMap ifm, ifm2, ofm;
  bool uses_ifm2 = false;
  uint8_t broadcast = 0, broadcast2 = 0;
  bool scalar = false, scalar2 = false;  // IFM or IFM2 is the constant `scalar_value`, not a tensor
  int32_t scalar_value = 0;
  bool swap_operands = false;  // U55, U65: IFM2 is the first operand
  OperandScale scale_a, scale_b;
  Kernel kernel;
  Upscale upscale = Upscale::kNone;
  OutputParameters output;
  bool wide_accumulators = false;       // 40 bits (U55, U65) or 48 bits (U85) instead of 32
  bool starts_from_ifm2 = false;        // IFM2 contains the initial accumulators
  bool continues_accumulators = false;  // the previous operation left the initial accumulators
  bool keeps_accumulators = false;      // the next operation continues with the accumulators; nothing is stored
  bool dynamic_weights = false;
  Resize resize;
  Dma dma;
  const std::vector<int16_t>* weights = nullptr;
  const std::vector<ChannelScale>* scales = nullptr;
  // Byte ranges of up to four weight streams (one per core) and of up to two streams of scales.
  ByteRange constants[6];
  const uint8_t* constant_sources[6] = {};  // in region 0, or in a copy that joins several parts of it
  uint8_t constant_count = 0;
  SchedulingInfo scheduling;

  // Records that the operation reads weights or scales, for the access checker and Program::check_constants().
  void add_constant(uint32_t region, int64_t address, size_t bytes, const uint8_t* source) {
    constant_sources[constant_count] = source;
    constants[constant_count++] = {static_cast<uint8_t>(region), address, address + static_cast<int64_t>(bytes)};
  }
  // Whether every output channel depends on all input channels.
  bool sums_channels() const { return kind == Kind::kConv || (kind == Kind::kPool && mode == kReduceSum); }
  bool reads_ifm() const { return !scalar && !(kind == Kind::kPool && mode == kNoPool); }
  bool writes_memory() const { return !keeps_accumulators && ofm.storage == Storage::kTiles; }
  // Returns the OFM with the shape that it has in memory, that is, after `output.transpose`.
  FeatureMap ofm_in_memory() const;

  // Returns a measure of the execution time: the number of elements that the operation multiplies, compares or
  // computes. For a DMA, this is the number of rows.
  uint64_t work() const;
};

// Reads an operation from the registers, and validates it. The caller sets weights and scales.
Status read_operation(const Configuration& npu, const Command& command, const Registers& registers,
                      Operation* operation);

// Returns the layout of a convolution's weights.
WeightLayout weight_layout(const Registers& registers, const Operation& operation, bool u85);

}  // namespace arm_runtime::npu
