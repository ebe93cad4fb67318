// SPDX-License-Identifier: Apache-2.0
#include "emulator/weight_decoder.h"

#include <algorithm>

namespace arm_runtime::npu {
namespace {

// Reads bits, starting with the lowest bit of the first byte. Past the end, bits are ones and overrun() is true.
class BitReader {
 public:
  explicit BitReader(Bytes bytes) : bytes_(bytes) {}

  uint32_t take(int count) {
    uint32_t value = 0;
    for (int i = 0; i < count; ++i, ++position_) {
      const size_t byte = position_ >> 3;
      const uint32_t bit = byte < bytes_.size ? uint32_t{bytes_.data[byte]} >> (position_ & 7) & 1 : 1;
      value |= bit << i;
    }
    return value;
  }
  void align() { position_ = (position_ + 7) & ~size_t{7}; }
  void seek(size_t bit) { position_ = bit; }
  size_t left() const { return bytes_.size * 8 > position_ ? bytes_.size * 8 - position_ : 0; }
  bool overrun() const { return position_ > bytes_.size * 8; }

 private:
  Bytes bytes_;
  size_t position_ = 0;
};

// The lowest bit is the sign, the others are the magnitude.
int16_t decode_sign_magnitude(uint32_t value) {
  const auto magnitude = static_cast<int16_t>(value >> 1);
  return (value & 1) != 0 ? static_cast<int16_t>(-magnitude) : magnitude;
}

constexpr uint32_t kEndOfStream = 7;
constexpr uint32_t kNoZeroRuns = 6;
constexpr uint32_t kUncompressed = 7;
constexpr size_t kSymbols = 12;  // maximum number of unary symbols in a chunk

// Quotients of Golomb-Rice codes. Their remainders follow in the next chunk.
struct Quotients {
  uint32_t values[kSymbols] = {};
  size_t count = 0;
  bool present = false;
};

// Decodes a slice: up to 32768 weights, and the lengths of the runs of zeros between them if the slice has such runs.
// Chunks of weights and of runs are interleaved.
class SliceDecoder {
 public:
  SliceDecoder(BitReader* bits, uint32_t run_rice_parameter) : bits_(*bits), run_rice_parameter_(run_rice_parameter) {}

  bool decode(bool* has_palette, std::vector<uint32_t>* palette, uint32_t* direct_offset, uint32_t* palette_bits,
              size_t limit, std::vector<int16_t>* out) {
    weight_count_ = bits_.take(15) + 1;
    weight_rice_parameter_ = bits_.take(3);
    truncated_ = bits_.take(1) != 0;
    const bool new_palette = bits_.take(1) != 0;
    if (new_palette) {
      read_palette(palette, direct_offset, palette_bits);
      *has_palette = true;
    }
    if (!*has_palette || (weight_rice_parameter_ > 5 && weight_rice_parameter_ != kUncompressed) ||
        (run_rice_parameter_ > 3 && run_rice_parameter_ != kNoZeroRuns)) {
      return false;
    }
    uncompressed_ = weight_rice_parameter_ == kUncompressed;
    if (uncompressed_) {
      weight_rice_parameter_ = palette->empty() ? *palette_bits : index_bits(palette->size());
    }
    zero_runs_ = run_rice_parameter_ != kNoZeroRuns;
    zero_count_ = weight_count_ + (new_palette ? 1 : 0);
    if (!read_chunks()) {
      return false;
    }
    return emit(*palette, *direct_offset, new_palette, limit, out);
  }

 private:
  void read_palette(std::vector<uint32_t>* palette, uint32_t* direct_offset, uint32_t* palette_bits) {
    *direct_offset = bits_.take(5);
    const uint32_t size = bits_.take(5);
    *palette_bits = bits_.take(3) + 2;
    palette->resize(size > 0 ? size + 1 : 0);
    for (uint32_t& entry : *palette) {
      entry = bits_.take(static_cast<int>(*palette_bits));
    }
  }

