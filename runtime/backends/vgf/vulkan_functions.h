// SPDX-License-Identifier: Apache-2.0
// The Vulkan functions that the backend calls, loaded at run time: the library that contains this backend
// starts on machines without Vulkan, and reports there that Vulkan is missing.
#pragma once

// The prototypes stay out, so that a direct call does not compile.
#ifndef VK_NO_PROTOTYPES
#define VK_NO_PROTOTYPES
#endif
#include <vulkan/vulkan_core.h>

#include "common/executorch.h"

#if !defined(VK_ARM_tensors) || !defined(VK_ARM_data_graph)
#error "These Vulkan headers have no VK_ARM_data_graph. runtime/cmake/fetch_vulkan_headers.sh gets newer ones"
#endif

#define ARM_RUNTIME_VULKAN_INSTANCE_FUNCTIONS(X) \
  X(vkDestroyInstance)                           \
  X(vkEnumeratePhysicalDevices)                  \
  X(vkEnumerateDeviceExtensionProperties)        \
  X(vkGetPhysicalDeviceFeatures2)                \
  X(vkGetPhysicalDeviceProperties2)              \
  X(vkGetPhysicalDeviceFormatProperties2)        \
  X(vkGetPhysicalDeviceMemoryProperties)         \
  X(vkGetPhysicalDeviceQueueFamilyProperties)    \
  X(vkCreateDevice)                              \
  X(vkGetDeviceProcAddr)

#define ARM_RUNTIME_VULKAN_DEVICE_FUNCTIONS(X)             \
  X(vkDestroyDevice)                                       \
  X(vkGetDeviceQueue)                                      \
  X(vkQueueSubmit)                                         \
  X(vkAllocateMemory)                                      \
  X(vkFreeMemory)                                          \
  X(vkMapMemory)                                           \
  X(vkFlushMappedMemoryRanges)                             \
  X(vkInvalidateMappedMemoryRanges)                        \
  X(vkCreateShaderModule)                                  \
  X(vkDestroyShaderModule)                                 \
  X(vkCreateDescriptorSetLayout)                           \
  X(vkDestroyDescriptorSetLayout)                          \
  X(vkCreatePipelineLayout)                                \
  X(vkDestroyPipelineLayout)                               \
  X(vkCreateDescriptorPool)                                \
  X(vkDestroyDescriptorPool)                               \
  X(vkAllocateDescriptorSets)                              \
  X(vkFreeDescriptorSets)                                  \
  X(vkUpdateDescriptorSets)                                \
  X(vkDestroyPipeline)                                     \
  X(vkCreatePipelineCache)                                 \
  X(vkDestroyPipelineCache)                                \
  X(vkGetPipelineCacheData)                                \
  X(vkCreateCommandPool)                                   \
  X(vkDestroyCommandPool)                                  \
  X(vkAllocateCommandBuffers)                              \
  X(vkFreeCommandBuffers)                                  \
  X(vkBeginCommandBuffer)                                  \
  X(vkEndCommandBuffer)                                    \
  X(vkCmdBindPipeline)                                     \
  X(vkCmdBindDescriptorSets)                               \
  X(vkCmdPipelineBarrier2)                                 \
  X(vkCreateFence)                                         \
  X(vkDestroyFence)                                        \
  X(vkResetFences)                                         \
  X(vkWaitForFences)                                       \
  X(vkCreateTensorARM)                                     \
  X(vkDestroyTensorARM)                                    \
  X(vkCreateTensorViewARM)                                 \
  X(vkDestroyTensorViewARM)                                \
  X(vkGetTensorMemoryRequirementsARM)                      \
  X(vkBindTensorMemoryARM)                                 \
  X(vkCreateDataGraphPipelinesARM)                         \
  X(vkCreateDataGraphPipelineSessionARM)                   \
  X(vkDestroyDataGraphPipelineSessionARM)                  \
  X(vkGetDataGraphPipelineSessionBindPointRequirementsARM) \
  X(vkGetDataGraphPipelineSessionMemoryRequirementsARM)    \
  X(vkBindDataGraphPipelineSessionMemoryARM)               \
  X(vkCmdDispatchDataGraphARM)

namespace arm_runtime {

/// Vulkan functions of one instance and one device; members have the names of the API.
struct VulkanFunctions {
  PFN_vkGetInstanceProcAddr vkGetInstanceProcAddr = nullptr;
#define ARM_RUNTIME_MEMBER(name) PFN_##name name = nullptr;
  ARM_RUNTIME_VULKAN_INSTANCE_FUNCTIONS(ARM_RUNTIME_MEMBER)
  ARM_RUNTIME_VULKAN_DEVICE_FUNCTIONS(ARM_RUNTIME_MEMBER)
#undef ARM_RUNTIME_MEMBER

  /// Loads the functions of `instance` through vkGetInstanceProcAddr, which must be set.
  /// Returns NotFound, with the function's name in the log, where one is missing.
  Error load_instance(VkInstance instance);

  /// Loads the functions of `device`; the instance's must be loaded. Fails as load_instance.
  Error load_device(VkDevice device);
};

/// vkGetInstanceProcAddr of the machine's Vulkan loader, which then stays in the process; null where there is
/// none.
PFN_vkGetInstanceProcAddr find_vulkan_loader();

/// Logs that `step` ended with `result`, and returns the ExecuTorch error that fits.
Error vulkan_failure(const char* step, VkResult result);

}  // namespace arm_runtime
