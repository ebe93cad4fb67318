// SPDX-License-Identifier: Apache-2.0
#include "emulator/operation.h"

#include <algorithm>

namespace arm_runtime::npu {
namespace {

// The registers of a feature map form groups. Each member except `size_bit` is the first register of a group. Within a
// group, the order is the same for IFM, IFM2 and OFM. `size_bit` is the lowest bit of a field of the register
// `precision`. This field contains log2 of the element size in bytes.
struct MapRegisters {
  int base, stride, width0, region, zero_point, precision, size_bit;
};

constexpr MapRegisters kIfmRegisters{kIfmBase0, kIfmStrideX, kIfmWidth0M1, kIfmRegion, kIfmZeroPoint, kIfmPrecision, 2};
constexpr MapRegisters kIfm2Registers{
    kIfm2Base0, kIfm2StrideX, kIfm2Width0M1, kIfm2Region, kIfm2ZeroPoint, kIfm2Precision, 2};
constexpr MapRegisters kOfmRegisters{kOfmBase0, kOfmStrideX, kOfmWidth0M1, kOfmRegion, kOfmZeroPoint, kOfmPrecision, 1};

class OperationReader {
 public:
  OperationReader(const Configuration& npu, const Registers& registers, Operation* operation)
      : npu_(npu), r_(registers), op_(*operation) {}

  Status read(const Command& command) {
    op_.name = command.name;
    op_.offset = command.offset;
    switch (command.key) {
      case kOpConv:
        op_.kind = Kind::kConv;
        op_.dynamic_weights = npu_.is_u85() && (command.parameter & 1) != 0;
        return read_kernel_operation();
      case kOpDepthwise:
        op_.kind = Kind::kDepthwise;
        return read_kernel_operation();
      case kOpPool:
        op_.kind = Kind::kPool;
        op_.mode = command.parameter & 7;
        return read_kernel_operation();
      case kOpElementwise:
        op_.kind = Kind::kElementwise;
        op_.mode = command.parameter & 0x3F;
        return read_elementwise();
      case kOpResize:
        op_.kind = Kind::kResize;
        op_.mode = command.parameter & 3;
        return read_resize();
      case kOpDmaStart:
        op_.kind = Kind::kDma;
        return read_dma();
      default:
        return failure(Error::kUnsupported, "not emulated");
    }
  }

 private:
  void read_map(const MapRegisters& from, FeatureMap* map) {
    for (int i = 0; i < 4; ++i) {
      map->base[i] = r_.address(from.base + i);
    }
    map->stride_x = r_.address(from.stride);
    map->stride_y = r_.address(from.stride + 1);
    map->stride_c = r_.address(from.stride + 2);
    map->width0 = static_cast<int32_t>(r_.parameter(from.width0)) + 1;
    map->height0 = static_cast<int32_t>(r_.parameter(from.width0 + 1)) + 1;
    map->height1 = static_cast<int32_t>(r_.parameter(from.width0 + 2)) + 1;
    map->region = static_cast<uint8_t>(r_.parameter(from.region) & 7);
    map->is_signed = r_.bits(from.precision, 0, 1) != 0;
    map->element_size = static_cast<uint8_t>(1u << r_.bits(from.precision, from.size_bit, 2));
    map->is_nhcwb16 = r_.bits(from.precision, 6, 2) == 1;
    map->zero_point =
        map->is_signed ? r_.signed16(from.zero_point) : static_cast<int32_t>(r_.parameter(from.zero_point));
    map->storage = npu_.is_u85() ? static_cast<Storage>(r_.bits(from.precision, 14, 2)) : Storage::kTiles;
  }

  void read_ofm() {
    FeatureMap& ofm = op_.ofm;
    read_map(kOfmRegisters, &ofm);
    ofm.height = static_cast<int32_t>(r_.parameter(kOfmHeightM1)) + 1;
    ofm.width = static_cast<int32_t>(r_.parameter(kOfmWidthM1)) + 1;
    ofm.depth = static_cast<int32_t>(r_.parameter(kOfmDepthM1)) + 1;
  }

