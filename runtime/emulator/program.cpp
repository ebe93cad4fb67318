// SPDX-License-Identifier: Apache-2.0
#include "emulator/program.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace arm_runtime::npu {
namespace {

// Maximum number of elements of a tensor. It limits the memory for a damaged stream.
constexpr int64_t kMaxElements = int64_t{1} << 26;
// Maximum of work(). It limits the execution time of a damaged stream to about an hour. The work() of a large network
// is a thousandth of this limit.
constexpr uint64_t kMaxWork = uint64_t{1} << 45;

// Enlarges a vector to `size` elements. If size_t has 32 bits, the cast would truncate a size of more than 32 bits. The
// size is therefore clamped to PTRDIFF_MAX, which exceeds max_size(), so that resize() throws.
template <typename T>
void grow(std::vector<T>* vector, int64_t size) {
  if (static_cast<int64_t>(vector->size()) < size) {
    vector->resize(static_cast<size_t>(std::min<int64_t>(size, PTRDIFF_MAX)));
  }
}

// Adds the name and the byte offset of `place`, a command or an operation, to an error.
template <typename Place>
Status with_place(const Place& place, Status status) {
  if (!status.ok()) {
    status.place = place.name;
    status.offset = place.offset;
  }
  return status;
}

}  // namespace

void NpuState::reserve(const Operation& op) {
  if (op.kind == Kind::kDma) {
    return;
  }
  const int64_t depth = std::max(op.ofm.depth, op.ifm.depth);
  for (std::vector<int64_t>& values : row) {
    grow(&values, depth);
  }
  if (op.keeps_accumulators) {
    grow(&accumulators, op.ofm.elements());
  }
  if (op.ofm.storage == Storage::kChained) {
    grow(&chains[op.ofm.region], op.ofm.elements());
  }
  if (op.kind == Kind::kConv || op.kind == Kind::kDepthwise) {
    grow(&ifm_int16, op.ifm.elements());
    grow(&patch, int64_t{op.kernel.height} * op.kernel.width * op.ifm.depth);
    if (op.dynamic_weights) {
      grow(&dynamic_weights, int64_t{op.ofm.depth} * op.ifm.depth);
    }
  } else if (op.kind != Kind::kElementwise) {
    grow(&ifm_int32, op.ifm.elements());
  }
}

Status Program::load(const uint8_t* stream, size_t stream_size, Bytes weights, const uint64_t* sizes) {
  weights_ = weights;
  for (int i = 0; i < kRegions; ++i) {
    state_.regions[i].size = sizes[i];
  }
  CommandReader reader;
  Status status = reader.open(stream, stream_size);
  if (!status.ok()) {
    status.place = "the header";
    return status;
  }
  configuration_ = reader.configuration();
  state_.u85 = configuration_.is_u85();
  state_.clobbers_tables = configuration_.product == Product::kU55 && configuration_.macs <= 64;
  const auto registers = std::make_unique<Registers>();
  while (!reader.done()) {
    Command command;
    status = reader.next(&command);
    if (!status.ok()) {
      return status;
    }
    ++scheduling_.commands;
    ++commands_;
    if (command.sets_register()) {
      registers->set(command);
    } else if (command.key == kOpDmaWait || command.key == kOpKernelWait) {
      add_wait(command);
    } else if (command.key == kOpStop) {
      stop_ = command;
      return with_place(command, finish());
    } else if (command.key != kOpIrq && command.key != kOpPmuMask) {
      status = add_operation(command, *registers);
      if (!status.ok()) {
        return status;
      }
    }
  }
  status = failure(Error::kStream, "the stream ends without NPU_OP_STOP");
  status.place = "the last command";
  return status;
}

void Program::add_wait(const Command& command) {
  uint8_t& limit = command.key == kOpDmaWait ? scheduling_.dma_wait : scheduling_.kernel_wait;
  limit = std::min(limit, static_cast<uint8_t>(command.parameter & 15));
}

