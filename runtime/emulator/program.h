// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "emulator/access_checker.h"
#include "emulator/command_stream.h"
#include "emulator/npu_state.h"

namespace arm_runtime::npu {

// A validated and decoded command stream. Its execution neither allocates memory nor decodes weights.
class Program {
 public:
  // Validates and decodes a stream. `sizes` are the maximum sizes of the regions; region 0 holds `weights`.
  Status load(const uint8_t* stream, size_t stream_size, Bytes weights, const uint64_t* sizes);

  // Runs all operations in order. Region i must have at least required_size(i) bytes.
  Status execute(uint8_t* const* regions) { return execute(regions, 0, operations_.size()); }
  // Runs operations [first, last).
  Status execute(uint8_t* const* regions, size_t first, size_t last);
  // Copies the output of operation `index`, which must be the operation that was executed last. Returns false if the
  // output does not have `size` bytes.
  bool copy_output(size_t index, uint8_t* to, uint64_t size) const;
  // Enables the access checker for all following executions.
  void enable_access_checker(std::vector<ByteRange> inputs, std::vector<ByteRange> outputs, uint32_t fatal_findings);
  AccessChecker* access_checker() { return checker_.get(); }

  const Configuration& configuration() const { return configuration_; }
  uint64_t command_count() const { return commands_; }
  size_t operation_count() const { return operations_.size(); }
  const Operation& operation(size_t index) const { return operations_[index]; }
  // Returns the sum of the work() of all operations.
  uint64_t work() const;
  // Returns the size in bytes that a region must have: an upper bound of the end of all accesses during execution.
  // Weights and scales in region 0, which load() decodes, do not count.
  uint64_t required_size(int region) const { return state_.regions[region].size; }

 private:
  // A DMA that copies one row from region 0. The row may contain weights or scales of later operations.
  struct Copy {
    uint8_t region;
    int64_t target, length, source;
  };

  Status add_operation(const Command& command, const Registers& registers);
  void add_wait(const Command& command);
  SchedulingInfo take_scheduling(const Registers& registers, const Operation& op);
  Status finish();
  Status run_operation(const Operation& operation);
  Status check_operation(const Operation& operation);
  Status check_constants(const Operation& operation) const;
  Status check_map(const FeatureMap& map, const char* reason);
  void extend_required_size(const Dma& dma);
  void extend_required_size(int region, int128_t end);
  Status add_constants(const Registers& registers, Operation* operation);
  Status add_weights(const Registers& registers, Operation* operation);
  Status add_scales(const Registers& registers, Operation* operation);
  Status find_constant(uint32_t region, int64_t address, int64_t length, Bytes* bytes);
  Status slice_weights(int64_t from, int64_t length, Bytes* bytes) const;
  Bytes join(const std::vector<Bytes>& parts);

  Configuration configuration_;
  Bytes weights_;
  NpuState state_;
  std::vector<Operation> operations_;
  std::vector<Copy> copies_;
  std::set<std::vector<uint8_t>> joined_constants_;  // constants that DMAs copy from several places; see join()
  SchedulingInfo scheduling_;                        // scheduling information of the next operation
  Command stop_;
  uint64_t commands_ = 0;
  std::unique_ptr<AccessChecker> checker_;
  int64_t kept_accumulators_ = 0;  // number of accumulators that the last operation leaves
  uint64_t required_sizes_[kRegions] = {};
  // The keys contain the location and layout of the encoded data, so that stripes of one operator share decoded weights
  // and scales.
  std::map<std::vector<int64_t>, std::unique_ptr<std::vector<int16_t>>> decoded_weights_;
  std::map<std::vector<int64_t>, std::unique_ptr<std::vector<ChannelScale>>> decoded_scales_;
};

}  // namespace arm_runtime::npu