  Status read_common() {
    read_map(kIfmRegisters, &op_.ifm);
    read_ofm();
    op_.ifm.depth = static_cast<int32_t>(r_.parameter(kIfmDepthM1)) + 1;
    op_.upscale = static_cast<Upscale>(std::min(r_.bits(kIfmUpscale, 0, 2), uint32_t{2}));
    op_.wide_accumulators = r_.bits(kAccFormat, 0, 2) == 1;
    if (npu_.is_u85()) {
      const uint32_t input = r_.bits(kAccFormat, 4, 2);
      op_.starts_from_ifm2 = input == 2;
      op_.continues_accumulators = input == 1;
      op_.keeps_accumulators = r_.bits(kAccFormat, 6, 1) != 0;
    } else if (r_.bits(kAccFormat, 0, 2) == 2) {
      return failure(Error::kUnsupported, "accumulators of 16-bit floats");
    }
    return npu_.is_u85() ? read_output_u85() : read_output_u55();
  }

  Status read_output_u55() {
    OutputParameters& out = op_.output;
    const bool global = r_.bits(kOfmPrecision, 8, 1) != 0;
    // Pools and elementwise operations read no per-channel scales. In the programs that Arm published, the bit `global`
    // is clear for such operations, too, but SCALE_BASE does not point to scales. If the emulator read scales there,
    // the results of 15 of the 34 programs would differ from the results of Arm's NPU.
    out.per_channel = !global && (op_.kind == Kind::kConv || op_.kind == Kind::kDepthwise);
    if (global) {
      out.scale.multiplier = r_.word(kOfmScale);
      out.scale.shift = static_cast<uint8_t>(r_.bits(kOfmScale, 0, 6));
    }
    constexpr Rounding kModes[] = {Rounding::kDouble, Rounding::kTowardsZero, Rounding::kNatural, Rounding::kNatural};
    out.rounding = kModes[r_.bits(kOfmPrecision, 14, 2)];
    const uint32_t function = r_.bits(kActivation, 0, 5);
    const uint32_t clip_range = r_.bits(kActivation, 12, 3);  // of a 32-bit OFM. 0: no clip; 2: unsigned; else: signed
    const bool narrow = op_.ofm.element_size <= 2;
    out.clip = narrow || clip_range != 0;
    read_clip_bounds(narrow ? op_.ofm.is_signed : clip_range != 2);
    if (function >= 16 && function < 24) {
      // A slot has 256 bytes. A 16-bit table takes all eight slots.
      out.table = op_.ofm.element_size == 2 ? Table::k16 : op_.ofm.element_size == 4 ? Table::k8to32 : Table::k8to8;
      out.table_at = static_cast<uint16_t>((function - 16) * 256);
      out.table_signed = op_.ofm.is_signed;
      const int bytes = out.table == Table::k16 ? 2048 : out.table == Table::k8to32 ? 1024 : 256;
      return out.table_at + bytes > 2048 ? failure(Error::kShape, "table % does not exist", function - 16) : Status{};
    }
    if (op_.ofm.element_size == 4) {
      // Without a table, 32-bit results have no zero point: the NPU ignores the register, in which 22 of the 34
      // programs that Arm published leave the zero point of another operation. Observed on U55 and U65.
      op_.ofm.zero_point = 0;
    }
    if (function == 3 || function == 4) {
      return set_builtin_activation(function == 3 ? ActivationFunction::kTanh : ActivationFunction::kSigmoid);
    }
    if (function != 0) {
      return failure(Error::kUnsupported, "activation function %", function);
    }
    return {};
  }

  Status set_builtin_activation(ActivationFunction function) {
    op_.output.function = function;
    op_.output.clip = false;
    return op_.ofm.element_size == 2
               ? Status{}
               : failure(Error::kUnsupported, "a built-in activation function with results of % bits",
                         op_.ofm.element_size * 8);
  }