// Returns the scheduling information of this operation, and resets `scheduling_` for the next one.
SchedulingInfo Program::take_scheduling(const Registers& registers, const Operation& op) {
  SchedulingInfo scheduling = scheduling_;
  scheduling_ = {};
  scheduling.blockdep = static_cast<uint8_t>(registers.bits(kBlockdep, 0, 3));
  for (int i = 0; i < 3; ++i) {
    constexpr int kBlock[] = {kOfmBlkHeightM1, kOfmBlkWidthM1, kOfmBlkDepthM1};
    scheduling.ofm_block[i] = static_cast<int32_t>(registers.parameter(kBlock[i])) + 1;
  }
  scheduling.ifm_block = ifm_block_depth(configuration_, weight_layout(registers, op, configuration_.is_u85()));
  return scheduling;
}

Status Program::finish() {
  for (int i = 0; i < kRegions; ++i) {
    state_.regions[i].size = std::min(state_.regions[i].size, required_sizes_[i]);
  }
  return work() > kMaxWork ? failure(Error::kShape, "there are % elements to compute, more than %",
                                     static_cast<int64_t>(work()), int64_t{kMaxWork})
                           : Status{};
}

Status Program::add_operation(const Command& command, const Registers& registers) {
  Operation op;
  Status status = read_operation(configuration_, command, registers, &op);
  if (status.ok()) {
    status = with_place(op, check_operation(op));
  }
  if (status.ok() && (op.kind == Kind::kConv || op.kind == Kind::kDepthwise || op.kind == Kind::kPool)) {
    status = with_place(op, add_constants(registers, &op));
  }
  if (!status.ok()) {
    return status;
  }
  const Dma& dma = op.dma;
  if (op.kind == Kind::kDma) {
    extend_required_size(dma);
  }
  if (op.kind == Kind::kDma && dma.source_region == 0 && !dma.to_tables && !dma.from_tables && !dma.is_gather &&
      !dma.is_scatter && dma.count0 == 1 && dma.count1 == 1) {
    copies_.push_back({dma.target_region, dma.target, dma.length, dma.source});
  }
  if (op.kind != Kind::kDma) {
    kept_accumulators_ = op.keeps_accumulators ? op.ofm.elements() : 0;
  }
  state_.reserve(op);
  op.scheduling = take_scheduling(registers, op);
  operations_.push_back(op);
  return {};
}

void Program::extend_required_size(int region, int128_t end) {
  const int128_t size = state_.regions[region].size;
  required_sizes_[region] =
      std::max(required_sizes_[region], static_cast<uint64_t>(std::clamp(end, int128_t{0}, size)));
}

// Extends the required size of the regions to the end of the last row of a DMA. In the tensor that a gather or scatter
// addresses by index, the last row is `index_max`. Execution checks the bounds of all rows.
void Program::extend_required_size(const Dma& d) {
  if (d.count0 == 0 || d.count1 == 0) {
    return;
  }
  const auto end = [&d](int128_t start, bool indexed, int64_t stride0, int64_t stride1) {
    const int128_t rows = indexed ? d.index_max : d.count0 - 1;
    return start + std::max(int128_t{0}, rows * stride0) + std::max(int128_t{0}, int128_t{d.count1 - 1} * stride1) +
           d.length;
  };
  if (!d.from_tables) {
    extend_required_size(d.source_region, end(d.source, d.is_gather, d.source_stride0, d.source_stride1));
  }
  if (!d.to_tables) {
    extend_required_size(d.target_region, end(d.target, d.is_scatter, d.target_stride0, d.target_stride1));
  }
  if (d.is_gather || d.is_scatter) {
    const int128_t row = int128_t{4} * d.count0;
    extend_required_size(d.index_region, d.index + row + std::max(int128_t{0}, (row + d.index_skip) * (d.count1 - 1)));
  }
}

