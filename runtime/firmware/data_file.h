// SPDX-License-Identifier: Apache-2.0
// A data file (.ptd) in memory: the named data of a program outside the .pte. DataFile allocates no memory; get_data()
// returns views into the file.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "common/executorch.h"
#include "common/little_endian.h"
#include "common/log.h"

namespace arm_runtime {

// Named data of a file in ExecuTorch's FlatTensor format ("FT01"). The file must stay in memory.
class DataFile final : public executorch::runtime::NamedDataMap {
 public:
  DataFile() = default;

  // Reads and validates a file. Returns InvalidProgram, with the reason in the log, if the file is damaged or has
  // another format.
  Error load(const uint8_t* data, size_t size) {
    data_ = data;
    size_ = size;
    count_ = 0;
    if (!in_bounds(0, kHeaderAt + kHeaderSize) || std::memcmp(data + 4, "FT01", 4) != 0 ||
        std::memcmp(data + kHeaderAt, "FH01", 4) != 0) {
      return failure("not a data file (.ptd)");
    }
    base_ = read_u64(data + kHeaderAt + 24);
    const size_t root = read_u32(data);
    segments_ = vector(field(root, 1));
    entries_ = vector(field(root, 2));
    if (segments_ == 0 || entries_ == 0) {
      return failure("a damaged data file: its tables are outside the file");
    }
    const uint32_t count = uint32_at(entries_);
    for (uint32_t i = 0; i < count; ++i) {
      Entry entry;
      if (!read(i, &entry)) {
        return failure("a damaged or truncated data file");
      }
    }
    count_ = count;
    return Error::Ok;
  }

  Result<FreeableBuffer> get_data(std::string_view key) const override {
    for (uint32_t i = 0; i < count_; ++i) {
      Entry entry;
      if (read(i, &entry) && key == entry.key) {
        return FreeableBuffer(entry.data, entry.size, nullptr);
      }
    }
    return Error::NotFound;
  }
  // Data files of arm_recipes contain no tensor layouts.
  Result<const executorch::runtime::TensorLayout> get_tensor_layout(std::string_view) const override {
    return Error::NotFound;
  }
  Error load_data_into(std::string_view key, void* buffer, size_t size) const override {
    const auto found = get_data(key);
    if (!found.ok()) {
      return found.error();
    }
    if (found->size() < size) {
      return Error::InvalidArgument;
    }
    std::memcpy(buffer, found->data(), size);
    return Error::Ok;
  }
  Result<uint32_t> get_num_keys() const override { return count_; }
  Result<const char*> get_key(uint32_t index) const override {
    Entry entry;
    if (index >= count_ || !read(index, &entry)) {
      return Error::InvalidArgument;
    }
    return entry.key;
  }

 private:
  // The header after the flatbuffer's root and identifier: magic, length, offset and size of the flatbuffer, offset and
  // size of the segments.
  static constexpr size_t kHeaderAt = 8;
  static constexpr size_t kHeaderSize = 40;

  struct Entry {
    const char* key = nullptr;
    const uint8_t* data = nullptr;
    size_t size = 0;
  };

  static uint64_t read_u64(const uint8_t* data) { return uint64_t{read_u32(data + 4)} << 32 | read_u32(data); }

  static Error failure(const char* reason) {
    ET_LOG(Error, "%s: write or flash the .ptd of the program's export again", reason);
    return Error::InvalidProgram;
  }

  // Whether the file contains `count` bytes from the offset `at`.
  bool in_bounds(uint64_t at, uint64_t count) const { return at <= size_ && count <= size_ - at; }

  // The functions below read flatbuffers. A position is a byte offset in the file. Position 0 means that the item is
  // missing or outside the file. uint32_at(0) is 0.
  uint32_t uint32_at(size_t at) const { return at != 0 && in_bounds(at, 4) ? read_u32(data_ + at) : 0; }

  // Position of a field of the table at `table`.
  size_t field(size_t table, size_t index) const {
    const uint64_t vtable = uint64_t{table} - static_cast<uint64_t>(static_cast<int32_t>(uint32_at(table)));
    const uint64_t at = vtable + 4 + 2 * index;
    if (table == 0 || !in_bounds(vtable, 4) || !in_bounds(at, 2) || at + 2 > vtable + read_u16(data_ + vtable)) {
      return 0;
    }
    const size_t offset = read_u16(data_ + at);
    return offset != 0 && in_bounds(table + offset, 4) ? table + offset : 0;
  }

  // Position that the offset at `at` refers to.
  size_t dereference(size_t at) const {
    const uint32_t offset = uint32_at(at);
    return offset != 0 && in_bounds(uint64_t{at} + offset, 4) ? at + offset : 0;
  }

  // Position of the vector of 4-byte elements that the field at `at` refers to.
  size_t vector(size_t at) const {
    const size_t start = dereference(at);
    return start != 0 && in_bounds(start, 4 + 4 * uint64_t{uint32_at(start)}) ? start : 0;
  }

  size_t element(size_t vector, uint32_t index) const {
    return index < uint32_at(vector) ? dereference(vector + 4 + 4 * size_t{index}) : 0;
  }

  uint64_t uint64_at(size_t at) const { return at != 0 && in_bounds(at, 8) ? read_u64(data_ + at) : 0; }

  bool read(uint32_t index, Entry* entry) const {
    const size_t table = element(entries_, index);
    const size_t key = dereference(field(table, 0));
    const uint64_t length = uint32_at(key);
    if (key == 0 || !in_bounds(uint64_t{key} + 4, length + 1) || data_[key + 4 + length] != 0) {
      return false;
    }
    // Flatbuffers omit a field with the default value 0. field() then returns 0, and uint32_at() returns the value 0.
    const size_t segment = element(segments_, uint32_at(field(table, 1)));
    const uint64_t start = base_ + uint64_at(field(segment, 0));
    const uint64_t count = uint64_at(field(segment, 1));
    if (segment == 0 || start < base_ || !in_bounds(start, count)) {
      return false;
    }
    *entry = {reinterpret_cast<const char*>(data_ + key + 4), data_ + start, static_cast<size_t>(count)};
    return true;
  }

  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  uint64_t base_ = 0;
  size_t segments_ = 0;
  size_t entries_ = 0;
  uint32_t count_ = 0;
};

}  // namespace arm_runtime
