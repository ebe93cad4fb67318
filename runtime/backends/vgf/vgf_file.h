// SPDX-License-Identifier: Apache-2.0
// Reads and checks a VGF file that is a sequence of SPIR-V graphs on tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/vgf/vulkan_functions.h"
#include "common/executorch.h"

namespace arm_runtime {

/// A packed tensor of the file: input, output, intermediate or constant.
struct VgfTensor {
  VkFormat format = VK_FORMAT_UNDEFINED;
  ScalarType scalar_type = ScalarType::Undefined;
  std::vector<int64_t> shape;
  size_t nbytes = 0;
  bool is_constant = false;
};

/// A constant of a segment's graph. The payload contains the data.
struct VgfConstant {
  uint32_t id = 0;
  /// Index of its tensor.
  uint32_t tensor = 0;
  const uint8_t* data = nullptr;
  /// Dimension with 2:4 sparsity, or -1.
  int64_t sparse_dimension = -1;
};

struct VgfBinding {
  uint32_t set = 0;
  uint32_t binding = 0;
  /// Index of the bound tensor.
  uint32_t tensor = 0;
};

struct VgfSegment {
  std::string name;
  std::string entry_point;
  /// SPIR-V, in the payload.
  const uint32_t* code = nullptr;
  size_t word_count = 0;
  std::vector<VgfBinding> bindings;
  std::vector<VgfConstant> constants;
};

struct VgfFile {
  std::vector<VgfTensor> tensors;
  std::vector<VgfSegment> segments;
  /// Indices of tensors, in the order of the delegate's arguments.
  std::vector<uint32_t> inputs;
  std::vector<uint32_t> outputs;
};

/// Reads the VGF file of `size` bytes at `data`. Afterwards, `file` contains pointers into the data.
///
/// Checks section bounds, indices and sizes, and that tables and SPIR-V modules agree. Returns, with the reason in
/// the log, InvalidArgument if `data` is not at a multiple of 8, DelegateInvalidCompatibility for a header that libvgf
/// does not accept (another version, or sections beyond the end of the file), InvalidProgram for other damage, and
/// NotSupported for contents that this backend does not execute (compute shaders, images, shared storage).
Error read_vgf(const void* data, size_t size, VgfFile* file);

}  // namespace arm_runtime