Status Program::check_map(const FeatureMap& map, const char* reason) {
  if (map.storage == Storage::kTiles3x1) {
    return failure(Error::kUnsupported, "tiles of 3x1");
  }
  if (map.storage == Storage::kChained) {
    const auto held = static_cast<int64_t>(state_.chains[map.region].size());
    return map.elements() > held
               ? failure(Error::kShape, "a chained tensor has % elements, its buffer %", map.elements(), held)
               : Status{};
  }
  int64_t low, high;
  map.range(&low, &high);
  const auto size = static_cast<int64_t>(state_.regions[map.region].size);
  if (low < 0 || high > size) {
    return failure(Error::kMemory, reason, low, high, size);
  }
  extend_required_size(map.region, high);
  return {};
}

Status Program::check_operation(const Operation& op) {
  if (op.kind == Kind::kDma) {
    return {};
  }
  // Check all tensors, because chained tensors need memory, too.
  const int64_t elements = std::max({op.ifm.elements(), op.uses_ifm2 ? op.ifm2.elements() : 0, op.ofm.elements()});
  if (elements > kMaxElements) {
    return failure(Error::kShape, "a tensor has % elements, more than %", elements, kMaxElements);
  }
  Status status;
  if (op.reads_ifm()) {
    status = check_map(op.ifm, "IFM takes bytes % to % of a region of %");
  }
  if (status.ok() && op.uses_ifm2 && !op.scalar2) {
    status = check_map(op.ifm2, "IFM2 takes bytes % to % of a region of %");
  }
  if (status.ok() && op.continues_accumulators && kept_accumulators_ != op.ofm.elements()) {
    return failure(Error::kShape, "the previous operation left % accumulators, this one continues with %",
                   kept_accumulators_, op.ofm.elements());
  }
  if (op.keeps_accumulators) {
    return status;
  }
  if (status.ok() && op.ofm.storage == Storage::kNone) {
    return failure(Error::kUnsupported, "an operation without output");
  }
  if (status.ok() && op.ofm.storage != Storage::kChained) {
    status = check_map(op.ofm_in_memory(), "OFM takes bytes % to % of a region of %");
  }
  return status;
}

Status Program::add_constants(const Registers& registers, Operation* op) {
  if (op->kind != Kind::kPool && !op->dynamic_weights) {
    const Status status = add_weights(registers, op);
    if (!status.ok()) {
      return status;
    }
  }
  return op->output.per_channel && !op->dynamic_weights ? add_scales(registers, op) : Status{};
}

// Sets `bytes` to the range of region 0 that starts at `from`.
Status Program::slice_weights(int64_t from, int64_t length, Bytes* bytes) const {
  const auto size = static_cast<int64_t>(weights_.size);
  if (from < 0 || length < 0 || from > size - length) {
    return failure(Error::kMemory, "% bytes of weights at byte % of a region of %", length, from, size);
  }
  bytes->data = weights_.data + from;
  bytes->size = static_cast<size_t>(length);
  return {};
}

// Finds the bytes of region 0 that an operation reads as constants at `address` of `region`. If `region` is not 0,
// earlier DMAs have copied the bytes to `address`. They may have copied parts from several places, because methods that
// share constants store each shared part once. If DMAs have copied only the first bytes, `bytes` is shorter than
// `length`.
Status Program::find_constant(uint32_t region, int64_t address, int64_t length, Bytes* bytes) {
  if (region == 0) {
    return slice_weights(address, length, bytes);
  }
  std::vector<Bytes> parts;
  for (int64_t done = 0; done < length;) {
    const int64_t at = address + done;
    const auto copy = std::find_if(copies_.rbegin(), copies_.rend(), [&](const Copy& candidate) {
      return candidate.region == region && candidate.target <= at && at < candidate.target + candidate.length;
    });
    if (copy == copies_.rend()) {
      break;
    }
    Bytes part;
    const int64_t part_length = std::min(length - done, copy->target + copy->length - at);
    const Status status = slice_weights(copy->source + at - copy->target, part_length, &part);
    if (!status.ok()) {
      return status;
    }
    if (!parts.empty() && parts.back().data + parts.back().size == part.data) {
      parts.back().size += part.size;
    } else {
      parts.push_back(part);
    }
    done += part_length;
  }
  if (parts.empty()) {
    return failure(Error::kUnsupported, "weights at byte % of region %, to which no DMA has copied weights", address,
                   region);
  }
  *bytes = parts.size() == 1 ? parts.front() : join(parts);
  return {};
}