  Status read_output_u85() {
    OutputParameters& out = op_.output;
    out.per_channel = r_.bits(kOfmPrecision, 8, 1) == 0;
    out.reverse = static_cast<uint8_t>(r_.bits(kOfmPrecision, 9, 2));
    out.transpose = static_cast<uint8_t>(r_.bits(kOfmPrecision, 11, 3));
    out.scale.multiplier = r_.word(kOfmScale) & 0x7FFFFFFF;
    out.scale.shift = static_cast<uint8_t>(r_.bits(kOfmScale, 0, 6));
    if (r_.bits(kOfmScale, 6, 5) != 0) {
      return failure(Error::kUnsupported, "double rounding of the output by % bits", r_.bits(kOfmScale, 6, 5));
    }
    constexpr Rounding kModes[] = {Rounding::kDouble,    Rounding::kNatural,     Rounding::kDoubleAsymmetric,
                                   Rounding::kSymmetric, Rounding::kTowardsZero, Rounding::kDown,
                                   Rounding::kNatural,   Rounding::kNatural};
    out.rounding = kModes[r_.bits(kOfmScale, 13, 3)];
    out.clip = r_.bits(kActivation, 12, 1) == 0;
    const uint32_t function = r_.bits(kActivation, 0, 5);
    // The clip applies to the table's input, which may be signed even if the result is unsigned.
    out.table_signed = function == 0 ? op_.ofm.is_signed : function != 1;
    read_clip_bounds(out.table_signed);
    if (function == 10 || function == 11) {
      return set_builtin_activation(function == 10 ? ActivationFunction::kTanh : ActivationFunction::kSigmoid);
    }
    constexpr uint16_t kSizes[] = {0, 256, 0, 0, 256, 512, 0, 1024, 2048, 2048};
    constexpr Table kTables[] = {Table::kNone,  Table::k8to8, Table::kNone,  Table::kNone, Table::k8to8,
                                 Table::k8to16, Table::kNone, Table::k8to32, Table::k16,   Table::k16};
    if (function > 9 || (function != 0 && kSizes[function] == 0)) {
      return failure(Error::kUnsupported, "activation function %", function);
    }
    out.table = kTables[function];
    out.table_full_precision = function == 9;
    const uint32_t at = r_.bits(kActivation, 5, 3) * kSizes[function];
    if (out.table != Table::kNone && at + kSizes[function] > 2048) {
      return failure(Error::kShape, "table % does not exist", r_.bits(kActivation, 5, 3));
    }
    out.table_at = static_cast<uint16_t>(at);
    return {};
  }

  void read_clip_bounds(bool as_signed) {
    OutputParameters& out = op_.output;
    out.low = as_signed ? r_.signed16(kActivationMin) : static_cast<int64_t>(r_.parameter(kActivationMin));
    out.high = as_signed ? r_.signed16(kActivationMax) : static_cast<int64_t>(r_.parameter(kActivationMax));
  }

  void read_ifm2(int32_t height, int32_t width, int32_t depth) {
    read_map(kIfm2Registers, &op_.ifm2);
    op_.uses_ifm2 = true;
    op_.ifm2.height = height;
    op_.ifm2.width = width;
    op_.ifm2.depth = depth;
  }