  static uint32_t index_bits(size_t size) {
    uint32_t bits = 0;
    while ((size_t{1} << bits) < size) {
      ++bits;
    }
    return bits;
  }

  // Reads chunks. A chunk has quotients of weights and of runs, then the remainders of the previous chunk. `ahead` is
  // the number of weights minus the number of runs whose quotients have been read. A chunk has no weights if `ahead` is
  // 8 or more, and no runs if `ahead` is negative.
  bool read_chunks() {
    Quotients weights, runs;
    size_t weights_begun = 0, runs_begun = 0;
    do {
      const auto ahead = static_cast<int64_t>(weights_begun) - static_cast<int64_t>(runs_begun);
      Quotients next_weights, next_runs;
      next_weights.present = (!zero_runs_ || ahead < 8) && weights_begun < weight_count_;
      next_runs.present = zero_runs_ && ahead >= 0 && runs_begun < zero_count_;
      const uint32_t first = next_weights.present && !uncompressed_ ? bits_.take(kSymbols) : 0;
      if (next_runs.present) {
        read_runs(&next_runs);
        runs_begun += next_runs.count;
      }
      if (next_weights.present) {
        read_weights(first, weight_count_ - weights_begun, &next_weights);
        weights_begun += next_weights.count;
      }
      take_remainders(weights, weight_rice_parameter_, weight_count_, &weight_values_);
      take_remainders(runs, run_rice_parameter_, zero_count_, &run_values_);
      weights = next_weights;
      runs = next_runs;
      if (bits_.overrun()) {
        return false;
      }
    } while (weights.present || runs.present);
    return true;
  }

  void read_runs(Quotients* runs) {
    const int length = run_rice_parameter_ < 3 ? 12 : 8;
    const uint32_t unary = bits_.take(length);
    for (int i = 0; i < length; ++i) {
      if ((unary >> i & 1) != 0) {
        ++run_quotient_;
      } else {
        runs->values[runs->count++] = run_quotient_;
        run_quotient_ = 0;
      }
    }
  }

  // A symbol has the bits 0, 10 or 11, and the value 0, 1 or 2. `first` has the first bits of all symbols of the chunk.
  // Their second bits come next in the stream. A quotient is the sum of the values of consecutive symbols. Its last
  // symbol is the first one with a value below 2. In a truncated slice, each quotient has one symbol.
  void read_weights(uint32_t first, size_t wanted, Quotients* weights) {
    const size_t symbols = uncompressed_ && weight_rice_parameter_ > 5 ? 8 : kSymbols;
    int set = 0;
    for (size_t i = 0; i < symbols; ++i) {
      set += static_cast<int>(first >> i & 1);
    }
    uint32_t second = bits_.take(set);
    for (size_t i = 0; i < symbols && weights->count < wanted; ++i) {
      uint32_t code = 0;
      if ((first >> i & 1) != 0) {
        code = 1 + (second & 1);
        second >>= 1;
      }
      weight_quotient_ += code;
      if (code < 2 || truncated_) {
        weights->values[weights->count++] = weight_quotient_;
        weight_quotient_ = 0;
      }
    }
  }

  void take_remainders(const Quotients& quotients, uint32_t rice_parameter, size_t limit,
                       std::vector<uint32_t>* values) {
    for (size_t i = 0; quotients.present && i < quotients.count && values->size() < limit; ++i) {
      values->push_back((quotients.values[i] << rice_parameter) + bits_.take(static_cast<int>(rice_parameter)));
    }
  }

