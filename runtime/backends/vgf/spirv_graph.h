// SPDX-License-Identifier: Apache-2.0
// Reads the interface of a SPIR-V graph module, to check a VGF file against its modules.
//
// A Vulkan driver need not check a SPIR-V module or the tensors that descriptors bind to it. If the tables of a damaged
// payload disagreed with its module, the driver could access memory beyond the tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace arm_runtime {

/// Type of a tensor in a SPIR-V module.
struct SpirvTensor {
  /// Bytes of an element; 1 for booleans.
  uint32_t element_size = 0;
  bool is_float = false;
  std::vector<int64_t> shape;
};

/// An input or output of the graph, which a descriptor binds.
struct SpirvResource {
  uint32_t set = 0;
  uint32_t binding = 0;
  SpirvTensor tensor;
};

/// A constant tensor of the pipeline.
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
/// Returns null on success, otherwise the reason why the module is damaged. Checks the lengths of all instructions,
/// that constants and graph operations refer to definitions of the right kind, and the types of the graph's inputs,
/// outputs and constants. Does not check the number and the types of an operation's operands, nor the operands of
/// OpCompositeConstruct and OpCompositeExtract: these checks are left to the Vulkan driver.
const char* read_spirv_graph(const uint32_t* words, size_t word_count, std::string_view name, SpirvGraph* graph);

}  // namespace arm_runtime
