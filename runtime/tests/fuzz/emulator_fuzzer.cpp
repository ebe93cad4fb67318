// SPDX-License-Identifier: Apache-2.0
// Loads and executes damaged Ethos-U programs. An input consists of the sizes of the command stream and of the scratch
// memory (uint32, little endian), the stream, and the weights.
// Build: clang++-14 -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Iruntime
//        runtime/tests/fuzz/emulator_fuzzer.cpp runtime/emulator/*.cpp
// Run:   ./a.out -max_len=6000 new/ programs/ runtime/tests/fuzz/emulator_corpus
#include <cstring>
#include <vector>

#include "emulator/program.h"

using arm_runtime::npu::Bytes;
using arm_runtime::npu::kRegions;
using arm_runtime::npu::Program;

namespace {

// Programs with more work() are not executed: a damaged program may be valid and run for hours.
constexpr uint64_t kMaxWork = uint64_t{1} << 22;
constexpr uint32_t kMaxScratch = 1 << 20;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t header[2];
  if (size < sizeof(header)) {
    return 0;
  }
  std::memcpy(header, data, sizeof(header));
  data += sizeof(header);
  size -= sizeof(header);
  if (size == 0 || header[0] > size || header[1] > kMaxScratch) {
    return 0;
  }
  // Separate heap blocks, so that sanitizers see accesses beyond their ends.
  std::vector<uint8_t> stream(data, data + header[0]);
  std::vector<uint8_t> memory[kRegions];
  memory[0].assign(data + header[0], data + size);
  memory[1].resize(header[1]);
  uint64_t sizes[kRegions];
  uint8_t* bases[kRegions];
  for (int i = 0; i < kRegions; ++i) {
    sizes[i] = memory[i].size();
    bases[i] = memory[i].data();
  }
  Program program;
  const Bytes weights{memory[0].data(), memory[0].size()};
  const auto status = program.load(stream.data(), stream.size(), weights, sizes);
  char text[160];
  status.describe(text, sizeof(text));
  if (status.ok() && program.work() < kMaxWork) {
    program.enable_access_checker({{1, 0, 64}}, {{1, 64, 128}}, data[0] & 3u);
    program.execute(bases);
  }
  return 0;
}