// Concatenates parts of region 0 in an array that lives as long as the program.
Bytes Program::join(const std::vector<Bytes>& parts) {
  std::vector<uint8_t> joined;
  for (const Bytes& part : parts) {
    joined.insert(joined.end(), part.data, part.data + part.size);
  }
  const std::vector<uint8_t>& kept = *joined_constants_.insert(std::move(joined)).first;
  return {kept.data(), kept.size()};
}

Status Program::add_weights(const Registers& registers, Operation* op) {
  constexpr int kBases[] = {kWeightBase, kWeight1Base, kWeight2Base, kWeight3Base};
  const WeightLayout layout = weight_layout(registers, *op, configuration_.is_u85());
  const uint32_t region = registers.bits(kWeightRegion, 0, 3);
  Bytes streams[4];
  const int64_t flags =
      (layout.depthwise ? 1 : 0) + (layout.part_kernel ? 2 : 0) + (layout.fast ? 4 : 0) + (layout.sparse ? 8 : 0);
  std::vector<int64_t> key = {layout.ofm_depth,  layout.ofm_block_depth, layout.ifm_depth, layout.microblock,
                              layout.kernel_h,   layout.kernel_w,        layout.stride_y,  layout.stride_x,
                              layout.dilation_y, layout.dilation_x,      layout.ifm_bits,  flags};
  const uint32_t stream_count = layout.fast ? 1 : configuration_.cores;
  for (uint32_t core = 0; core < stream_count; ++core) {
    const int64_t address = registers.address(kBases[core]);
    const int64_t length = registers.word(kBases[core] + 1);
    key.push_back(length);
    if (length == 0) {
      continue;
    }
    const Status status = find_constant(region, address, length, &streams[core]);
    if (!status.ok()) {
      return status;
    }
    op->add_constant(region, address, streams[core].size, streams[core].data);
    key.push_back(reinterpret_cast<intptr_t>(streams[core].data));
  }
  auto& decoded = decoded_weights_[key];
  if (decoded == nullptr) {
    decoded = std::make_unique<std::vector<int16_t>>();
    const Status status = decode_weights(configuration_, layout, streams, decoded.get());
    if (!status.ok()) {
      return status;
    }
  }
  op->weights = decoded.get();
  return {};
}

Status Program::add_scales(const Registers& registers, Operation* op) {
  const bool two = configuration_.product == Product::kU65 && configuration_.cores == 2 && op->ofm.depth > 1;
  const uint32_t region = registers.bits(kScaleRegion, 0, 3);
  const int bases[] = {kScaleBase, kScale1Base};
  Bytes streams[2];
  std::vector<int64_t> key = {op->ofm.depth, op->wide_accumulators ? 1 : 0};
  for (int i = 0; i < (two ? 2 : 1); ++i) {
    const uint32_t length = registers.word(bases[i] + 1) & 0xFFFFF;
    const Status status = find_constant(region, registers.address(bases[i]), length, &streams[i]);
    if (!status.ok()) {
      return status;
    }
    op->add_constant(region, registers.address(bases[i]), streams[i].size, streams[i].data);
    key.push_back(reinterpret_cast<intptr_t>(streams[i].data));
  }
  auto& decoded = decoded_scales_[key];
  if (decoded == nullptr) {
    decoded = std::make_unique<std::vector<ChannelScale>>();
    const Status status =
        decode_scales(configuration_, op->wide_accumulators, op->ofm.depth, streams, two ? 2 : 1, decoded.get());
    if (!status.ok()) {
      return status;
    }
  }
  op->scales = decoded.get();
  return {};
}

uint64_t Program::work() const {
  uint64_t sum = 0;
  for (const Operation& op : operations_) {
    sum += op.work();
  }
  return sum;
}

