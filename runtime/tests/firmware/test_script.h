// SPDX-License-Identifier: Apache-2.0
// Reader of the test script: what the firmware under test loads, calls, reads and writes. firmware.cpp describes its
// entries.
#pragma once

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

[[noreturn]] inline void fail(const char* what, const std::string& name, int number = 0) {
  std::printf("firmware: %s %s (%d)\n", what, name.c_str(), number);
  std::exit(1);
}

inline std::FILE* open(const std::string& name, const char* mode) {
  std::FILE* file = std::fopen(name.c_str(), mode);
  if (file == nullptr) {
    fail("cannot open", name);
  }
  return file;
}

// Reads the test script word by word.
class TestScript {
 public:
  bool next(std::string* word) {
    char text[128];
    const bool read = std::fscanf(file_, "%127s", text) == 1;
    *word = read ? text : "";
    return read;
  }
  std::string word() {
    std::string word;
    return next(&word) ? word : (fail("the test script is truncated", word), word);
  }
  int64_t number() { return std::strtoll(word().c_str(), nullptr, 10); }
  double real() { return std::strtod(word().c_str(), nullptr); }
  template <typename T>
  std::vector<T> numbers(size_t count) {
    std::vector<T> all;
    for (size_t i = 0; i < count; ++i) {
      all.push_back(static_cast<T>(number()));
    }
    return all;
  }

 private:
  std::FILE* file_ = open("method", "r");
};

// A tensor, with the memory of its sizes, dim order and strides.
class OwnTensor {
 public:
  explicit OwnTensor(TestScript* script)
      : type_(static_cast<executorch::aten::ScalarType>(script->number())),
        rank_(static_cast<size_t>(script->number())),
        sizes_(script->numbers<int32_t>(rank_)),
        order_(script->numbers<uint8_t>(rank_)),
        strides_(rank_, 1),
        impl_(type_, static_cast<ssize_t>(rank_), sizes_.data(), nullptr, order_.data(), strides_.data()) {
    for (size_t i = rank_; i-- > 1;) {
      strides_[order_[i - 1]] = strides_[order_[i]] * sizes_[order_[i]];
    }
  }
  OwnTensor(const OwnTensor&) = delete;

  // Allocates memory for the tensor.
  void allocate() {
    bytes_.resize(impl_.nbytes());
    set_data(bytes_.data());
  }
  void set_data(void* data) { impl_.set_data(data); }
  size_t nbytes() const { return impl_.nbytes(); }
  executorch::aten::Tensor tensor() { return executorch::aten::Tensor(&impl_); }

 private:
  executorch::aten::ScalarType type_;
  size_t rank_;
  std::vector<int32_t> sizes_;
  std::vector<uint8_t> order_;
  std::vector<int32_t> strides_;
  executorch::aten::TensorImpl impl_;
  std::vector<uint8_t> bytes_;
};
