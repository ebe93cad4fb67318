// SPDX-License-Identifier: Apache-2.0
#include "emulator/access_checker.h"

#include <algorithm>
#include <utility>

#include "emulator/blocks.h"

namespace arm_runtime::npu {
namespace {

// Reasons for kUninitialized, indexed by Operand. Empty for operands whose uninitialized bytes are no error.
constexpr const char* kUninitializedReasons[] = {
    "IFM contains byte % of region %, which has not been written, and % more uninitialized bytes",
    "IFM2 contains byte % of region %, which has not been written, and % more uninitialized bytes",
    "",
    "weights or scales contain byte % of region %, which has not been written, and % more uninitialized bytes",
    "the table contains byte % of region % (lookup tables), which has not been written, and % more uninitialized bytes",
    "",
    "",
    "indices contain byte % of region %, which has not been written, and % more uninitialized bytes",
};

}  // namespace

void AccessChecker::Extent::add(int64_t from, int64_t to) {
  start = std::min(start, from);
  end = std::max(end, to);
}

void AccessChecker::Queue::keep_newest(int newest) {
  const int drop = std::max(0, count - newest);
  std::move(entries + drop, entries + count, entries);
  count -= drop;
}

void AccessChecker::Queue::push(const InFlight& entry) {
  keep_newest(limit - 1);
  entries[count++] = entry;
}

void AccessChecker::prepare(const Configuration& npu, const NpuState& state, size_t weights, size_t operations,
                            std::vector<ByteRange> inputs, std::vector<ByteRange> outputs, uint32_t fatal_findings) {
  // `state` has the sizes that operations need (Program::required_size). The checker needs larger sizes in two cases:
  // region 0 also contains the constants that load() decodes, and inputs and outputs can end after the last byte that
  // operations access.
  int64_t sizes[kCheckedRegions];
  for (int i = 0; i < kRegions; ++i) {
    sizes[i] = static_cast<int64_t>(i == 0 ? weights : state.regions[i].size);
  }
  sizes[kTableRegion] = kTableBytes;
  for (const std::vector<ByteRange>* ranges : {&inputs, &outputs}) {
    for (const ByteRange& range : *ranges) {
      sizes[range.region] = std::max(sizes[range.region], range.end);
    }
  }
  for (int i = 0; i < kCheckedRegions; ++i) {
    for (ShadowMemory* shadow : {&written_[i], &accessed_[i], &marks_[i]}) {
      shadow->resize(static_cast<uint64_t>(sizes[i]));
    }
  }
  inputs_ = std::move(inputs);
  outputs_ = std::move(outputs);
  operations_.assign(operations, {});
  fatal_findings_ = fatal_findings;
  kernels_.limit = 2;
  dmas_.limit = npu.product == Product::kU55 ? 1 : npu.product == Product::kU65 ? 2 : 4;
  begin();
}

void AccessChecker::begin() {
  for (int i = 0; i < kCheckedRegions; ++i) {
    written_[i].fill(i == 0);
    accessed_[i].fill(false);
  }
  for (const ByteRange& range : inputs_) {
    written_[range.region].set(range.start, range.end);
  }
  std::fill(operations_.begin(), operations_.end(), OperationStatistics{});
  statistics_ = {};
  kernels_.count = dmas_.count = 0;
}

Status AccessChecker::report(Finding finding, const char* reason, int64_t first, int64_t second, int64_t third) {
  (finding == kHazard ? statistics_.hazards : statistics_.uninitialized) +=
      finding == kHazard ? 1 : uint64_t(third) + 1;
  if ((fatal_findings_ & finding) == 0) {
    return {};
  }
  return failure(finding == kHazard ? Error::kHazard : Error::kUninitialized, reason, first, second, third);
}

Status AccessChecker::check(const Operation& op, size_t index, const NpuState& state) {
  current_ = &operations_[index];
  entry_ = {};
  entry_.op = &op;
  Status status;
  visit_accesses(op, state, [&](Operand operand, int region, int64_t start, int64_t end) {
    const Status one = record_access(operand, region, start, end);
    if (status.ok()) {
      status = one;
    }
  });
  if (op.kind == Kind::kConv || op.kind == Kind::kDepthwise) {
    current_->macs = op.work();
  }
  return status.ok() ? check_dependencies(entry_, state) : status;
}

Status AccessChecker::record_access(Operand operand, int region, int64_t start, int64_t end) {
  if (start >= end) {
    return {};
  }
  const auto bytes = static_cast<uint64_t>(end - start);
  const bool writes = is_write(operand);
  (writes ? entry_.written : entry_.read)[region].add(start, end);
  if (operand != Operand::kClobbered) {
    accessed_[region].set(start, end);
  }
  if (region != kTableRegion) {
    (writes ? current_->bytes_written : current_->bytes_read)[region] += bytes;
    statistics_.peak[region] = std::max(statistics_.peak[region], static_cast<uint64_t>(end));
  }
  if (operand == Operand::kTarget) {
    copy_state(region, start);
    return {};
  }
  if (operand == Operand::kClobbered) {
    written_[region].clear(start, end);
    return {};
  }
  if (writes) {
    written_[region].set(start, end);
    return {};
  }
  if (operand == Operand::kSource) {
    source_ = {static_cast<uint8_t>(region), start, end};
    return {};
  }
  const int64_t at = written_[region].first(start, end, false);
  if (at < 0) {
    return {};
  }
  const int64_t inside = std::min(end, written_[region].size()) - std::max<int64_t>(start, 0);
  const int64_t more = inside - written_[region].count(start, end) - 1;
  return report(kUninitialized, kUninitializedReasons[static_cast<int>(operand)], at, region, more);
}

// A DMA copies the row `source_` to `target`. Copies the bits that mark which bytes of the row have been written. A
// copy of uninitialized bytes is not an error: Vela copies multiples of 16 bytes, and no operation uses the padding
// bytes.
void AccessChecker::copy_state(int region, int64_t target) {
  ShadowMemory& from = written_[source_.region];
  const int64_t step = target - source_.start;
  int64_t written_to;
  for (int64_t at = source_.start; at < source_.end; at = written_to) {
    const int64_t gap = from.first(at, source_.end, false);
    const int64_t gap_from = gap < 0 ? source_.end : gap;
    const int64_t next = from.first(gap_from, source_.end, true);
    written_to = next < 0 ? source_.end : next;
    written_[region].set(at + step, gap_from + step);
    written_[region].clear(gap_from + step, written_to + step);
  }
}

Status AccessChecker::check_outputs() {
  for (const ByteRange& range : outputs_) {
    const int64_t at = written_[range.region].first(range.start, range.end, false);
    if (at >= 0) {
      const int64_t more = range.end - range.start - written_[range.region].count(range.start, range.end) - 1;
      constexpr const char* kReason =
          "an output contains byte % of region %, which has not been written, and % more uninitialized bytes";
      const Status status = report(kUninitialized, kReason, at, range.region, more);
      if (!status.ok()) {
        return status;
      }
    }
  }
  return {};
}

ExecutionStatistics AccessChecker::statistics() {
  ExecutionStatistics result = statistics_;
  for (const OperationStatistics& operation : operations_) {
    result.macs += operation.macs;
    for (int i = 0; i < kRegions; ++i) {
      result.bytes_read[i] += operation.bytes_read[i];
      result.bytes_written[i] += operation.bytes_written[i];
    }
  }
  for (int i = 0; i < kRegions; ++i) {
    result.touched[i] = static_cast<uint64_t>(accessed_[i].count(0, accessed_[i].size()));
  }
  return result;
}

Status AccessChecker::check_dependencies(const InFlight& newer, const NpuState& state) {
  const Operation& op = *newer.op;
  kernels_.keep_newest(op.scheduling.kernel_wait);
  dmas_.keep_newest(op.scheduling.dma_wait);
  for (int i = 0; i < dmas_.count; ++i) {
    const Status status = check_pair(dmas_.entries[i], newer, state);
    if (!status.ok()) {
      return status;
    }
  }
  Status status;
  if (op.kind == Kind::kDma) {
    for (int i = 0; i < kernels_.count && status.ok(); ++i) {
      status = check_pair(kernels_.entries[i], newer, state);
    }
    dmas_.push(newer);
  } else {
    if (kernels_.count > 0) {
      status = check_blocks(*kernels_.entries[kernels_.count - 1].op, op, state);
    }
    kernels_.push(newer);
  }
  return status;
}

// Checks two operations that no wait command orders. If one of them writes a byte, the other must not access it.
Status AccessChecker::check_pair(const InFlight& older, const InFlight& newer, const NpuState& state) {
  struct Pair {
    bool older_writes, newer_writes;
    const char* reason;
  };
  constexpr Pair kPairs[] = {
      {true, false, "it may read byte % of region % before the operation at byte % has written it: a wait is missing"},
      {false, true, "it may write byte % of region % before the operation at byte % has read it: a wait is missing"},
      {true, true, "it may write byte % of region % before the operation at byte % does: a wait is missing"},
  };
  for (const Pair& pair : kPairs) {
    for (int region = 0; region < kCheckedRegions; ++region) {
      const Extent& a = (pair.older_writes ? older.written : older.read)[region];
      const Extent& b = (pair.newer_writes ? newer.written : newer.read)[region];
      if (!a.overlaps(b)) {
        continue;
      }
      const int64_t at = find_overlap(*older.op, pair.older_writes, *newer.op, pair.newer_writes, region, state);
      if (at >= 0) {
        return report(kHazard, pair.reason, at, region, static_cast<int64_t>(older.op->offset));
      }
    }
  }
  return {};
}

// Returns the first byte of `region` that both operations access, or -1.
int64_t AccessChecker::find_overlap(const Operation& older, bool older_writes, const Operation& newer,
                                    bool newer_writes, int region, const NpuState& state) {
  ShadowMemory& marks = marks_[region];
  const auto each = [&](const Operation& op, bool writes, auto visit) {
    visit_accesses(op, state, [&](Operand operand, int where, int64_t start, int64_t end) {
      if (where == region && is_write(operand) == writes) {
        visit(start, end);
      }
    });
  };
  each(older, older_writes, [&](int64_t start, int64_t end) { marks.set(start, end); });
  int64_t at = -1;
  each(newer, newer_writes, [&](int64_t start, int64_t end) { at = at < 0 ? marks.first(start, end, true) : at; });
  each(older, older_writes, [&](int64_t start, int64_t end) { marks.clear(start, end); });
  return at;
}

Status AccessChecker::check_blocks(const Operation& older, const Operation& newer, const NpuState& state) {
  const int32_t depth = newer.scheduling.blockdep;
  if (depth > 0 && state.clobbers_tables && older.output.table != Table::kNone && newer.output.table == Table::kNone) {
    constexpr const char* kClobbered =
        "it may write over the table of the operation at byte % before that operation has ended: BLOCKDEP is too large";
    return report(kHazard, kClobbered, static_cast<int64_t>(older.offset), 0, 0);
  }
  if (depth == 0 || !older.writes_memory()) {
    return {};
  }
  const FeatureMap ofm = older.ofm_in_memory();
  const bool plain = older.output.transpose == 0 && older.output.reverse == 0;
  const auto written = [&](int32_t block) { return plain ? ofm_block(older, block) : whole_box(ofm); };
  ShadowMemory& marks = marks_[ofm.region];
  const int32_t blocks = block_count(older);
  int64_t at = -1;
  // Block i of the newer operation may run in parallel with the last `depth - i` blocks of the older one.
  for (int32_t i = depth - 1; i >= 0 && at < 0; --i) {
    const int32_t block = blocks - (depth - i);
    if (block >= 0) {
      visit_box(ofm, written(block), [&](int64_t start, int64_t end) { marks.set(start, end); });
    }
    visit_block_reads(newer, i, [&](int region, int64_t start, int64_t end) {
      at = at < 0 && region == ofm.region ? marks.first(start, end, true) : at;
    });
  }
  for (int32_t block = std::max<int32_t>(0, blocks - depth); block < blocks; ++block) {
    visit_box(ofm, written(block), [&](int64_t start, int64_t end) { marks.clear(start, end); });
  }
  if (at < 0) {
    return {};
  }
  constexpr const char* kReason =
      "it may read byte % of region % before the operation at byte % has written it: BLOCKDEP is too large";
  return report(kHazard, kReason, at, ofm.region, static_cast<int64_t>(older.offset));
}

}  // namespace arm_runtime::npu