void Program::enable_access_checker(std::vector<ByteRange> inputs, std::vector<ByteRange> outputs,
                                    uint32_t fatal_findings) {
  checker_ = std::make_unique<AccessChecker>();
  checker_->prepare(configuration_, state_, weights_.size, operations_.size(), std::move(inputs), std::move(outputs),
                    fatal_findings);
}

Status Program::execute(uint8_t* const* regions, size_t first, size_t last) {
  for (int i = 0; i < kRegions; ++i) {
    state_.regions[i].data = regions[i];
  }
  if (checker_ != nullptr && first == 0) {
    checker_->begin();
  }
  for (size_t i = first; i < std::min(last, operations_.size()); ++i) {
    const Operation& op = operations_[i];
    Status status = checker_ == nullptr ? Status{} : checker_->check(op, i, state_);
    if (status.ok()) {
      status = check_constants(op);
    }
    if (status.ok()) {
      status = run_operation(op);
    }
    if (!status.ok()) {
      return with_place(op, status);
    }
  }
  return checker_ != nullptr && last >= operations_.size() ? with_place(stop_, checker_->check_outputs()) : Status{};
}

// Tests that copies of constants outside of region 0 equal the bytes that load() has decoded.
Status Program::check_constants(const Operation& op) const {
  for (int i = 0; i < op.constant_count; ++i) {
    const ByteRange& range = op.constants[i];
    const Region& region = state_.regions[range.region];
    const auto size = static_cast<size_t>(range.end - range.start);
    if (range.region != 0 && std::memcmp(region.data + range.start, op.constant_sources[i], size) != 0) {
      return failure(Error::kWeights, "bytes % to % of region % are not the weights that DMAs have copied there",
                     range.start, range.end - 1, range.region);
    }
  }
  return {};
}

bool Program::copy_output(size_t index, uint8_t* to, uint64_t size) const {
  const Operation& op = operations_[index];
  uint64_t done = 0;
  bool fits = true;
  const auto copy = [&](const uint8_t* from, uint64_t held, int64_t start, int64_t end) {
    const auto length = static_cast<uint64_t>(end - start);
    fits = fits && start >= 0 && static_cast<uint64_t>(end) <= held && length <= size - done;
    if (fits) {
      std::memcpy(to + done, from + start, static_cast<size_t>(length));
      done += length;
    }
  };
  if (op.kind == Kind::kDma) {
    visit_dma(op.dma, state_, [&](Operand operand, int region, int64_t start, int64_t end) {
      const bool tables = region == kTableRegion;
      if (operand == Operand::kTarget) {
        copy(tables ? state_.tables : state_.regions[region].data,
             tables ? uint64_t{kTableBytes} : state_.regions[region].size, start, end);
      }
    });
  } else if (op.ofm.storage == Storage::kChained && !op.keeps_accumulators) {
    const int64_t bytes = op.ofm.elements() * int64_t{sizeof(int32_t)};
    copy(reinterpret_cast<const uint8_t*>(state_.chains[op.ofm.region].data()), static_cast<uint64_t>(bytes), 0, bytes);
  } else if (op.writes_memory()) {
    const FeatureMap map = op.ofm_in_memory();
    const Region& region = state_.regions[map.region];
    for (int32_t y = 0; y < map.height; ++y) {
      for (int32_t x = 0; x < map.width; ++x) {
        visit_box(map, {y, y + 1, x, x + 1, 0, map.depth},
                  [&](int64_t start, int64_t end) { copy(region.data, region.size, start, end); });
      }
    }
  }
  return fits && done == size;
}

Status Program::run_operation(const Operation& op) {
  switch (op.kind) {
    case Kind::kConv:
      run_convolution(op, &state_);
      return {};
    case Kind::kDepthwise:
      run_depthwise(op, &state_);
      return {};
    case Kind::kPool:
      run_pool(op, &state_);
      return {};
    case Kind::kElementwise:
      run_elementwise(op, &state_);
      return {};
    case Kind::kResize:
      run_resize(op, &state_);
      return {};
    default:
      return run_dma(op, &state_);
  }
}

}  // namespace arm_runtime::npu
