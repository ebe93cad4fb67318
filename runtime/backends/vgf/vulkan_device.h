// SPDX-License-Identifier: Apache-2.0
// The Vulkan device that all programs of the process share.
#pragma once

#include <memory>
#include <mutex>

#include "backends/vgf/vulkan_functions.h"
#include "common/executorch.h"

namespace arm_runtime {

/// A device of the application for the backend to run on.
struct VulkanHandles {
  PFN_vkGetInstanceProcAddr get_instance_proc_addr;
  /// Made for Vulkan 1.3 or newer.
  VkInstance instance;
  VkPhysicalDevice physical_device;
  /// Made with VK_ARM_tensors, VK_ARM_data_graph and the features synchronization2, tensors, dataGraph,
  /// dataGraphShaderModule.
  VkDevice device;
  /// Of a family with VK_QUEUE_DATA_GRAPH_BIT_ARM.
  VkQueue queue;
  uint32_t queue_family;
  /// Locked around each submission to `queue`; null where only the backend submits to it.
  std::mutex* queue_mutex;
};

/// Makes the programs that are loaded from now on use the application's device, or, with null, one of the
/// backend's own. The handles are copied; what they name must outlive the programs.
///
/// Returns InvalidArgument where a handle is null.
Error set_vulkan_device(const VulkanHandles* handles);

/// A logical device with what the backend asks of it.
class VulkanDevice {
 public:
  VulkanDevice() = default;
  VulkanDevice(const VulkanDevice&) = delete;
  VulkanDevice& operator=(const VulkanDevice&) = delete;
  ~VulkanDevice();

  /// The application's device, or one that lives as long as somebody holds it.
  static Result<std::shared_ptr<VulkanDevice>> acquire();

  /// Whether acquire() has something to start from: the application's device, or a Vulkan loader.
  static bool is_possible();

  const VulkanFunctions& fn() const { return fn_; }
  VkDevice handle() const { return device_; }
  uint32_t queue_family() const { return queue_family_; }
  const VkPhysicalDeviceTensorPropertiesARM& tensor_limits() const { return tensor_limits_; }
  uint32_t max_descriptor_sets() const { return max_descriptor_sets_; }

  /// Allocates memory of one of the types in `requirements` that has all of `required` and the most of
  /// `preferred`. `properties` becomes what the memory has. `next` extends VkMemoryAllocateInfo. `what` is
  /// for the log.
  Error allocate(const VkMemoryRequirements& requirements, VkMemoryPropertyFlags required,
                 VkMemoryPropertyFlags preferred, const void* next, const char* what, VkDeviceMemory* memory,
                 VkMemoryPropertyFlags* properties) const;

  /// Whether graphs may read and write linear tensors of a format.
  bool supports(VkFormat format) const;

  /// What pipelines are made with: programs that were loaded before have left there what their pipelines took.
  VkPipelineCache pipeline_cache() const { return pipeline_cache_; }

  /// Starts a recorded command buffer; `fence`, which is not signaled, says when it is done.
  Error submit(VkCommandBuffer commands, VkFence fence) const;

  /// Waits until `fence` is signaled, for ARM_RUNTIME_VGF_TIMEOUT_MS at most, and resets it. `pending` becomes whether
  /// the device may still use what was submitted with it. Returns InvalidState where time ran out.
  Error wait(VkFence fence, bool* pending) const;

 private:
  Error adopt(const VulkanHandles& handles);
  Error create();
  Error create_instance(bool emulated);
  bool choose_physical_device();
  Error create_device();
  Error read_limits();
  void make_pipeline_cache();
  void save_pipeline_cache() const;

  VulkanFunctions fn_;
  VkInstance instance_ = VK_NULL_HANDLE;
  VkPhysicalDevice physical_device_ = VK_NULL_HANDLE;
  VkDevice device_ = VK_NULL_HANDLE;
  VkQueue queue_ = VK_NULL_HANDLE;
  uint32_t queue_family_ = 0;
  bool owned_ = true;
  // Vulkan leaves it to its callers that a queue is used by one thread at a time.
  mutable std::mutex own_mutex_;
  std::mutex* queue_mutex_ = &own_mutex_;
  VkPhysicalDeviceMemoryProperties memory_{};
  VkPhysicalDeviceTensorPropertiesARM tensor_limits_{};
  uint32_t max_descriptor_sets_ = 0;
  VkPipelineCache pipeline_cache_ = VK_NULL_HANDLE;
  int64_t timeout_ns_ = 60'000'000'000;
};

}  // namespace arm_runtime
