// SPDX-License-Identifier: Apache-2.0
// What a SPIR-V graph module expects from outside, read so that a VGF file can be checked against its own
// modules.
//
// Vulkan drivers may trust their SPIR-V and the descriptions that come with it. A payload comes from a file:
// tables that do not agree with the module would let the driver read and write beyond the tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace arm_runtime {

/// The type of a tensor in a SPIR-V module.
struct SpirvTensor {
  /// Bytes of an element; a boolean takes 1.
  uint32_t element_size = 0;
  bool is_float = false;
  std::vector<int64_t> shape;
};

/// A tensor that the graph takes from a descriptor, or writes to one.
struct SpirvResource {
  uint32_t set = 0;
  uint32_t binding = 0;
  SpirvTensor tensor;
};

/// A tensor that the pipeline is created with.
struct SpirvConstant {
  uint32_t id = 0;
  SpirvTensor tensor;
};

struct SpirvGraph {
  std::vector<SpirvResource> resources;
  std::vector<SpirvConstant> constants;
};

/// Reads the graph with the entry point `name` from a module of `word_count` words.
///
/// Returns null on success, and otherwise what is wrong with the module. Checked are the lengths of all
/// instructions, and of types, constants and the graph's operations that their ids name what they must. What
/// an operation does with its operands is left to the driver.
const char* read_spirv_graph(const uint32_t* words, size_t word_count, std::string_view name, SpirvGraph* graph);

}  // namespace arm_runtime
