// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/access.h"
#include "emulator/npu_state.h"
#include "emulator/shadow_memory.h"

namespace arm_runtime::npu {

// Kinds of errors that the checker finds, as bits.
enum Finding : uint32_t { kUninitialized = 1, kHazard = 2 };

// Statistics of one execution. If an error ended the execution, they cover the operations up to the one with the
// error. For each operation, a byte of an operand counts once, even if hardware fetches it several times.
struct ExecutionStatistics {
  uint64_t macs = 0;
  uint64_t bytes_read[kRegions] = {}, bytes_written[kRegions] = {};
  uint64_t peak[kRegions] = {};     // end offset of the last accessed byte
  uint64_t touched[kRegions] = {};  // number of distinct accessed bytes
  uint64_t uninitialized = 0;       // number of uninitialized bytes that operations read or outputs contain
  uint64_t hazards = 0;             // number of pairs of operations with a hazard
};

// Statistics of one operation.
struct OperationStatistics {
  uint64_t macs = 0;
  uint64_t bytes_read[kRegions] = {}, bytes_written[kRegions] = {};
};

// Checks the memory accesses of a program during execution: reads of uninitialized memory, and data hazards.
//
// Uninitialized memory: at the start of each execution, only region 0 and the inputs count as written. At the end, the
// checker tests that the outputs are written. A byte counts as written even if an earlier operation wrote it for
// another tensor at the same address. A DMA copies the written state together with the bytes.
//
// Hazards: the NPU starts operations other than DMAs ("kernels") in order, and DMAs in order. The two queues run in
// parallel.
// - Only KERNEL_WAIT orders a DMA after kernels. Only DMA_WAIT orders DMAs and kernels after a DMA. At most two kernels
//   and one (U55), two (U65) or four (U85) DMAs are in flight.
// - Of two consecutive kernels, block i (from 0) of the later one may run in parallel with the last BLOCKDEP - i blocks
//   of the earlier one. A block reads before it writes. Therefore, the only conflict is a read of bytes that the
//   earlier kernel has not written yet. Blocks are numbered in the order in which the OFM is computed. If the later
//   kernel sums channels, i counts steps: an OFM block has a step for each block of IFM channels. If the output of the
//   earlier kernel is transposed or reversed, the checker assumes that each of its blocks writes the whole output. A
//   block reads all IFM rows that its convolution window covers.
// - On U55 with 32 and 64 MACs, a kernel without a table overwrites all tables. The two rules above treat this as a
//   write of the tables.
//
// Two bugs of Vela's legacy core violate the rule for consecutive kernels. First, the core computes the rows that a
// block reads as if the window had at most 32 rows: calc_blockdep passes the largest OFM block, which has 32 rows, to
// get_ifm_block_size as the maximum size of a sub-kernel. A DEPTHWISE with a window of 33 rows therefore starts too
// early. This also affects MEAN, which the core lowers to DEPTHWISE. Second, the core uses the OFM depth of a
// REDUCE_SUM, which is 1, as the depth of its IFM block (get_ifm_ofm_block_depth), and so counts one IFM block for each
// channel. Vela's new core has neither bug: CalcIFMJobShape counts all rows, and the BLOCKDEP values that the core
// writes show that it counts all channels.
class AccessChecker {
 public:
  // Allocates all memory that the checks need during execution. `weights` is the size of region 0 in bytes. A finding
  // in `fatal_findings` ends an execution; other findings are only counted.
  void prepare(const Configuration& npu, const NpuState& state, size_t weights, size_t operations,
               std::vector<ByteRange> inputs, std::vector<ByteRange> outputs, uint32_t fatal_findings);

  // Resets the state and the statistics for a new execution.
  void begin();
  // Checks operation `index` before it runs.
  Status check(const Operation& op, size_t index, const NpuState& state);
  // Checks the outputs after the last operation.
  Status check_outputs();

  ExecutionStatistics statistics();
  const OperationStatistics& operation(size_t index) const { return operations_[index]; }

 private:
  // Smallest range of bytes that contains all reads, or all writes, of an operation in a region.
  struct Extent {
    int64_t start = INT64_MAX, end = 0;

    void add(int64_t from, int64_t to);
    bool overlaps(const Extent& other) const { return start < other.end && other.start < end; }
  };
  struct InFlight {
    const Operation* op = nullptr;
    Extent read[kCheckedRegions], written[kCheckedRegions];
  };
  // Operations in flight, starting with the oldest.
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

  ShadowMemory written_[kCheckedRegions], accessed_[kCheckedRegions], marks_[kCheckedRegions];
  std::vector<ByteRange> inputs_, outputs_;
  std::vector<OperationStatistics> operations_;
  uint32_t fatal_findings_ = 0;
  ExecutionStatistics statistics_;
  OperationStatistics* current_ = nullptr;
  InFlight entry_;
  ByteRange source_;  // the row that a DMA copies
  Queue kernels_, dmas_;
};

}  // namespace arm_runtime::npu