  Status read_kernel_operation() {
    const Status status = read_common();
    if (!status.ok()) {
      return status;
    }
    Kernel& k = op_.kernel;
    k.stride_x = static_cast<int32_t>(r_.bits(kKernelStride, 0, 1) + 2 * r_.bits(kKernelStride, 6, 1)) + 1;
    k.stride_y = static_cast<int32_t>(r_.bits(kKernelStride, 1, 1) + 2 * r_.bits(kKernelStride, 9, 1)) + 1;
    k.part_kernel = r_.bits(kKernelStride, 2, 1) != 0;
    k.dilation_x = static_cast<int32_t>(r_.bits(kKernelStride, 3, 1)) + 1;
    k.dilation_y = static_cast<int32_t>(r_.bits(kKernelStride, 4, 1)) + 1;
    const auto dilated_h = static_cast<int32_t>(r_.parameter(kKernelHeightM1)) + 1;
    const auto dilated_w = static_cast<int32_t>(r_.parameter(kKernelWidthM1)) + 1;
    k.height = (dilated_h - 1) / k.dilation_y + 1;
    k.width = (dilated_w - 1) / k.dilation_x + 1;
    k.top = static_cast<int32_t>(r_.bits(kIfmPadTop, 0, 7));
    k.left = static_cast<int32_t>(r_.bits(kIfmPadLeft, 0, 7));
    k.bottom = static_cast<int32_t>(r_.bits(kIfmPadBottom, 0, 8));
    k.right = static_cast<int32_t>(r_.bits(kIfmPadRight, 0, 8));
    if (!ofm_scale_applies()) {
      op_.output.scale = {};
    }
    // The stream does not contain the size of the IFM. Derive it from the output, the kernel and the padding.
    const int32_t factor = op_.upscale == Upscale::kNone ? 1 : 2;
    const int32_t rows = (op_.ofm.height - 1) * k.stride_y + dilated_h - k.top - k.bottom;
    const int32_t columns = (op_.ofm.width - 1) * k.stride_x + dilated_w - k.left - k.right;
    op_.ifm.height = (rows + factor - 1) / factor;
    op_.ifm.width = (columns + factor - 1) / factor;
    constexpr int64_t kMaxTaps = int64_t{1} << 24;
    if (int64_t{k.height} * k.width * op_.ifm.depth > kMaxTaps) {
      return failure(Error::kShape, "the kernel has % rows and % columns", k.height, k.width);
    }
    if (op_.kind != Kind::kPool &&
        (op_.ifm.element_size > 2 || (op_.dynamic_weights && r_.bits(kIfm2Precision, 2, 2) > 1))) {
      return failure(Error::kUnsupported, "a convolution of numbers of more than 16 bits");
    }
    if (op_.ifm.height < 1 || op_.ifm.width < 1) {
      return failure(Error::kShape, "the input has % rows and % columns", op_.ifm.height, op_.ifm.width);
    }
    if (op_.dynamic_weights && (op_.starts_from_ifm2 || k.height != 1 || k.width != 1)) {
      return failure(Error::kUnsupported, "weights from IFM2 for a kernel of % x %", k.height, k.width);
    }
    if (op_.starts_from_ifm2) {
      read_ifm2(op_.ofm.height, op_.ofm.width, op_.ofm.depth);
    } else if (op_.dynamic_weights) {
      read_ifm2(1, op_.ofm.depth, op_.ifm.depth);
    }
    return check_channels();
  }

  // Whether OFM_SCALE applies, as it does for all operations except some pools.
  bool ofm_scale_applies() const {
    const bool average = op_.kind == Kind::kPool && op_.mode == kAverage;
    if (npu_.is_u85()) {
      // The NPU divides averages itself. Inferred: Vela 4.3 writes 1 / (number of elements) to OFM_SCALE, Vela 5.x
      // writes 1, and the programs of both give TFLite Micro's averages only if the NPU ignores the register. A pool of
      // one element is a copy, to which OFM_SCALE applies.
      return !average || op_.kernel.height * op_.kernel.width == 1;
    }
    // U55 and U65: the programs that Arm published prove that maxima are not scaled. For averages with padding, the NPU
    // divides the sums itself. This is inferred: Vela writes no scale for them.
    return !(op_.kind == Kind::kPool && op_.mode == kMax) && !(average && op_.kernel.is_padded());
  }

  // Checks that the depths of IFM and OFM fit together.
  Status check_channels() const {
    const bool reduces = op_.kind == Kind::kPool && op_.mode == kReduceSum;
    const bool equal =
        (op_.kind == Kind::kPool && !reduces) || op_.kind == Kind::kDepthwise || op_.kind == Kind::kResize;
    if (equal && op_.ifm.depth != op_.ofm.depth) {
      return failure(Error::kShape, "the input has % channels, the output %", op_.ifm.depth, op_.ofm.depth);
    }
    if (reduces && op_.ofm.depth != 1) {
      return failure(Error::kShape, "a sum over channels has % output channels, not 1", op_.ofm.depth);
    }
    return {};
  }

  bool is_binary() const {
    return !(op_.mode == kAbs || op_.mode == kClz || op_.mode == kNot || (op_.mode == kLeakyRelu));
  }

