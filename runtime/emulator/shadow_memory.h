// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace arm_runtime::npu {

// Shadow memory: one bit for each byte of a region. Bytes outside of the region are ignored; other checks report them.
class ShadowMemory {
 public:
  void resize(uint64_t size) {
    size_ = static_cast<int64_t>(size);
    words_.assign(static_cast<size_t>((size_ + 63) / 64), 0);
  }
  void fill(bool value) { std::fill(words_.begin(), words_.end(), value ? ~uint64_t{0} : 0); }
  void set(int64_t start, int64_t end) {
    each(start, end, [](uint64_t* word, uint64_t mask, int64_t) { return *word |= mask, false; });
  }
  void clear(int64_t start, int64_t end) {
    each(start, end, [](uint64_t* word, uint64_t mask, int64_t) { return *word &= ~mask, false; });
  }
  // Returns the offset of the first byte in [start, end) whose bit is `value`, or -1.
  int64_t first(int64_t start, int64_t end, bool value) {
    int64_t found = -1;
    each(start, end, [&](const uint64_t* word, uint64_t mask, int64_t at) {
      const uint64_t bits = (value ? *word : ~*word) & mask;
      found = bits != 0 ? at + __builtin_ctzll(bits) : -1;
      return bits != 0;
    });
    return found;
  }
  int64_t count(int64_t start, int64_t end) {
    int64_t sum = 0;
    each(start, end, [&](const uint64_t* word, uint64_t mask, int64_t) {
      sum += __builtin_popcountll(*word & mask);
      return false;
    });
    return sum;
  }
  int64_t size() const { return size_; }

 private:
  // Calls `visit` for each word until `visit` returns true. Arguments are the word, the mask of its bits in
  // [start, end), and the offset of the byte that belongs to its lowest bit.
  template <typename Visit>
  void each(int64_t start, int64_t end, Visit visit) {
    start = std::max<int64_t>(start, 0);
    end = std::min(end, size_);
    while (start < end) {
      const int64_t word = start >> 6, from = start & 63, to = std::min<int64_t>(end - (word << 6), 64);
      const uint64_t mask = (~uint64_t{0} >> (64 - (to - from))) << from;
      if (visit(words_.data() + word, mask, word << 6)) {
        return;
      }
      start = (word + 1) << 6;
    }
  }

  std::vector<uint64_t> words_;
  int64_t size_ = 0;
};

}  // namespace arm_runtime::npu
