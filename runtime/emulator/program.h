// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "emulator/access_checker.h"
#include "emulator/command_stream.h"
#include "emulator/npu_state.h"

namespace arm_runtime::npu {

// A command stream, checked and decoded. Executing it neither allocates nor reads weights again.
class Program {
 public:
  // `sizes` are those of the regions that `execute` will be given; region 0 holds `weights`.
  Status load(const uint8_t* stream, size_t stream_size, Bytes weights, const uint64_t* sizes);

  // Runs all operations in the stream's order, over memory of the sizes that it was loaded with.
  Status execute(uint8_t* const* regions) { return execute(regions, 0, operations_.size()); }
  // The same in parts: operations [first, last).
  Status execute(uint8_t* const* regions, size_t first, size_t last);
  // Copies what an operation, the last one executed, has written; false if that is not `size` bytes.
  bool copy_result(size_t index, uint8_t* to, uint64_t size) const;
  // From now on, what is executed is watched.
  void check_accesses(std::vector<Span> inputs, std::vector<Span> outputs, uint32_t fatal_findings);
  AccessChecker* access_checker() { return checker_.get(); }

  const Configuration& configuration() const { return configuration_; }
  uint64_t commands() const { return commands_; }
  size_t operations() const { return operations_.size(); }
  const Operation& operation(size_t index) const { return operations_[index]; }
  // Elements that one execution multiplies, compares or moves.
  uint64_t work() const;
  // One past the last byte of a region that executing it touches, at most its size: what `execute` may be given.
  uint64_t reach(int region) const { return state_.regions[region].size; }

 private:
  // Constants that a DMA brings to another region before they are used.
  struct Copy {
    uint8_t region;
    int64_t target, length, source;
  };

  Status add_operation(const Command& command, const Registers& registers);
  void add_wait(const Command& command);
  Order take_order(const Registers& registers, const Operation& op);
  Status finish();
  Status run_operation(const Operation& operation);
  Status check_operation(const Operation& operation);
  Status check_map(const FeatureMap& map, const char* reason);
  void extend_reach(const Dma& dma);
  void extend_reach(int region, int128_t end);
  Status add_constants(const Registers& registers, Operation* operation);
  Status add_weights(const Registers& registers, Operation* operation);
  Status add_scales(const Registers& registers, Operation* operation);
  Status find_constant(uint32_t region, int64_t address, int64_t length, Bytes* bytes) const;

  Configuration configuration_;
  Bytes weights_;
  NpuState state_;
  std::vector<Operation> operations_;
  std::vector<Copy> copies_;
  Order order_;  // of the next operation
  Command stop_;
  uint64_t commands_ = 0;
  std::unique_ptr<AccessChecker> checker_;
  int64_t kept_accumulators_ = 0;  // accumulators that the last operation leaves
  uint64_t reach_[kRegions] = {};
  // By where they lie and how: stripes of an operator share them.
  std::map<std::vector<int64_t>, std::unique_ptr<std::vector<int16_t>>> decoded_weights_;
  std::map<std::vector<int64_t>, std::unique_ptr<std::vector<ChannelScale>>> decoded_scales_;
};

}  // namespace arm_runtime::npu