  Status read_elementwise() {
    const Status status = read_common();
    if (!status.ok()) {
      return status;
    }
    if (npu_.is_u85()) {
      read_operands_u85();
    } else {
      read_operands_u55();
    }
    const FeatureMap& ofm = op_.ofm;
    const auto set_shape = [&ofm](FeatureMap* map, uint8_t broadcast) {
      map->height = (broadcast & kBroadcastH) != 0 ? 1 : ofm.height;
      map->width = (broadcast & kBroadcastW) != 0 ? 1 : ofm.width;
      map->depth = (broadcast & kBroadcastC) != 0 ? 1 : ofm.depth;
    };
    set_shape(&op_.ifm, op_.broadcast);
    if (op_.uses_ifm2) {
      set_shape(&op_.ifm2, op_.broadcast2);
    }
    apply_elementwise_rules();
    if (op_.upscale != Upscale::kNone) {
      return failure(Error::kUnsupported, "an elementwise operation that scales its input up");
    }
    if (op_.ifm.element_size > 4 || (op_.uses_ifm2 && op_.ifm2.element_size > 4)) {
      return failure(Error::kUnsupported, "an elementwise operation on elements of 64 bits");
    }
    return {};
  }

  // Applies the rules of elementwise operations that the output registers do not express.
  void apply_elementwise_rules() {
    OutputParameters& out = op_.output;
    if (op_.mode == kMul && op_.ifm.element_size == 4) {
      // OFM_SCALE only shifts 32-bit products. Vela's source says so for U55 and U65 (tflite_graph_optimiser.py: "32
      // bit Mul op do not scale the value") and for U85 (ethos_u85_constraints.cpp), and all programs that Arm
      // published agree. This is not a rule for all 32-bit operations: OFM_SCALE also multiplies a 32-bit SUB on U85.
      out.scale.multiplier = 1;
    }
    if (op_.mode == kLeakyRelu && !npu_.is_u85()) {
      // OFM_SCALE is the slope of negative values only. Of the 31,520 values that TFLite Micro's tests expect from
      // 16-bit networks, 6,378 differ if the emulator also scales positive values; otherwise, none differs.
      op_.scale_b = {true, out.scale, out.rounding, 0};
      out.scale = {};
    }
    if ((op_.mode == kMul || op_.mode == kAdd || op_.mode == kSub) && op_.ofm.element_size == 4 && op_.ofm.is_signed &&
        !out.clip) {
      // Signed 32-bit products, sums and differences saturate. Inferred from the softmax of Vela's legacy core for U55
      // and U65: saturation gives TFLite's 127 for one large logit, wrap-around -128. Not observed on U85.
      out.clip = true;
      out.low = INT32_MIN;
      out.high = INT32_MAX;
    }
  }

  void read_operands_u85() {
    op_.broadcast = static_cast<uint8_t>(r_.bits(kIfmBroadcast, 0, 3));
    op_.scalar = op_.ifm.storage == Storage::kNone;
    op_.scalar_value = static_cast<int32_t>(r_.word(kOpScalar));
    if (is_binary()) {
      read_ifm2(0, 0, 0);
      op_.broadcast2 = static_cast<uint8_t>(r_.bits(kIfm2Broadcast, 0, 3));
      op_.scalar2 = op_.ifm2.storage == Storage::kNone;
    }
    const auto scale = [this](int key, OperandScale* to) {
      to->scale.multiplier = r_.word(key) & 0x7FFFFFFF;
      to->scale.shift = static_cast<uint8_t>(r_.bits(key, 0, 6));
      to->rounding = r_.bits(key, 13, 1) != 0 ? Rounding::kNatural : Rounding::kDouble;
      to->is_scaled = to->scale.multiplier != 1 || to->scale.shift != 0;
    };
    // Sums, differences, comparisons, minima and maxima can have operands of different scales. LRELU uses the first
    // scale for values from 0 on, and the second for negative values.
    if (op_.mode == kAdd || op_.mode == kSub || op_.mode == kMinimum || op_.mode == kMaximum ||
        op_.mode == kLeakyRelu || (op_.mode >= kEqual && op_.mode <= kGreater)) {
      scale(kOpaScale, &op_.scale_a);
      scale(kOpbScale, &op_.scale_b);
    }
  }

  void read_operands_u55() {
    if (is_binary()) {
      read_ifm2(0, 0, 0);
      op_.broadcast2 = static_cast<uint8_t>(r_.bits(kIfm2Broadcast, 0, 3));
      op_.swap_operands = r_.bits(kIfm2Broadcast, 6, 1) != 0;
      op_.scalar2 = r_.bits(kIfm2Broadcast, 7, 1) != 0;
      op_.scalar_value =
          op_.ifm2.is_signed ? r_.signed16(kIfm2Scalar) : static_cast<int32_t>(r_.parameter(kIfm2Scalar));
    }
    if (op_.mode == kAdd || op_.mode == kSub) {
      read_scales_u55();
    }
  }

