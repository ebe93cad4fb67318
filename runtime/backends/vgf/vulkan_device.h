// SPDX-License-Identifier: Apache-2.0
// The Vulkan device, shared by all programs of the process.
#pragma once

#include <memory>
#include <mutex>

#include "backends/vgf/vulkan_functions.h"
#include "common/executorch.h"

namespace arm_runtime {

/// A Vulkan device of the application, for use by the backend.
struct VulkanHandles {
  PFN_vkGetInstanceProcAddr get_instance_proc_addr;
  /// Created for Vulkan 1.3 or newer.
  VkInstance instance;
  VkPhysicalDevice physical_device;
  /// Created with VK_ARM_tensors, VK_ARM_data_graph and the features synchronization2, tensors, dataGraph,
  /// dataGraphShaderModule.
  VkDevice device;
  /// Of a family with VK_QUEUE_DATA_GRAPH_BIT_ARM.
  VkQueue queue;
  uint32_t queue_family;
  /// Locked during each submission to `queue`. Null if only the backend submits to it.
  std::mutex* queue_mutex;
};

/// Sets the device of programs that are loaded from now on: the application's device, or, if `handles` is null, a
/// device that the backend creates. The handles are copied. The objects to which they refer must outlive the programs.
///
/// Returns InvalidArgument if a handle other than `queue_mutex` is null.
Error set_vulkan_device(const VulkanHandles* handles);

/// A logical device and its functions.
class VulkanDevice {
 public:
  VulkanDevice() = default;
  VulkanDevice(const VulkanDevice&) = delete;
  VulkanDevice& operator=(const VulkanDevice&) = delete;
  ~VulkanDevice();

  /// Returns the application's device, or a device that the backend creates. Programs share it. A device of the backend
  /// is destroyed with the last program that uses it.
  static Result<std::shared_ptr<VulkanDevice>> acquire();

  /// Whether there is a device of the application or a Vulkan loader. Logs the reason if not. acquire() needs one of
  /// the two.
  static bool has_device_or_loader();

  const VulkanFunctions& fn() const { return fn_; }
  VkDevice handle() const { return device_; }
  uint32_t queue_family() const { return queue_family_; }
  const VkPhysicalDeviceTensorPropertiesARM& tensor_limits() const { return tensor_limits_; }
  uint32_t max_descriptor_sets() const { return max_descriptor_sets_; }

  /// Allocates memory. Of the memory types that `requirements` allows and that have all `required` properties, the type
  /// with the most `preferred` properties is used. Sets `properties` to the properties of this type. `next` extends
  /// VkMemoryAllocateInfo. `what` names the object in the log.
  Error allocate(const VkMemoryRequirements& requirements, VkMemoryPropertyFlags required,
                 VkMemoryPropertyFlags preferred, const void* next, const char* what, VkDeviceMemory* memory,
                 VkMemoryPropertyFlags* properties) const;

  /// Whether graphs support linear tensors of a format.
  bool supports(VkFormat format) const;

  /// Cache for the creation of pipelines, shared by all programs.
  VkPipelineCache pipeline_cache() const { return pipeline_cache_; }

  /// Submits a recorded command buffer. `fence` must be unsignaled; it is signaled when the commands have finished.
  Error submit(VkCommandBuffer commands, VkFence fence) const;

  /// Waits until `fence` is signaled, for at most ARM_RUNTIME_VGF_TIMEOUT_MS (default: 60 s), and then resets it. Sets
  /// `pending` to true if the device may still use the submitted objects, else to false. Returns InvalidState on
  /// timeout. If a Vulkan function fails, returns the corresponding error.
  Error wait(VkFence fence, bool* pending) const;

 private:
  Error adopt(const VulkanHandles& handles);
  Error create();
  Error create_instance(bool emulated);
  bool choose_physical_device();
  Error create_device();
  // Reads the device's limits, its memory types and the timeout, and creates the pipeline cache.
  Error finish_setup();
  void make_pipeline_cache();
  void save_pipeline_cache() const;

  VulkanFunctions fn_;
  VkInstance instance_ = VK_NULL_HANDLE;
  VkPhysicalDevice physical_device_ = VK_NULL_HANDLE;
  VkDevice device_ = VK_NULL_HANDLE;
  VkQueue queue_ = VK_NULL_HANDLE;
  uint32_t queue_family_ = 0;
  bool owned_ = true;
  // Vulkan requires that callers synchronize access to a queue.
  mutable std::mutex own_mutex_;
  std::mutex* queue_mutex_ = &own_mutex_;
  VkPhysicalDeviceMemoryProperties memory_{};
  VkPhysicalDeviceTensorPropertiesARM tensor_limits_{};
  uint32_t max_descriptor_sets_ = 0;
  VkPipelineCache pipeline_cache_ = VK_NULL_HANDLE;
  int64_t timeout_ns_ = 60'000'000'000;
};

}  // namespace arm_runtime