  bool emit(const std::vector<uint32_t>& palette, uint32_t direct_offset, bool leading_run, size_t limit,
            std::vector<int16_t>* out) {
    if (weight_values_.size() < weight_count_ || (zero_runs_ && run_values_.size() < zero_count_)) {
      return false;
    }
    size_t run = 0;
    if (zero_runs_ && leading_run) {
      append_zeros(run_values_[run++], limit, out);
    }
    for (const uint32_t value : weight_values_) {
      if (value > 511) {
        return false;
      }
      const size_t size = palette.size();
      const uint32_t encoded = value < size ? palette[value] : value - static_cast<uint32_t>(size) + direct_offset;
      out->push_back(decode_sign_magnitude(encoded));
      if (zero_runs_) {
        append_zeros(run_values_[run++], limit, out);
      }
    }
    return true;
  }

  // Damaged data may announce runs that exceed the number of weights.
  static void append_zeros(size_t count, size_t limit, std::vector<int16_t>* out) {
    const size_t room = limit > out->size() ? limit - out->size() : 0;
    out->insert(out->end(), std::min(count, room), int16_t{0});
  }

  BitReader& bits_;
  uint32_t run_rice_parameter_;
  uint32_t weight_rice_parameter_ = 0;
  bool truncated_ = false, uncompressed_ = false, zero_runs_ = false;
  size_t weight_count_ = 0, zero_count_ = 0;
  uint32_t weight_quotient_ = 0, run_quotient_ = 0;
  std::vector<uint32_t> weight_values_, run_values_;
};

// Decodes the first `wanted` weights of a stream in the standard encoding.
bool decode_standard(Bytes stream, size_t wanted, std::vector<int16_t>* out) {
  BitReader bits(stream);
  std::vector<uint32_t> palette;
  uint32_t direct_offset = 0, palette_bits = 0;
  bool has_palette = false;
  while (out->size() < wanted) {
    if (bits.left() < 3) {
      return false;
    }
    const uint32_t run_rice_parameter = bits.take(3);
    if (run_rice_parameter == kEndOfStream) {
      bits.align();
      continue;
    }
    SliceDecoder slice(&bits, run_rice_parameter);
    if (!slice.decode(&has_palette, &palette, &direct_offset, &palette_bits, wanted, out)) {
      return false;
    }
  }
  return true;
}

// Decodes U85's fast encoding: a header of 32 bytes with a palette of 16 values of 9 bits, then values or palette
// indices.
bool decode_fast(Bytes stream, size_t wanted, std::vector<int16_t>* out) {
  constexpr size_t kHeaderBits = 256;
  BitReader bits(stream);
  const bool raw = bits.take(1) != 0;
  const bool small = bits.take(1) != 0;
  const int width = raw ? 8 : small ? 2 : 4;
  if (stream.size * 8 < kHeaderBits || (stream.size * 8 - kHeaderBits) / static_cast<size_t>(width) < wanted) {
    return false;
  }
  bits.seek(104);
  const auto zero = static_cast<int8_t>(bits.take(8));
  int16_t table[16];
  for (int16_t& entry : table) {
    entry = decode_sign_magnitude(bits.take(9));
  }
  bits.seek(kHeaderBits);
  for (size_t i = 0; i < wanted; ++i) {
    const uint32_t value = bits.take(width);
    out->push_back(raw ? static_cast<int16_t>(static_cast<int8_t>(value) - zero) : table[value]);
  }
  return true;
}

int32_t round_up(int32_t value, int32_t step) { return (value + step - 1) / step * step; }

// Visits the weights in the order of a stream: `visit(o, y, x, i)` is called once for each value, with its output
// channel, row, column and input channel. Values of padding have o = -1 or another position outside of the weights.
//
// The loops on U55 and U65 are, from the outermost: OFM blocks, IFM blocks, sub-kernels (parts of the kernel of at most
// 8 by 8 elements), then microblocks and taps, then the output and input channels of a microblock. In part-kernel
// order, the loop over IFM microblocks encloses the loop over taps. Otherwise, it is inside the loop over taps. Core k
// of n cores has the output channels k, k + n, k + 2n, ...
template <typename Visit>
void walk_u55(const Configuration& npu, const WeightLayout& l, int32_t core, Visit visit) {
  const auto cores = static_cast<int32_t>(npu.cores);
  const int32_t depth = (l.ofm_depth + cores - 1 - core) / cores;
  const int32_t block = (l.ofm_block_depth + cores - 1 - core) / cores;
  const int32_t ofm_micro = npu.product == Product::kU55 && npu.macs == 32 ? 4 : 8;
  constexpr int32_t kIfmMicro = 8;
  const int32_t ifm_block = ifm_block_depth(npu, l);
  const int32_t step_x = 8 / l.dilation_x, step_y = 8 / l.dilation_y;
  // The number of taps is padded to a multiple of this.
  const int32_t tap_multiple = l.depthwise ? 4 : !l.part_kernel ? 1 : l.ifm_bits == 16 ? 2 : 4;
  const int32_t ifm_depth = l.depthwise ? 1 : l.ifm_depth;
  for (int32_t ofm0 = 0; ofm0 < depth; ofm0 += block) {
    const int32_t ofm_count = std::min(block, depth - ofm0);
    for (int32_t ifm0 = 0; ifm0 < ifm_depth; ifm0 += ifm_block) {
      const int32_t ifm_count = l.depthwise     ? kIfmMicro
                                : l.part_kernel ? std::min(ifm_block, ifm_depth - ifm0)
                                                : ifm_block;
      for (int32_t y0 = 0; y0 < l.kernel_h; y0 += step_y) {
        const int32_t height = std::min(l.kernel_h - y0, step_y);
        for (int32_t x0 = 0; x0 < l.kernel_w; x0 += step_x) {
          const int32_t width = std::min(l.kernel_w - x0, step_x);
          const int32_t taps = round_up(width * height, tap_multiple);
          for (int32_t outer = 0; outer < (l.part_kernel ? ifm_count : 1); outer += kIfmMicro) {
            for (int32_t ofm1 = 0; ofm1 < ofm_count; ofm1 += ofm_micro) {
              for (int32_t k = 0; k < taps; ++k) {
                const bool inside = k / width < height;
                for (int32_t inner = 0; inner < (l.part_kernel ? 1 : ifm_count); inner += kIfmMicro) {
                  for (int32_t o = 0; o < ofm_micro; ++o) {
                    for (int32_t i = 0; i < (l.depthwise ? 1 : kIfmMicro); ++i) {
                      const int32_t ofm = ofm0 + ofm1 + o;
                      visit(inside && ofm < depth ? ofm * cores + core : -1, y0 + k / width, x0 + k % width,
                            ifm0 + outer + inner + i);
                    }
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

// The order on U85. The direction of the loop over IFM blocks alternates with each OFM block. For depthwise and
// part-kernel order, the taps are grouped by their position modulo the stride. The direction of columns alternates with
// each row of the kernel (serpentine order). Groups of 4 output channels are assigned to the cores in turn.
template <typename Visit>
class U85Walk {
 public:
  U85Walk(const Configuration& npu, const WeightLayout& layout, int32_t core, Visit visit)
      : l_(layout), core_(core), cores_(static_cast<int32_t>(npu.cores)), visit_(visit) {
    const bool wide = l_.ifm_bits == 16;
    ofm_micro_ = static_cast<int32_t>(npu.macs) / 8 / l_.microblock;
    ifm_block_ = ifm_block_depth(npu, l_);
    ifm_depth_ = l_.depthwise ? 1 : l_.ifm_depth;
    ifm_micro_ = l_.depthwise ? 1 : l_.part_kernel && wide && !l_.sparse ? 8 : ifm_block_;
    step_ = l_.depthwise ? 1 : l_.sparse ? 16 : 8;
    tap_multiple_ = l_.depthwise ? 10 : !l_.part_kernel ? 1 : wide || l_.sparse ? 10 : 5;
    const bool phases = l_.depthwise || l_.part_kernel;
    stride_x_ = phases ? l_.stride_x : 1;
    stride_y_ = phases ? l_.stride_y : 1;
    depthwise_padding_ = !l_.depthwise || (!wide && npu.macs <= 256) ? 0 : npu.macs <= 512 ? 2 : 6;
  }

  // A stream of the fast encoding contains one block of each core in turn. Returns the number of values of a block.
  size_t fast_block() const { return static_cast<size_t>(ofm_micro_ * ifm_micro_ * tap_multiple_ / cores_); }

  void run() {
    bool forward = true;
    for (int32_t ofm0 = 0; ofm0 < l_.ofm_depth; ofm0 += l_.ofm_block_depth) {
      const int32_t blocks = (ifm_depth_ + ifm_block_ - 1) / ifm_block_;
      for (int32_t n = 0; n < blocks; ++n) {
        visit_ifm_block(ofm0, (forward ? n : blocks - 1 - n) * ifm_block_);
      }
      forward = !forward;
    }
  }

 private:
  void visit_ifm_block(int32_t ofm0, int32_t ifm0) {
    const int32_t ofm_count = std::min(l_.ofm_block_depth, l_.ofm_depth - ofm0);
    const int32_t ifm_count = l_.depthwise ? 1 : std::min(ifm_block_, ifm_depth_ - ifm0);
    const int32_t step_x = 8 / l_.dilation_x, step_y = 8 / l_.dilation_y;
    for (int32_t x0 = 0; x0 < l_.kernel_w; x0 += step_x) {
      for (int32_t y0 = 0; y0 < l_.kernel_h; y0 += step_y) {
        for (int32_t i = 0; i < ifm_count; i += ifm_micro_) {
          for (int32_t o = 0; o < ofm_count; o += ofm_micro_) {
            visit_kernel(ofm0 + o, ifm0 + i, y0, x0, std::min(l_.kernel_h - y0, step_y),
                         std::min(l_.kernel_w - x0, step_x));
          }
        }
      }
    }
  }

  void visit_kernel(int32_t ofm, int32_t ifm, int32_t y0, int32_t x0, int32_t height, int32_t width) {
    int32_t left = round_up(width * height, tap_multiple_);
    for (int32_t phase_y = 0; phase_y < stride_y_; ++phase_y) {
      const int32_t rows = (height + stride_y_ - 1 - phase_y) / stride_y_;
      for (int32_t phase_x = 0; phase_x < stride_x_; ++phase_x) {
        const int32_t columns = (width + stride_x_ - 1 - phase_x) / stride_x_;
        for (int32_t y = 0; y < rows; ++y) {
          for (int32_t n = 0; n < columns; ++n) {
            const int32_t x = y % 2 == 0 ? n : columns - 1 - n;
            visit_tap(ofm, ifm, y0 + phase_y + y * stride_y_, x0 + phase_x + x * stride_x_);
            if (--left % tap_multiple_ == 0) {
              visit_padding(depthwise_padding_ * ofm_micro_ / cores_);
            }
          }
        }
      }
    }
    if (left > 0) {
      visit_padding((left + depthwise_padding_) * ifm_micro_ * ofm_micro_ / cores_);
    }
  }

  void visit_tap(int32_t ofm, int32_t ifm, int32_t y, int32_t x) {
    for (int32_t inner = 0; inner < ifm_micro_; inner += step_) {
      for (int32_t z = core_ * 4; z < ofm_micro_; z += 4 * cores_) {
        for (int32_t o = 0; o < 4; ++o) {
          for (int32_t i = 0; i < step_; ++i) {
            const int32_t channel = ofm + z + o;
            visit_(channel < l_.ofm_depth ? channel : -1, y, x, ifm + inner + i);
          }
        }
      }
    }
  }

  void visit_padding(int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
      visit_(-1, 0, 0, 0);
    }
  }

  const WeightLayout& l_;
  int32_t core_, cores_;
  Visit visit_;
  int32_t ofm_micro_, ifm_block_, ifm_depth_, ifm_micro_, step_, tap_multiple_, stride_x_, stride_y_,
      depthwise_padding_;
};

template <typename Visit>
void walk(const Configuration& npu, const WeightLayout& layout, int32_t core, Visit visit) {
  if (npu.is_u85()) {
    U85Walk<Visit>(npu, layout, core, visit).run();
  } else {
    walk_u55(npu, layout, core, visit);
  }
}

// Maximum number of values. It limits the memory for a damaged stream. Streams of real networks have fewer values.
constexpr size_t kMaxWeights = size_t{1} << 28;
// Weights to reserve for each byte of a stream. Only streams with long runs of zeros have more weights per byte.
constexpr size_t kReservedWeightsPerByte = 32;

// Counts the values of a core, with their padding.
size_t count_values(const Configuration& npu, const WeightLayout& l, int32_t core) {
  size_t count = 0;
  walk(npu, l, core, [&count](int32_t, int32_t, int32_t, int32_t) { ++count; });
  return count;
}

// Decodes `wanted` values of a stream. `core` occurs only in the error message.
Status decode_values(const WeightLayout& l, int32_t core, Bytes stream, size_t wanted, std::vector<int16_t>* values) {
  if (wanted > kMaxWeights) {
    return failure(Error::kWeights, "there are % weights with their padding", static_cast<int64_t>(wanted));
  }
  // A damaged stream may be too short for `wanted` values, so its size limits the reserved memory.
  values->reserve(std::min(wanted, stream.size * kReservedWeightsPerByte));
  if (!(l.fast ? decode_fast(stream, wanted, values) : decode_standard(stream, wanted, values))) {
    return failure(Error::kWeights, "the weights of core % are damaged: % values are needed, the stream has % bytes",
                   core, static_cast<int64_t>(wanted), static_cast<int64_t>(stream.size));
  }
  return {};
}

// Stores the values of a core, in the order of its walk.
void store_values(const Configuration& npu, const WeightLayout& l, int32_t core, const std::vector<int16_t>& values,
                  std::vector<int16_t>* weights) {
  size_t at = 0;
  walk(npu, l, core, [&](int32_t o, int32_t y, int32_t x, int32_t i) {
    const int16_t value = values[at++];
    if (o < 0 || y >= l.kernel_h || x >= l.kernel_w || (!l.depthwise && i >= l.ifm_depth) || (l.depthwise && i > 0)) {
      return;
    }
    const int32_t position = y * l.kernel_w + x;
    const int32_t index =
        l.depthwise ? position * l.ofm_depth + o : (o * l.kernel_h * l.kernel_w + position) * l.ifm_depth + i;
    (*weights)[static_cast<size_t>(index)] = value;
  });
}

// Decodes a stream of the fast encoding, which contains the weights of all cores.
Status decode_fast_stream(const Configuration& npu, const WeightLayout& l, Bytes stream,
                          std::vector<int16_t>* weights) {
  const auto cores = static_cast<int32_t>(npu.cores);
  const auto no_visit = [](int32_t, int32_t, int32_t, int32_t) {};
  const size_t block = U85Walk<decltype(no_visit)>(npu, l, 0, no_visit).fast_block();
  const size_t per_core = count_values(npu, l, 0);
  std::vector<int16_t> values;
  const Status status = decode_values(l, 0, stream, per_core * npu.cores, &values);
  if (!status.ok()) {
    return status;
  }
  std::vector<std::vector<int16_t>> values_by_core(npu.cores);
  for (size_t start = 0; start < values.size();) {
    const size_t count = std::min(block, per_core - values_by_core[0].size());
    for (std::vector<int16_t>& part : values_by_core) {
      const auto first = values.begin() + static_cast<int64_t>(start);
      part.insert(part.end(), first, first + static_cast<int64_t>(count));
      start += count;
    }
  }
  weights->resize(l.count());
  for (int32_t core = 0; core < cores; ++core) {
    store_values(npu, l, core, values_by_core[static_cast<size_t>(core)], weights);
  }
  return {};
}

int64_t read_signed(const uint8_t* at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) {
    value |= uint64_t{at[i]} << (8 * i);
  }
  return static_cast<int64_t>(value << (64 - 8 * bytes)) >> (64 - 8 * bytes);
}

constexpr size_t kScaleRecord = 10;

ChannelScale read_scale(const Configuration& npu, bool wide_accumulators, const uint8_t* at) {
  ChannelScale scale;
  // U55 and U65: 40-bit bias, 32-bit multiplier. U85: 32-bit bias and 31-bit multiplier, or, for 48-bit accumulators,
  // 48-bit bias and 15-bit multiplier.
  const int bias_bytes = !npu.is_u85() ? 5 : wide_accumulators ? 6 : 4;
  const int scale_bytes = npu.is_u85() && wide_accumulators ? 2 : 4;
  const auto multiplier = static_cast<uint32_t>(read_signed(at + bias_bytes, scale_bytes));
  scale.bias = read_signed(at, bias_bytes);
  scale.scale.multiplier = !npu.is_u85() ? multiplier : multiplier & (wide_accumulators ? 0x7FFFu : 0x7FFFFFFFu);
  scale.scale.shift = at[npu.is_u85() ? 8 : 9] & 0x3F;
  return scale;
}

}  // namespace

int32_t ifm_block_depth(const Configuration& npu, const WeightLayout& l) {
  if (!npu.is_u85()) {
    return l.part_kernel || l.ifm_bits == 16 ? 16 : 32;
  }
  if (l.part_kernel) {
    return 16;
  }
  const int32_t ofm_micro = static_cast<int32_t>(npu.macs) / 8 / l.microblock;
  if (l.ifm_bits == 32 || (npu.macs <= 256 && ofm_micro == 16 && !l.sparse)) {
    return 32;
  }
  return l.sparse && l.ifm_bits == 8 ? 128 : 64;
}

Status decode_weights(const Configuration& npu, const WeightLayout& layout, const Bytes* streams,
                      std::vector<int16_t>* weights) {
  // The sizes come from 16-bit registers, so their product must be bounded.
  if (layout.count() > kMaxWeights) {
    return failure(Error::kWeights, "there are % weights", static_cast<int64_t>(layout.count()));
  }
  if (layout.ofm_block_depth < static_cast<int32_t>(npu.cores)) {
    return failure(Error::kShape, "blocks of % channels for % cores", layout.ofm_block_depth, npu.cores);
  }
  weights->clear();
  if (layout.fast) {
    return decode_fast_stream(npu, layout, streams[0], weights);
  }
  for (int32_t core = 0; core < static_cast<int32_t>(npu.cores); ++core) {
    if (core >= layout.ofm_depth && !npu.is_u85()) {
      break;
    }
    std::vector<int16_t> values;
    const Status status = decode_values(layout, core, streams[core], count_values(npu, layout, core), &values);
    if (!status.ok()) {
      return status;
    }
    weights->resize(layout.count());  // not before decoding, which fails if a damaged stream announces too many weights
    store_values(npu, layout, core, values, weights);
  }
  return {};
}

Status decode_scales(const Configuration& npu, bool wide_accumulators, int32_t depth, const Bytes* streams,
                     size_t stream_count, std::vector<ChannelScale>* scales) {
  scales->resize(static_cast<size_t>(depth));
  for (size_t channel = 0; channel < scales->size(); ++channel) {
    const Bytes stream = streams[channel % stream_count];
    const size_t at = channel / stream_count * kScaleRecord;
    if (at + kScaleRecord > stream.size) {
      return failure(Error::kWeights, "channel % has no scale: the stream has % bytes", static_cast<int64_t>(channel),
                     static_cast<int64_t>(stream.size));
    }
    (*scales)[channel] = read_scale(npu, wide_accumulators, stream.data + at);
  }
  return {};
}

}  // namespace arm_runtime::npu
