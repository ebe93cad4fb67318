// SPDX-License-Identifier: Apache-2.0
// A VGF file, prepared for execution on a device.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backends/vgf/vgf_file.h"
#include "backends/vgf/vulkan_device.h"
#include "common/executorch.h"

namespace arm_runtime {

/// Pipelines, memory and a recorded command buffer of a VGF file. Not thread-safe.
class VgfProgram {
 public:
  explicit VgfProgram(std::shared_ptr<VulkanDevice> device) : device_(std::move(device)) {}
  VgfProgram(const VgfProgram&) = delete;
  VgfProgram& operator=(const VgfProgram&) = delete;
  ~VgfProgram();

  /// Creates all objects that running `file` needs. Afterwards, neither `file` nor its payload is needed. Call this
  /// function once. The destructor also frees the objects of a failed call. Returns NotSupported if a tensor exceeds
  /// the device's limits, and the corresponding error if a Vulkan function fails.
  Error prepare(const VgfFile& file);

  /// An input or output. `mapped` is the address at which the CPU accesses its memory on the device.
  struct Port {
    ScalarType scalar_type;
    size_t nbytes;
    uint8_t* mapped;
  };
  const std::vector<Port>& inputs() const { return inputs_; }
  const std::vector<Port>& outputs() const { return outputs_; }

  /// Waits for the end of a run that has timed out, if there is one. Until then, the device uses the memory of the
  /// inputs.
  Error wait_for_last_run();

  /// Runs the model on the memory of the inputs and writes the memory of the outputs. Requires that wait_for_last_run()
  /// has returned Ok.
  Error run();

  /// Waits for the end of the program's last run and destroys the program. If the wait times out, or fails for another
  /// reason than the loss of the device, the program is never destroyed, because the device may still use its memory.
  static void retire(std::unique_ptr<VgfProgram> program);

 private:
  struct Tensor {
    VkTensorARM tensor = VK_NULL_HANDLE;
    VkTensorViewARM view = VK_NULL_HANDLE;
    VkDeviceMemory memory = VK_NULL_HANDLE;
    uint8_t* mapped = nullptr;
  };
  struct Segment {
    VkShaderModule module = VK_NULL_HANDLE;
    std::vector<VkDescriptorSetLayout> set_layouts;
    VkPipelineLayout layout = VK_NULL_HANDLE;
    VkPipeline pipeline = VK_NULL_HANDLE;
    VkDataGraphPipelineSessionARM session = VK_NULL_HANDLE;
    std::vector<VkDeviceMemory> memory;
    VkDescriptorPool pool = VK_NULL_HANDLE;
    std::vector<VkDescriptorSet> sets;
  };

  Error check_limits(const VgfFile& file) const;
  Error make_tensors(const VgfFile& file);
  Error make_tensor(const VgfTensor& source, uint32_t index, VkMemoryPropertyFlags required,
                    VkMemoryPropertyFlags preferred);
  Error map_tensor(Tensor* tensor, VkMemoryPropertyFlags properties);
  Error make_segment(const VgfFile& file, const VgfSegment& source);
  Error make_layouts(const VgfSegment& source, Segment* segment);
  Error make_pipeline(const VgfFile& file, const VgfSegment& source, Segment* segment);
  Error make_session(Segment* segment);
  Error bind_session_memory(const VkDataGraphPipelineSessionBindPointRequirementARM& point, Segment* segment);
  Error make_sets(const VgfSegment& source, Segment* segment);
  Error record();
  void barrier(VkPipelineStageFlags2 stage, VkAccessFlags2 access) const;
  void destroy(Segment* segment) const;

  std::shared_ptr<VulkanDevice> device_;
  std::vector<Tensor> tensors_;
  std::vector<Segment> segments_;
  std::vector<Port> inputs_;
  std::vector<Port> outputs_;
  // Mapped memory that is not coherent, so that it needs flushes and invalidations.
  std::vector<VkMappedMemoryRange> non_coherent_;
  VkCommandPool command_pool_ = VK_NULL_HANDLE;
  VkCommandBuffer commands_ = VK_NULL_HANDLE;
  VkFence fence_ = VK_NULL_HANDLE;
  bool pending_ = false;  // the device may still be executing commands_
};

}  // namespace arm_runtime
