// SPDX-License-Identifier: Apache-2.0
#include "fake_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace fake_driver {

Script script;
Record record;

void reset() {
  script = Script{};
  record = Record{};
}

namespace {

void throw_at(Call call) {
  if (script.throws != call) {
    return;
  }
  if (script.throws_int) {
    throw 1;  // NOLINT(bugprone-std-exception-baseclass): the test of catch (...)
  }
  throw EthosU::Exception("the fake driver was told to fail");
}

// Reads a buffer. The file position stays unchanged, as if the NPU read the buffer.
Bytes content(const EthosU::Buffer& buffer) {
  struct stat status{};
  if (buffer.getFd() < 0 || fstat(buffer.getFd(), &status) != 0) {
    return {};
  }
  Bytes bytes(static_cast<size_t>(status.st_size));
  if (pread(buffer.getFd(), bytes.data(), bytes.size(), 0) != status.st_size) {
    throw EthosU::Exception("pread failed");
  }
  return bytes;
}

}  // namespace
}  // namespace fake_driver

namespace EthosU {

using fake_driver::Call;
using fake_driver::content;
using fake_driver::record;
using fake_driver::script;
using fake_driver::throw_at;

Buffer::Buffer(size_t size) : fd_(memfd_create("ethosu-buffer", MFD_ALLOW_SEALING)) {
  // The driver refuses an empty buffer, and a buffer never grows.
  if (size == 0 || ftruncate(fd_, static_cast<off_t>(size)) != 0 || fcntl(fd_, F_ADD_SEALS, F_SEAL_GROW) != 0) {
    close(fd_);
    throw Exception("cannot make a buffer");
  }
  record.buffers.push_back(size);
  ++record.live_buffers;
}

Buffer::~Buffer() noexcept(false) {
  if (fd_ >= 0) {
    close(fd_);
    --record.live_buffers;
  }
}

size_t Buffer::read(char* destination, size_t size) {
  throw_at(Call::kRead);
  const ssize_t done = ::read(fd_, destination, size);
  if (done != static_cast<ssize_t>(size)) {
    throw Exception("read beyond the end of a buffer");
  }
  return size;
}

size_t Buffer::write(char* source, size_t size) {
  throw_at(Call::kWrite);
  const ssize_t done = ::write(fd_, source, size);
  if (done != static_cast<ssize_t>(size)) {
    throw Exception("write beyond the end of a buffer");
  }
  return size;
}

Device::Device(const char* device) {
  throw_at(Call::kOpen);
  record.opened.emplace_back(device);
  ++record.devices;
}

Device::~Device() noexcept(false) {
  --record.devices;
  throw_at(Call::kCloseDevice);
}

Capabilities Device::capabilities() const {
  throw_at(Call::kCapabilities);
  return script.capabilities;
}

std::vector<std::shared_ptr<Buffer>> Device::createBuffers(const std::vector<size_t>& sizes) {
  throw_at(Call::kBuffers);
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (size_t size : sizes) {
    buffers.push_back(std::make_shared<Buffer>(size));
  }
  return buffers;
}

Network::Network(const Device&, const unsigned char* data, size_t size) {
  throw_at(Call::kNetwork);
  record.networks.emplace_back(data, data + size);
  ++record.live_networks;
}

Network::~Network() noexcept(false) {
  --record.live_networks;
  throw_at(Call::kCloseNetwork);
}

void Inference::start(const std::vector<uint32_t>& counters, bool cycle_counter) {
  throw_at(Call::kStart);
  // The driver has 4 counters. It requires an output buffer, and uses only the first input and the first output buffer.
  if (counters.size() > 4 || ofm_.size() != 1 || ifm_.size() > 1) {
    throw Exception("wrong arguments");
  }
  fake_driver::Regions regions{content(*constant_), content(*intermediate_), {}, content(*ofm_[0])};
  if (!ifm_.empty()) {
    regions.inputs = content(*ifm_[0]);
  }
  record.started.push_back(regions);
  record.events = counters_ = counters;
  record.counts_cycles = counts_cycles_ = cycle_counter;
  script.npu(regions);
  const auto size = static_cast<ssize_t>(regions.outputs.size());
  if (pwrite(ofm_[0]->getFd(), regions.outputs.data(), regions.outputs.size(), 0) != size) {
    throw Exception("pwrite failed");
  }
  ++record.inferences;
}

Inference::~Inference() noexcept(false) {
  --record.inferences;
  throw_at(Call::kCloseInference);
}

bool Inference::wait(int64_t timeout_ns) const {
  record.waits.push_back(timeout_ns);
  if (script.signals > 0) {
    --script.signals;
    errno = EINTR;
    throw Exception("Failed to wait for ppoll event or signal");
  }
  throw_at(Call::kWait);
  return script.times_out;
}

// Returns 1000 times the number of each event.
const std::vector<uint32_t> Inference::getPmuCounters() const {
  throw_at(Call::kCounters);
  std::vector<uint32_t> values;
  for (const uint32_t event : counters_) {
    values.push_back(1000 * event);
  }
  return values;
}

uint64_t Inference::getCycleCounter() const {
  throw_at(Call::kCounters);
  return counts_cycles_ ? 12345678901 : 0;
}

InferenceStatus Inference::status() const {
  throw_at(Call::kStatus);
  return script.status;
}

}  // namespace EthosU
