// SPDX-License-Identifier: Apache-2.0
#include "backends/vgf/vulkan_functions.h"

#include <dlfcn.h>
#include "common/executorch.h"
#include "common/log.h"

#define ARM_RUNTIME_BACKEND_ID "VgfBackend"

namespace arm_runtime {

namespace {

const char* result_name(VkResult result) {
  switch (result) {
#define ARM_RUNTIME_CASE(name) \
  case name:                   \
    return #name;
    ARM_RUNTIME_CASE(VK_SUCCESS)
    ARM_RUNTIME_CASE(VK_NOT_READY)
    ARM_RUNTIME_CASE(VK_TIMEOUT)
    ARM_RUNTIME_CASE(VK_INCOMPLETE)
    ARM_RUNTIME_CASE(VK_PIPELINE_COMPILE_REQUIRED)
    ARM_RUNTIME_CASE(VK_ERROR_OUT_OF_HOST_MEMORY)
    ARM_RUNTIME_CASE(VK_ERROR_OUT_OF_DEVICE_MEMORY)
    ARM_RUNTIME_CASE(VK_ERROR_INITIALIZATION_FAILED)
    ARM_RUNTIME_CASE(VK_ERROR_DEVICE_LOST)
    ARM_RUNTIME_CASE(VK_ERROR_MEMORY_MAP_FAILED)
    ARM_RUNTIME_CASE(VK_ERROR_LAYER_NOT_PRESENT)
    ARM_RUNTIME_CASE(VK_ERROR_EXTENSION_NOT_PRESENT)
    ARM_RUNTIME_CASE(VK_ERROR_FEATURE_NOT_PRESENT)
    ARM_RUNTIME_CASE(VK_ERROR_INCOMPATIBLE_DRIVER)
    ARM_RUNTIME_CASE(VK_ERROR_TOO_MANY_OBJECTS)
    ARM_RUNTIME_CASE(VK_ERROR_FORMAT_NOT_SUPPORTED)
    ARM_RUNTIME_CASE(VK_ERROR_FRAGMENTED_POOL)
    ARM_RUNTIME_CASE(VK_ERROR_OUT_OF_POOL_MEMORY)
    ARM_RUNTIME_CASE(VK_ERROR_INVALID_EXTERNAL_HANDLE)
    ARM_RUNTIME_CASE(VK_ERROR_FRAGMENTATION)
    ARM_RUNTIME_CASE(VK_ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS)
    ARM_RUNTIME_CASE(VK_ERROR_VALIDATION_FAILED)
    ARM_RUNTIME_CASE(VK_ERROR_UNKNOWN)
#undef ARM_RUNTIME_CASE
    default:
      return "an unknown VkResult";
  }
}

Error error_of(VkResult result) {
  switch (result) {
    case VK_ERROR_OUT_OF_HOST_MEMORY:
    case VK_ERROR_OUT_OF_DEVICE_MEMORY:
    case VK_ERROR_OUT_OF_POOL_MEMORY:
    case VK_ERROR_FRAGMENTED_POOL:
    case VK_ERROR_FRAGMENTATION:
      return Error::DelegateMemoryAllocationFailed;
    case VK_ERROR_LAYER_NOT_PRESENT:
    case VK_ERROR_EXTENSION_NOT_PRESENT:
    case VK_ERROR_FEATURE_NOT_PRESENT:
    case VK_ERROR_INCOMPATIBLE_DRIVER:
    case VK_ERROR_FORMAT_NOT_SUPPORTED:
      return Error::NotSupported;
    default:
      return Error::Internal;
  }
}

Error report_missing(const char* name) {
  ARM_RUNTIME_LOG(Error, "the Vulkan driver has no %s, which VK_ARM_tensors and VK_ARM_data_graph need", name);
  return Error::NotFound;
}

}  // namespace

// NOLINTBEGIN(bugprone-macro-parentheses): names of functions and types
Error VulkanFunctions::load_instance(VkInstance instance) {
#define ARM_RUNTIME_LOAD(name)                                                 \
  name = reinterpret_cast<PFN_##name>(vkGetInstanceProcAddr(instance, #name)); \
  if (name == nullptr) {                                                       \
    return report_missing(#name);                                              \
  }
  ARM_RUNTIME_VULKAN_INSTANCE_FUNCTIONS(ARM_RUNTIME_LOAD)
#undef ARM_RUNTIME_LOAD
  return Error::Ok;
}

Error VulkanFunctions::load_device(VkDevice device) {
#define ARM_RUNTIME_LOAD(name)                                             \
  name = reinterpret_cast<PFN_##name>(vkGetDeviceProcAddr(device, #name)); \
  if (name == nullptr) {                                                   \
    return report_missing(#name);                                          \
  }
  ARM_RUNTIME_VULKAN_DEVICE_FUNCTIONS(ARM_RUNTIME_LOAD)
#undef ARM_RUNTIME_LOAD
  return Error::Ok;
}
// NOLINTEND(bugprone-macro-parentheses)

PFN_vkGetInstanceProcAddr find_vulkan_loader() {
  // The library is never closed, because drivers and layers keep threads and thread-local data after the last
  // vkDestroyInstance.
  static void* const library = [] {
    void* versioned = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    // On Android, the library has no version in its name.
    return versioned != nullptr ? versioned : dlopen("libvulkan.so", RTLD_NOW | RTLD_LOCAL);
  }();
  return library == nullptr ? nullptr
                            : reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
}

Error vulkan_failure(const char* step, VkResult result) {
  ARM_RUNTIME_LOG(Error, "%s failed with %s (%d)", step, result_name(result), static_cast<int>(result));
  return error_of(result);
}

}  // namespace arm_runtime
