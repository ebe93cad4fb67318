// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/access.h"
#include "emulator/shadow.h"
#include "emulator/npu_state.h"

namespace arm_runtime::npu {

// What the watch finds, as bits.
enum Finding : uint32_t { kUnwritten = 1, kHazard = 2 };

// Of one execution, as far as it came. An operation reads and writes each byte of an operand once, however often
// hardware fetches it.
struct Figures {
  uint64_t macs = 0;
  uint64_t bytes_read[kRegions] = {}, bytes_written[kRegions] = {};
  uint64_t peak[kRegions] = {};     // one past the last byte that is read or written
  uint64_t touched[kRegions] = {};  // bytes that are read or written
  uint64_t unwritten = 0;           // bytes that are read though nothing has written them
  uint64_t hazards = 0;             // pairs of operations
};

// The same of one operation.
struct OperationFigures {
  uint64_t macs = 0;
  uint64_t bytes_read[kRegions] = {}, bytes_written[kRegions] = {};
};

// Follows the accesses of a program while it executes.
//
// Reads of what nothing has written: region 0 and the inputs count as written, all else as new in each execution.
// Results that nothing has written are found at the end. What an operation has written before, for another tensor in
// the same place, counts as written too. What a DMA copies is as written as its source.
//
// Hazards: operations of the NPU ("kernels") begin one after the other, and so do DMAs, both beside each other.
// - A DMA is ordered with kernels only by KERNEL_WAIT, with other DMAs and with kernels after it only by DMA_WAIT.
//   At most two kernels and one (U55), two (U65) or four (U85) DMAs are under way at a time.
// - Of two kernels, block i of the later one may begin while the last block but j of the one before is not yet
//   written, where i + j < BLOCKDEP. Reads come before writes in each block, so that only what is read can be old.
//   Blocks are counted as they lie in the OFM, those of the later one times the blocks of its IFM's channels. Of an
//   output that is transposed or reversed, each block counts as all of it. A block reads what all of its kernel
//   covers, however high that is. Vela's legacy core takes a kernel of more than 32 rows for one of 32 there
//   (calc_blockdep gives get_ifm_block_size the largest block of an OFM as the largest part of a kernel), so that a
//   DEPTHWISE of 33 rows, which it makes of MEAN too, begins early. It also takes the depth of the OFM of a REDUCE_SUM
//   for that of a block of its IFM (get_ifm_ofm_block_depth), and so counts a block for each channel. These are Vela's
//   mistakes, as its new core counts all rows (CalcIFMJobShape) and, from the BLOCKDEP that it writes, all channels.
// - U55 with 32 and 64 MACs: a kernel without a table is written over all tables, and so takes part in both.
class AccessChecker {
 public:
  // Makes room, so that executing does not. `weights`: bytes of region 0. `fatal_findings`: findings that end the
  // execution; others are counted.
  void prepare(const Configuration& npu, const NpuState& state, size_t weights, size_t operations,
               std::vector<Span> inputs, std::vector<Span> outputs, uint32_t fatal_findings);

  void begin();
  // Before operation `index` runs.
  Status check(const Operation& op, size_t index, const NpuState& state);
  // After the last one.
  Status check_outputs();

  Figures figures();
  const OperationFigures& operation(size_t index) const { return operations_[index]; }

 private:
  // The bytes of all accesses of a kind lie in these.
  struct Extent {
    int64_t start = INT64_MAX, end = 0;

    void add(int64_t from, int64_t to);
    bool overlaps(const Extent& other) const { return start < other.end && other.start < end; }
  };
  struct InFlight {
    const Operation* op = nullptr;
    Extent read[kCheckedRegions], written[kCheckedRegions];
  };
  // Operations under way, the oldest first.
  struct Queue {
    static constexpr int kCapacity = 4;
    InFlight entries[kCapacity];
    int count = 0, limit = 0;

    void keep_newest(int newest);
    void push(const InFlight& entry);
  };

  Status record_access(Operand operand, int region, int64_t start, int64_t end);
  void copy_state(int region, int64_t target);
  Status check_dependencies(const InFlight& newer, const NpuState& state);
  Status check_pair(const InFlight& older, const InFlight& newer, const NpuState& state);
  Status check_blocks(const Operation& older, const Operation& newer, const NpuState& state);
  int64_t find_overlap(const Operation& older, bool older_writes, const Operation& newer, bool newer_writes, int region,
                       const NpuState& state);
  Status report(Finding finding, const char* reason, int64_t first, int64_t second, int64_t third);

  Shadow written_[kCheckedRegions], accessed_[kCheckedRegions], marks_[kCheckedRegions];
  std::vector<Span> inputs_, outputs_;
  std::vector<OperationFigures> operations_;
  uint32_t fatal_findings_ = 0;
  Figures figures_;
  OperationFigures* current_ = nullptr;
  InFlight entry_;
  Span source_;  // of the row that a DMA copies
  Queue kernels_, dmas_;
};

}  // namespace arm_runtime::npu