  // There are two cases. Either both operands have 16-bit multipliers. Or the operand with the smaller scale has a
  // 32-bit multiplier and a shift, and the operand with the larger scale is shifted left by a constant number of bits.
  void read_scales_u55() {
    const uint32_t which = r_.bits(kIfmPrecision, 8, 2);
    constexpr Rounding kModes[] = {Rounding::kDouble, Rounding::kTowardsZero, Rounding::kNatural, Rounding::kNatural};
    if (which == 0) {
      op_.scale_a.is_scaled = op_.scale_b.is_scaled = true;
      op_.scale_a.scale.multiplier = r_.word(kOpaScale) & 0xFFFF;
      op_.scale_b.scale.multiplier = r_.word(kOpbScale) & 0xFFFF;
      return;
    }
    OperandScale& scaled = which == 1 ? op_.scale_a : op_.scale_b;
    OperandScale& shifted = which == 1 ? op_.scale_b : op_.scale_a;
    scaled.is_scaled = true;
    scaled.scale.multiplier = r_.word(kOpaScale);
    scaled.scale.shift = static_cast<uint8_t>(r_.bits(kOpaScale, 0, 6));
    scaled.rounding = kModes[r_.bits(kIfmPrecision, 14, 2)];
    shifted.left_shift = op_.ifm.element_size == 1 ? 19 : 14;
  }

  Status read_resize() {
    const Status status = read_common();
    if (!status.ok()) {
      return status;
    }
    Resize& z = op_.resize;
    z.mode = op_.mode;
    z.scale_x = static_cast<int32_t>(r_.bits(kResizeXScaleNM1, 0, 11)) + 1;
    z.scale_y = static_cast<int32_t>(r_.bits(kResizeYScaleNM1, 0, 11)) + 1;
    const auto offset = [this](int key) { return static_cast<int32_t>(r_.bits(key, 0, 12) << 20) >> 20; };
    z.offset_x = offset(kResizeXOffset);
    z.offset_y = offset(kResizeYOffset);
    const auto step = [this](int key, int32_t scale) {
      return static_cast<int32_t>(r_.bits(key, 0, 4)) * scale + static_cast<int32_t>(r_.word(key) & 0x7FF);
    };
    z.step_x = step(kResizeXStep, z.scale_x);
    z.step_y = step(kResizeYStep, z.scale_y);
    op_.ifm.height = static_cast<int32_t>(r_.parameter(kKernelHeightM1)) + 1;
    op_.ifm.width = static_cast<int32_t>(r_.parameter(kKernelWidthM1)) + 1;
    if (op_.ifm.element_size > 2) {
      return failure(Error::kUnsupported, "a resize of elements of % bytes", op_.ifm.element_size);
    }
    return check_channels();
  }

  Status read_dma() {
    Dma& d = op_.dma;
    d.source_region = static_cast<uint8_t>(r_.bits(kDmaSrcRegion, 0, 3));
    d.target_region = static_cast<uint8_t>(r_.bits(kDmaDstRegion, 0, 3));
    d.from_tables = r_.bits(kDmaSrcRegion, 8, 1) != 0;
    d.to_tables = r_.bits(kDmaDstRegion, 8, 1) != 0;
    d.source = r_.address(kDmaSrc);
    d.target = r_.address(kDmaDst);
    d.length = r_.address(kDmaLen);
    d.source -= d.from_tables ? npu_.table_address : 0;
    d.target -= d.to_tables ? npu_.table_address : 0;
    const uint32_t rank = r_.bits(npu_.is_u85() ? kDmaSrcRegion : kDmaDstRegion, 9, 2);
    d.is_gather = npu_.is_u85() && r_.bits(kDmaSrcRegion, 11, 1) != 0;
    d.is_scatter = npu_.is_u85() && r_.bits(kDmaDstRegion, 11, 1) != 0;
    // SIZE0 is the number of rows of 2D and 3D copies and of copies with indices. For other copies, the NPU ignores
    // SIZE0: 19 of the 34 programs that Arm published copy one row although SIZE0 is not set or has the value of an
    // earlier DMA.
    d.count0 = rank >= 1 || d.is_gather || d.is_scatter ? r_.parameter(kDmaSize0) : 1;
    d.count1 = rank >= 2 ? r_.parameter(kDmaSize1) : 1;
    if (!npu_.is_u85()) {
      // U55 and U65: the registers contain the distance from the end of a target row to the start of the next one. The
      // source rows are contiguous.
      d.source_stride0 = d.length;
      d.source_stride1 = d.length * d.count0;
      d.target_stride0 = d.length + r_.address(kDmaSrcStride0);
      d.target_stride1 = d.length * d.count0 + r_.address(kDmaSrcStride1);
      return check_rows();
    }
    d.source_stride0 = r_.address(kDmaSrcStride0);
    d.source_stride1 = r_.address(kDmaSrcStride1);
    d.target_stride0 = r_.address(kDmaDstStride0);
    d.target_stride1 = r_.address(kDmaDstStride1);
    d.index_region = static_cast<uint8_t>(r_.bits(kDmaIdxRegion, 0, 3));
    d.index = r_.address(kDmaIdx);
    d.index_max = r_.word(kDmaIdxMax);
    d.index_skip = rank >= 2 ? r_.address(kDmaIdxSkip1) : 0;
    return check_rows();
  }

