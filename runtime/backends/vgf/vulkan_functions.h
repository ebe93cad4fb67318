// SPDX-License-Identifier: Apache-2.0
// Vulkan functions, loaded at run time, so that the library also starts on machines without Vulkan and can report the
// missing loader.
#pragma once

// Without prototypes, a call that bypasses VulkanFunctions does not compile.
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

/// Functions of an instance and a device, with the names of the API.
struct VulkanFunctions {
  PFN_vkGetInstanceProcAddr vkGetInstanceProcAddr = nullptr;
#define ARM_RUNTIME_MEMBER(name) PFN_##name name = nullptr;
  ARM_RUNTIME_VULKAN_INSTANCE_FUNCTIONS(ARM_RUNTIME_MEMBER)
  ARM_RUNTIME_VULKAN_DEVICE_FUNCTIONS(ARM_RUNTIME_MEMBER)
#undef ARM_RUNTIME_MEMBER

  /// Loads the functions of `instance` through vkGetInstanceProcAddr, which must be set. Returns NotFound, with the
  /// function's name in the log, if one is missing.
  Error load_instance(VkInstance instance);

  /// Loads the functions of `device`, after those of its instance. Returns the errors of load_instance.
  Error load_device(VkDevice device);
};

/// Returns vkGetInstanceProcAddr of the Vulkan loader, which stays loaded, or null if there is no loader.
PFN_vkGetInstanceProcAddr find_vulkan_loader();

/// Logs that `step` failed with `result` and returns the corresponding ExecuTorch error.
Error vulkan_failure(const char* step, VkResult result);

}  // namespace arm_runtime
