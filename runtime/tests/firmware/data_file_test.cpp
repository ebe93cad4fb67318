// SPDX-License-Identifier: Apache-2.0
//
// Reads a data file unchanged, truncated at each length, and with bits of each byte flipped. Sanitizers report reads
// outside of the file.
//
//   data_file_test FILE       prints the keys and sizes of the unchanged file
#include <executorch/runtime/platform/runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "firmware/data_file.h"

namespace {

using arm_runtime::DataFile;
using executorch::runtime::Error;

void check(bool ok, const char* what) {
  if (!ok) {
    std::fprintf(stderr, "data_file_test: %s\n", what);
    std::exit(1);
  }
}

// Loads a heap copy of exactly the file's size, so that the sanitizer detects reads beyond its end, and reads all data.
// Returns the sum of the bytes, so that the compiler keeps the reads.
unsigned read_all(const std::string& content, bool* loaded) {
  const std::vector<uint8_t> copy(content.begin(), content.end());
  DataFile file;
  *loaded = file.load(copy.data(), copy.size()) == Error::Ok;
  unsigned sum = 0;
  for (uint32_t i = 0; i < *file.get_num_keys(); ++i) {
    const auto data = file.get_data(*file.get_key(i));
    check(data.ok(), "get_data of a listed key fails");
    for (size_t k = 0; k < data->size(); ++k) {
      sum += static_cast<const uint8_t*>(data->data())[k];
    }
  }
  return sum;
}

int test(const char* path) {
  executorch::runtime::runtime_init();
  std::ifstream stream(path, std::ios::binary);
  const std::string content(std::istreambuf_iterator<char>(stream), {});
  bool loaded = false;
  read_all(content, &loaded);
  check(loaded, "load refuses a copy of the file");
  DataFile file;
  check(file.load(reinterpret_cast<const uint8_t*>(content.data()), content.size()) == Error::Ok,
        "load refuses the file");
  for (uint32_t i = 0; i < *file.get_num_keys(); ++i) {
    const char* key = *file.get_key(i);
    const auto data = file.get_data(key);
    std::vector<char> into(data->size());
    check(file.load_data_into(key, into.data(), into.size()) == Error::Ok, "load_data_into fails");
    check(std::memcmp(into.data(), data->data(), into.size()) == 0, "load_data_into copies other bytes");
    check(file.load_data_into(key, into.data(), into.size() + 1) == Error::InvalidArgument,
          "load_data_into accepts more bytes than the data has");
    std::printf("%s %zu\n", key, data->size());
  }
  check(file.get_data("none").error() == Error::NotFound, "get_data of an unknown key must return NotFound");
  check(file.get_tensor_layout("none").error() == Error::NotFound,
        "get_tensor_layout of an unknown key must return NotFound");
  check(file.get_key(1000).error() == Error::InvalidArgument,
        "get_key of an index out of range must return InvalidArgument");
  for (size_t length = 0; length < content.size(); ++length) {
    read_all(content.substr(0, length), &loaded);
    check(!loaded || length + 128 > content.size(), "a truncated file is accepted");
  }
  for (size_t at = 0; at < content.size(); ++at) {
    for (const int bit : {0, 3, 7}) {
      std::string changed = content;
      changed[at] = static_cast<char>(changed[at] ^ 1 << bit);
      read_all(changed, &loaded);
    }
  }
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  try {
    return test(arguments[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "data_file_test: %s\n", error.what());
    return 1;
  }
}
