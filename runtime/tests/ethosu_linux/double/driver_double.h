// SPDX-License-Identifier: Apache-2.0
// What tests set up in the double of the driver library, and what it records.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ethosu.hpp"

namespace driver_double {

using Bytes = std::vector<uint8_t>;

// The memory that the NPU sees: regions 0, 1, 3 and 4 of the command stream.
struct Regions {
  Bytes constants, intermediate, inputs, outputs;
};

// The calls that can be made to throw.
enum class Call {
  kNone,
  kOpen,
  kCapabilities,
  kNetwork,
  kBuffers,
  kWrite,
  kRead,
  kStart,
  kWait,
  kStatus,
  kCounters,
  kCloseInference,
  kCloseNetwork,
  kCloseDevice
};

struct Script {
  Call throws = Call::kNone;
  bool throws_no_exception_type = false;  // throws an int instead of an EthosU::Exception
  int signals = 0;                        // how many waits a signal interrupts
  bool times_out = false;
  EthosU::InferenceStatus status = EthosU::InferenceStatus::OK;
  EthosU::Capabilities capabilities{{8, EthosU::HardwareConfiguration::DeviceType::DIRECT}};
  std::function<void(Regions&)> npu = [](Regions&) {};  // what an inference does; it may change `outputs`
};

struct Record {
  std::vector<std::string> opened;  // device nodes
  std::vector<Bytes> networks;
  std::vector<size_t> buffers;   // sizes
  std::vector<Regions> started;  // each inference's memory before the NPU runs
  std::vector<int64_t> waits;    // timeouts in ns
  std::vector<uint32_t> events;  // of the last inference
  bool counts_cycles = false;
  int devices = 0, live_networks = 0, live_buffers = 0, inferences = 0;  // that exist now
};

// Both start anew with reset().
extern Script script;
extern Record record;
void reset();

}  // namespace driver_double
