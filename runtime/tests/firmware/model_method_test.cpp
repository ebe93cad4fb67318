// SPDX-License-Identifier: Apache-2.0
//
// Tests ModelMethod before load() and after a load() that failed. Argument: a .pte with a delegate whose backend is not
// linked. Prints failed checks.
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "firmware/model_method.h"

namespace {

using arm_runtime::ModelMethod;
using executorch::runtime::Error;

int failures = 0;

#define CHECK(condition) check(condition, __LINE__, #condition)

void check(bool holds, int line, const char* condition) {
  if (!holds) {
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, line, condition);
    ++failures;
  }
}

void check_unloaded(ModelMethod* method) {
  const int32_t sizes[] = {1};
  const uint8_t order[] = {0};
  const int8_t data[] = {0};
  CHECK(method->execute() == Error::InvalidState);
  CHECK(method->set_input(0, {executorch::aten::ScalarType::Char, 1, sizes, order}, data) == Error::InvalidState);
  CHECK(method->output(0).data() == nullptr);
  CHECK(method->output(0).empty());
}

}  // namespace

int main(int, char** arguments) {
  executorch::runtime::runtime_init();
  ModelMethod method;
  check_unloaded(&method);
  CHECK(method.pool_used() == 0);

  std::ifstream file(arguments[1], std::ios::binary);
  std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
  executorch::extension::BufferDataLoader loader(content.data(), content.size());
  const auto program = executorch::runtime::Program::load(&loader);
  CHECK(program.ok());
  std::vector<uint8_t> pool(1 << 16), planned(1 << 16);
  ModelMethod::Bytes memories[] = {{planned.data(), planned.size()}};
  CHECK(method.load(*program, "forward", {pool.data(), pool.size()}, {memories, 1}, nullptr) == Error::NotFound);
  check_unloaded(&method);
  return failures == 0 ? 0 : 1;
}
