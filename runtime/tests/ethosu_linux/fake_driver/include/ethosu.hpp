// SPDX-License-Identifier: Apache-2.0
// Fake of the driver library's header, written for this project: the declarations that the backend uses. Names and
// signatures are the same as in versions of ethos-u-linux-driver-stack that support Direct Drive.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace EthosU {

class Exception : public std::exception {
 public:
  explicit Exception(const char* message) : message_(message) {}
  const char* what() const throw() override { return message_.c_str(); }

 private:
  std::string message_;
};

struct HardwareConfiguration {
  enum class DeviceType { UNKNOWN, SUBSYSTEM, DIRECT };
  uint32_t macsPerClockCycle;
  DeviceType type;
};

struct Capabilities {
  HardwareConfiguration hwCfg;
};

// An anonymous file. read() and write() move the file position, as in the driver library.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size);
  virtual ~Buffer() noexcept(false);
  size_t read(char* destination, size_t size);
  size_t write(char* source, size_t size);
  int getFd() const { return fd_; }

 private:
  int fd_ = -1;
};

class Device {
 public:
  explicit Device(const char* device = "/dev/ethosu0");
  virtual ~Device() noexcept(false);
  Capabilities capabilities() const;
  std::vector<std::shared_ptr<Buffer>> createBuffers(const std::vector<size_t>& sizes);
};

class Network {
 public:
  Network(const Device& device, const unsigned char* data, size_t size);
  virtual ~Network() noexcept(false);
};

enum class InferenceStatus { OK, ERROR, RUNNING, REJECTED, ABORTED, ABORTING, PENDING };

class Inference {
 public:
  template <typename Iterator, typename Counters>
  Inference(const std::shared_ptr<Network>& network, const Iterator& ifm_begin, const Iterator& ifm_end,
            const Iterator& ofm_begin, const Iterator& ofm_end, const std::shared_ptr<Buffer>& intermediate,
            const std::shared_ptr<Buffer>& constant, const Counters& counters, bool cycle_counter)
      : network_(network), intermediate_(intermediate), constant_(constant) {
    std::copy(ifm_begin, ifm_end, std::back_inserter(ifm_));
    std::copy(ofm_begin, ofm_end, std::back_inserter(ofm_));
    start({counters.begin(), counters.end()}, cycle_counter);
  }
  virtual ~Inference() noexcept(false);
  bool wait(int64_t timeout_ns = -1) const;
  InferenceStatus status() const;
  const std::vector<uint32_t> getPmuCounters() const;
  uint64_t getCycleCounter() const;

 private:
  void start(const std::vector<uint32_t>& counters, bool cycle_counter);

  std::shared_ptr<Network> network_;
  std::vector<std::shared_ptr<Buffer>> ifm_, ofm_;
  std::shared_ptr<Buffer> intermediate_, constant_;
  std::vector<uint32_t> counters_;
  bool counts_cycles_ = false;
};

}  // namespace EthosU