  Status check_rows() const {
    constexpr int64_t kMaxRows = int64_t{1} << 24;
    const Dma& d = op_.dma;
    if (d.count0 * d.count1 > kMaxRows) {
      return failure(Error::kShape, "the DMA copies % times % rows", d.count1, d.count0);
    }
    return {};
  }

  const Configuration& npu_;
  const Registers& r_;
  Operation& op_;
};

}  // namespace

Status read_operation(const Configuration& npu, const Command& command, const Registers& registers,
                      Operation* operation) {
  Status status = OperationReader(npu, registers, operation).read(command);
  status.place = command.name;
  status.offset = command.offset;
  return status;
}

FeatureMap Operation::ofm_in_memory() const {
  FeatureMap map = ofm;
  const int32_t h = map.height, w = map.width, c = map.depth;
  const int32_t shapes[8][3] = {{h, w, c}, {w, h, c}, {h, c, w}, {w, c, h}, {h, w, c}, {h, w, c}, {c, h, w}, {c, w, h}};
  const int32_t* shape = shapes[output.transpose];
  map.height = shape[0];
  map.width = shape[1];
  map.depth = shape[2];
  return map;
}

uint64_t Operation::work() const {
  if (kind == Kind::kDma) {
    return static_cast<uint64_t>(dma.count0 * dma.count1);
  }
  const auto results = static_cast<uint64_t>(ofm.elements());
  const auto taps = static_cast<uint64_t>(kernel.height) * static_cast<uint64_t>(kernel.width);
  return results * taps * (sums_channels() ? static_cast<uint64_t>(ifm.depth) : 1);
}

WeightLayout weight_layout(const Registers& registers, const Operation& operation, bool u85) {
  const Kernel& kernel = operation.kernel;
  WeightLayout layout;
  layout.depthwise = operation.kind == Kind::kDepthwise;
  layout.ofm_depth = operation.ofm.depth;
  layout.ifm_depth = operation.ifm.depth;
  layout.kernel_h = kernel.height;
  layout.kernel_w = kernel.width;
  layout.stride_x = kernel.stride_x;
  layout.stride_y = kernel.stride_y;
  layout.dilation_x = kernel.dilation_x;
  layout.dilation_y = kernel.dilation_y;
  layout.part_kernel = kernel.part_kernel;
  layout.ofm_block_depth = static_cast<int32_t>(registers.parameter(kOfmBlkDepthM1)) + 1;
  layout.ifm_bits = operation.ifm.element_size * 8;
  if (u85) {
    constexpr int32_t kMicroblocks[] = {1, 2, 4, 4, 8, 16, 1, 1};
    layout.microblock = kMicroblocks[registers.bits(kAccFormat, 8, 3)];
    layout.fast = registers.bits(kWeightFormat, 0, 1) != 0;
    layout.sparse = registers.bits(kWeightFormat, 4, 1) != 0;
  }
  return layout;
}

}  // namespace arm_runtime::npu
