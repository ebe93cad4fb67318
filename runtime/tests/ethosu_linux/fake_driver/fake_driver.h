// SPDX-License-Identifier: Apache-2.0
// Configuration and records of the fake of the driver library.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ethosu.hpp"

namespace fake_driver {

using Bytes = std::vector<uint8_t>;

// The NPU's memory: regions 0, 1, 3 and 4 of the command stream.
struct Regions {
  Bytes constants, intermediate, inputs, outputs;
};

// Calls of the library that can throw, see Script::throws.
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

// Behaviour of the fake.
struct Script {
  Call throws = Call::kNone;
  bool throws_int = false;  // throws an int instead of an EthosU::Exception
  int signals = 0;          // number of waits that a signal interrupts
  bool times_out = false;
  EthosU::InferenceStatus status = EthosU::InferenceStatus::OK;
  EthosU::Capabilities capabilities{{8, EthosU::HardwareConfiguration::DeviceType::DIRECT}};
  std::function<void(Regions&)> npu = [](Regions&) {};  // behaviour of an inference; it may change `outputs`
};

// Calls that the fake has received.
struct Record {
  std::vector<std::string> opened;  // device nodes
  std::vector<Bytes> networks;
  std::vector<size_t> buffers;   // sizes
  std::vector<Regions> started;  // memory of each inference before the run
  std::vector<int64_t> waits;    // timeouts in ns
  std::vector<uint32_t> events;  // of the last inference
  bool counts_cycles = false;
  int devices = 0, live_networks = 0, live_buffers = 0, inferences = 0;  // number of objects that exist now
};

extern Script script;
extern Record record;
// Sets `script` and `record` to their initial values.
void reset();

}  // namespace fake_driver
