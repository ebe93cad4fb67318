// SPDX-License-Identifier: Apache-2.0
// Reads damaged copies of a VGF file: each bit flipped, each shorter length, and values that make sizes overflow in
// each 32-bit word. Sanitizers end the program on reads beyond the payload.
//
// Usage: corrupted_file_test FILE. Prints the number of copies of each kind.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "backends/vgf/vgf_file.h"

namespace {

using executorch::runtime::Error;

// Whether read_vgf() accepts the first `length` bytes. They are copied to a heap block of exactly this length, so that
// a sanitizer reports reads beyond its end.
bool is_accepted(const std::vector<char>& bytes, size_t length) {
  const std::unique_ptr<char[]> copy(new char[length]);
  std::memcpy(copy.get(), bytes.data(), length);
  arm_runtime::VgfFile file;
  if (arm_runtime::read_vgf(copy.get(), length, &file) != Error::Ok) {
    return false;
  }
  // Read the data that a pipeline would use.
  volatile uint32_t sum = 0;
  for (const auto& segment : file.segments) {
    for (size_t word = 0; word < segment.word_count; ++word) {
      sum = sum + segment.code[word];
    }
    for (const auto& constant : segment.constants) {
      for (size_t byte = 0; byte < file.tensors[constant.tensor].nbytes; ++byte) {
        sum = sum + constant.data[byte];
      }
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream stream(argc > 1 ? argv[1] : "", std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  if (bytes.empty() || !is_accepted(bytes, bytes.size())) {
    std::printf("the undamaged file is refused\n");
    return 1;
  }
  size_t lengths = 0;
  for (size_t length = 0; length < bytes.size(); ++length) {
    lengths += is_accepted(bytes, length) ? 1 : 0;
  }
  size_t flips = 0;
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    flips += is_accepted(bytes, bytes.size()) ? 1 : 0;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
  size_t words = 0;
  for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
    for (const uint32_t value : {0U, 0x7FFFFFFFU, 0x80000000U, 0xFFFFFFF8U, 0xFFFFFFFFU}) {
      char saved[4];
      std::memcpy(saved, &bytes[at], 4);
      std::memcpy(&bytes[at], &value, 4);
      words += is_accepted(bytes, bytes.size()) ? 1 : 0;
      std::memcpy(&bytes[at], saved, 4);
    }
  }
  std::printf("read: %zu of %zu lengths, %zu of %zu flips, %zu of %zu words\n", lengths, bytes.size(), flips,
              bytes.size() * 8, words, bytes.size() / 4 * 5);
  return 0;
}
