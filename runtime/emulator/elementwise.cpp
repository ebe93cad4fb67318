// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "emulator/npu_state.h"

namespace arm_runtime::npu {
namespace {

int64_t scale_operand(const OperandScale& scale, int64_t value) {
  value *= int64_t{1} << scale.left_shift;
  return scale.is_scaled ? scale_int64(value, scale.scale, scale.rounding) : value;
}

int64_t leading_zeros(int64_t value) {
  const auto bits = static_cast<uint32_t>(value);
  return bits == 0 ? 32 : __builtin_clz(bits);
}

// Shifts right by 0 to 31 bits. With kTowardsZero, which Vela chooses for TOSA's arithmetic shift, and with kDown, the
// shift rounds down. The other modes round as rounding_term() says. The rounding of kDouble is inferred from the 16-bit
// softmax of Vela's legacy core for U55 and U65: without rounding, 65% of the values differ from TFLite's by one; with
// rounding, no value differs. The rounding of U85 was not tested.
int64_t shift_right(int64_t value, int64_t by, Rounding rounding) {
  const auto amount = static_cast<int>(by & 31);
  const bool truncates = rounding == Rounding::kTowardsZero || rounding == Rounding::kDown;
  return (value + (truncates ? 0 : rounding_term<int64_t>(rounding, amount, value < 0))) >> amount;
}

int64_t shift_left(int64_t value, int64_t by) {
  return static_cast<int32_t>(static_cast<uint32_t>(value) << (by & 31));
}

// All bits are ones for true, and zeros for false.
int64_t to_mask(bool value) { return value ? -1 : 0; }

// Rounds towards zero, as C does. The quotient of a division by zero is 0.
int64_t divide(int64_t a, int64_t b) { return b == 0 ? 0 : a / b; }

int64_t compute(const Operation& op, int64_t a, int64_t b) {
  switch (op.mode) {
    case kMul:
      return a * b;
    case kAdd:
      return scale_operand(op.scale_a, a) + scale_operand(op.scale_b, b);
    case kSub:
      return scale_operand(op.scale_a, a) - scale_operand(op.scale_b, b);
    case kMinimum:
      return std::min(scale_operand(op.scale_a, a), scale_operand(op.scale_b, b));
    case kMaximum:
      return std::max(scale_operand(op.scale_a, a), scale_operand(op.scale_b, b));
    case kLeakyRelu:  // U55 and U65 have no scale for positive values
      return a >= 0 ? scale_operand(op.scale_a, a) : scale_operand(op.scale_b, a);
    case kAbs:
      return a < 0 ? -a : a;
    case kClz:
      return leading_zeros(a);
    case kShiftRight:
      return shift_right(a, b, op.output.rounding);
    case kShiftLeft:
      return shift_left(a, b);
    case kLogicalShiftRight:
      return static_cast<uint32_t>(a) >> (b & 31);
    case kDiv:
      return divide(a, b);
    case kEqual:
      return to_mask(scale_operand(op.scale_a, a) == scale_operand(op.scale_b, b));
    case kNotEqual:
      return to_mask(scale_operand(op.scale_a, a) != scale_operand(op.scale_b, b));
    case kGreaterEqual:
      return to_mask(scale_operand(op.scale_a, a) >= scale_operand(op.scale_b, b));
    case kGreater:
      return to_mask(scale_operand(op.scale_a, a) > scale_operand(op.scale_b, b));
    case kAnd:
      return a & b;
    case kOr:
      return a | b;
    case kXor:
      return a ^ b;
    case kNot:
      return ~a;
    case kAndNot:
      return a & ~b;
    default:
      return 0;
  }
}

// Reads the channels of an operand for each pixel of the output. Broadcasts the operand if needed.
class OperandReader {
 public:
  OperandReader(const Operation& op, const FeatureMap& map, uint8_t broadcast, bool scalar, const NpuState& state,
                int64_t* row)
      : map_(map), broadcast_(broadcast), state_(state), row_(row), depth_(op.ofm.depth), scalar_(scalar) {
    if (scalar) {
      std::fill_n(row, depth_, int64_t{op.scalar_value} - map.zero_point);
    }
  }

  const int64_t* at(int32_t y, int32_t x) {
    y = (broadcast_ & kBroadcastH) != 0 ? 0 : y;
    x = (broadcast_ & kBroadcastW) != 0 ? 0 : x;
    if (!scalar_ && (y != y_ || x != x_)) {
      y_ = y;
      x_ = x;
      fetch(state_, map_, y, x, row_);
      if ((broadcast_ & kBroadcastC) != 0) {
        std::fill_n(row_ + 1, depth_ - 1, row_[0]);
      }
    }
    return row_;
  }

 private:
  const FeatureMap& map_;
  uint8_t broadcast_;
  const NpuState& state_;
  int64_t* row_;
  int32_t depth_;
  bool scalar_;
  int32_t y_ = -1, x_ = -1;  // the pixel in `row_`
};

template <typename Compute>
void for_each_pixel(const Operation& op, NpuState* state, Compute compute_one) {
  const OutputStage output_stage(op, state);
  int64_t* out = state->row[0].data();
  OperandReader first(op, op.ifm, op.broadcast, op.scalar, *state, state->row[1].data());
  OperandReader second(op, op.ifm2, op.broadcast2, op.scalar2 || !op.uses_ifm2, *state, state->row[2].data());
  for (int32_t y = 0; y < op.ofm.height; ++y) {
    for (int32_t x = 0; x < op.ofm.width; ++x) {
      const int64_t* a = first.at(y, x);
      const int64_t* b = second.at(y, x);
      if (op.swap_operands) {
        std::swap(a, b);
      }
      for (int32_t c = 0; c < op.ofm.depth; ++c) {
        out[c] = compute_one(a[c], b[c]);
      }
      output_stage.write(y, x, out);
    }
  }
}

}  // namespace

// MUL has a separate loop for speed: on U55, matrix products are lowered to MUL, so that MUL computes most elements.
void run_elementwise(const Operation& op, NpuState* state) {
  if (op.mode == kMul) {
    for_each_pixel(op, state, [](int64_t a, int64_t b) { return a * b; });
  } else {
    for_each_pixel(op, state, [&op](int64_t a, int64_t b) { return compute(op, a, b); });
  }
}

}  // namespace arm_runtime::npu
