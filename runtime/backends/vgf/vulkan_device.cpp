// SPDX-License-Identifier: Apache-2.0
#include "backends/vgf/vulkan_device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "common/checksum.h"
#include "common/environment.h"
#include "common/executorch.h"
#include "common/log.h"

#define ARM_RUNTIME_BACKEND_ID "VgfBackend"

namespace arm_runtime {

namespace {

// The order is from the outermost layer: the graph layer uses the tensor layer.
constexpr const char* kEmulationLayers[] = {"VK_LAYER_ML_Graph_Emulation", "VK_LAYER_ML_Tensor_Emulation"};

constexpr const char* kRequiredExtensions[] = {VK_ARM_TENSORS_EXTENSION_NAME, VK_ARM_DATA_GRAPH_EXTENSION_NAME};

// Extensions that VK_ARM_data_graph needs below Vulkan 1.4, and extensions that SPIR-V modules from the ML SDK model
// converter may declare.
constexpr const char* kOptionalExtensions[] = {
    VK_KHR_MAINTENANCE_5_EXTENSION_NAME, VK_KHR_DEFERRED_HOST_OPERATIONS_EXTENSION_NAME,
    VK_ARM_DATA_GRAPH_INSTRUCTION_SET_TOSA_EXTENSION_NAME, VK_EXT_SHADER_REPLICATED_COMPOSITES_EXTENSION_NAME};

constexpr char kDeviceVariable[] = "ARM_RUNTIME_VGF_DEVICE";
constexpr char kTimeoutVariable[] = "ARM_RUNTIME_VGF_TIMEOUT_MS";
constexpr char kCacheVariable[] = "ARM_RUNTIME_VGF_PIPELINE_CACHE";

// The application's handles, and the device that loaded programs share.
struct SharedState {
  std::mutex mutex;
  bool has_application_device = false;
  VulkanHandles application{};
  std::weak_ptr<VulkanDevice> current;
  // Data of the previous device's pipeline cache. A Vulkan driver ignores data with the header of another driver.
  std::vector<char> pipelines;
};

SharedState& shared_state() {
  // Never destroyed, because programs may be unloaded during static destruction.
  static SharedState* const instance = new SharedState;
  return *instance;
}

// Reads a pipeline cache file: the data, then their CRC-32. The CRC-32 is needed, because a Vulkan driver checks only
// the header of the data, not that the data are intact.
std::vector<char> read_cache_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
  uint32_t recorded = 0;
  if (data.size() <= sizeof(recorded)) {
    return {};
  }
  std::memcpy(&recorded, data.data() + data.size() - sizeof(recorded), sizeof(recorded));
  data.resize(data.size() - sizeof(recorded));
  return crc32(data.data(), data.size()) == recorded ? data : std::vector<char>();
}

void write_cache_file(const char* path, const std::vector<char>& data) {
  // Write a file with a unique name first and rename it, because other processes may read or write `path`.
  const std::string partial = std::string(path) + "." + std::to_string(std::random_device{}()) + ".new";
  const uint32_t checksum = crc32(data.data(), data.size());
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.write(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  file.close();
  if (!file || std::rename(partial.c_str(), path) != 0) {
    ARM_RUNTIME_LOG(Error, "%s='%s' could not be written; pipelines will be compiled again", kCacheVariable, path);
    std::remove(partial.c_str());
  }
}

// Chain of the features that the backend queries and enables. Not copyable, because its members refer to each other.
struct Features {
  VkPhysicalDeviceShaderReplicatedCompositesFeaturesEXT replicated{};
  VkPhysicalDeviceDataGraphFeaturesARM graph{};
  VkPhysicalDeviceTensorFeaturesARM tensor{};
  VkPhysicalDeviceVulkan13Features core13{};
  VkPhysicalDeviceVulkan12Features core12{};
  VkPhysicalDeviceVulkan11Features core11{};
  VkPhysicalDeviceFeatures2 core{};

  explicit Features(bool with_replicated) {
    replicated.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_REPLICATED_COMPOSITES_FEATURES_EXT;
    graph.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DATA_GRAPH_FEATURES_ARM;
    graph.pNext = with_replicated ? &replicated : nullptr;
    tensor.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TENSOR_FEATURES_ARM;
    tensor.pNext = &graph;
    core13.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES;
    core13.pNext = &tensor;
    core12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    core12.pNext = &core13;
    core11.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES;
    core11.pNext = &core12;
    core.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    core.pNext = &core11;
  }
  Features(const Features&) = delete;
  Features& operator=(const Features&) = delete;

  bool are_sufficient() const {
    return tensor.tensors && graph.dataGraph && graph.dataGraphShaderModule && core13.synchronization2;
  }

  // Enables the features of the extensions, and the number formats that graphs may need. (A driver needs them in
  // graphs, the emulation layer in the compute shaders that replace graphs.) All other features stay off, because they
  // may cost speed.
  void enable(const Features& supported) {
    core.features.shaderInt16 = supported.core.features.shaderInt16;
    core.features.shaderInt64 = supported.core.features.shaderInt64;
    core11.storageBuffer16BitAccess = supported.core11.storageBuffer16BitAccess;
    core11.uniformAndStorageBuffer16BitAccess = supported.core11.uniformAndStorageBuffer16BitAccess;
    core11.storagePushConstant16 = supported.core11.storagePushConstant16;
    core12.shaderInt8 = supported.core12.shaderInt8;
    core12.shaderFloat16 = supported.core12.shaderFloat16;
    core12.storageBuffer8BitAccess = supported.core12.storageBuffer8BitAccess;
    core12.uniformAndStorageBuffer8BitAccess = supported.core12.uniformAndStorageBuffer8BitAccess;
    core12.vulkanMemoryModel = supported.core12.vulkanMemoryModel;
    core12.vulkanMemoryModelDeviceScope = supported.core12.vulkanMemoryModelDeviceScope;
    core13.synchronization2 = supported.core13.synchronization2;
    core13.maintenance4 = supported.core13.maintenance4;
    tensor.tensors = supported.tensor.tensors;
    tensor.shaderTensorAccess = supported.tensor.shaderTensorAccess;
    graph.dataGraph = supported.graph.dataGraph;
    graph.dataGraphShaderModule = supported.graph.dataGraphShaderModule;
    replicated.shaderReplicatedComposites = supported.replicated.shaderReplicatedComposites;
  }
};

std::vector<VkExtensionProperties> extensions_of(const VulkanFunctions& fn, VkPhysicalDevice device) {
  uint32_t count = 0;
  std::vector<VkExtensionProperties> extensions;
  if (fn.vkEnumerateDeviceExtensionProperties(device, nullptr, &count, nullptr) == VK_SUCCESS) {
    extensions.resize(count);
    fn.vkEnumerateDeviceExtensionProperties(device, nullptr, &count, extensions.data());
    extensions.resize(count);
  }
  return extensions;
}

bool contains(const std::vector<VkExtensionProperties>& extensions, const char* name) {
  for (const VkExtensionProperties& extension : extensions) {
    if (std::strcmp(extension.extensionName, name) == 0) {
      return true;
    }
  }
  return false;
}

bool has_required_extensions(const std::vector<VkExtensionProperties>& extensions) {
  for (const char* name : kRequiredExtensions) {
    if (!contains(extensions, name)) {
      return false;
    }
  }
  return true;
}

// Whether a queue family executes SPIR-V graphs. VK_QUEUE_DATA_GRAPH_BIT_ARM is not sufficient: families of other data
// graph engines have this bit, too.
bool runs_spirv_graphs(PFN_vkGetPhysicalDeviceQueueFamilyDataGraphPropertiesARM query, VkPhysicalDevice device,
                       uint32_t family) {
  uint32_t count = 0;
  if (query(device, family, &count, nullptr) != VK_SUCCESS) {
    return false;
  }
  VkQueueFamilyDataGraphPropertiesARM blank{};
  blank.sType = VK_STRUCTURE_TYPE_QUEUE_FAMILY_DATA_GRAPH_PROPERTIES_ARM;
  std::vector<VkQueueFamilyDataGraphPropertiesARM> properties(count, blank);
  if (query(device, family, &count, properties.data()) != VK_SUCCESS) {
    return false;
  }
  properties.resize(count);
  for (const VkQueueFamilyDataGraphPropertiesARM& property : properties) {
    if (property.engine.type == VK_PHYSICAL_DEVICE_DATA_GRAPH_PROCESSING_ENGINE_TYPE_DEFAULT_ARM &&
        property.operation.operationType ==
            VK_PHYSICAL_DEVICE_DATA_GRAPH_OPERATION_TYPE_SPIRV_EXTENDED_INSTRUCTION_SET_ARM) {
      return true;
    }
  }
  return false;
}

bool find_queue_family(const VulkanFunctions& fn, VkInstance instance, VkPhysicalDevice device, uint32_t* family) {
  const auto query = reinterpret_cast<PFN_vkGetPhysicalDeviceQueueFamilyDataGraphPropertiesARM>(
      fn.vkGetInstanceProcAddr(instance, "vkGetPhysicalDeviceQueueFamilyDataGraphPropertiesARM"));
  if (query == nullptr) {
    return false;
  }
  uint32_t count = 0;
  fn.vkGetPhysicalDeviceQueueFamilyProperties(device, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  fn.vkGetPhysicalDeviceQueueFamilyProperties(device, &count, families.data());
  for (uint32_t index = 0; index < count; ++index) {
    if ((families[index].queueFlags & VK_QUEUE_DATA_GRAPH_BIT_ARM) != 0 && families[index].queueCount > 0 &&
        runs_spirv_graphs(query, device, index)) {
      *family = index;
      return true;
    }
  }
  return false;
}

int rate_device_type(VkPhysicalDeviceType type) {
  switch (type) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return 4;
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return 3;
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
      return 2;
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return 0;
    default:
      return 1;
  }
}

bool is_emulation_installed(PFN_vkGetInstanceProcAddr get) {
  const auto enumerate = reinterpret_cast<PFN_vkEnumerateInstanceLayerProperties>(
      get(VK_NULL_HANDLE, "vkEnumerateInstanceLayerProperties"));
  uint32_t count = 0;
  if (enumerate == nullptr || enumerate(&count, nullptr) != VK_SUCCESS) {
    return false;
  }
  std::vector<VkLayerProperties> layers(count);
  enumerate(&count, layers.data());
  for (const char* wanted : kEmulationLayers) {
    bool found = false;
    for (uint32_t index = 0; index < count && !found; ++index) {
      found = std::strcmp(layers[index].layerName, wanted) == 0;
    }
    if (!found) {
      return false;
    }
  }
  return true;
}

// Whether `choice`, a part of a device's name or a device's number, selects this device. A null choice selects all.
bool is_wanted(const char* choice, const char* name, size_t number) {
  return choice == nullptr || std::strstr(name, choice) != nullptr || std::to_string(number) == choice;
}

uint32_t count_bits(VkMemoryPropertyFlags flags) { return static_cast<uint32_t>(__builtin_popcount(flags)); }

}  // namespace

Error set_vulkan_device(const VulkanHandles* handles) {
  if (handles != nullptr && (handles->get_instance_proc_addr == nullptr || handles->instance == VK_NULL_HANDLE ||
                             handles->physical_device == VK_NULL_HANDLE || handles->device == VK_NULL_HANDLE ||
                             handles->queue == VK_NULL_HANDLE)) {
    ARM_RUNTIME_LOG(Error, "set_vulkan_device got a null handle; only queue_mutex may be null");
    return Error::InvalidArgument;
  }
  const std::lock_guard<std::mutex> lock(shared_state().mutex);
  shared_state().has_application_device = handles != nullptr;
  shared_state().application = handles != nullptr ? *handles : VulkanHandles{};
  shared_state().current.reset();
  return Error::Ok;
}

bool VulkanDevice::has_device_or_loader() {
  {
    const std::lock_guard<std::mutex> lock(shared_state().mutex);
    if (shared_state().has_application_device) {
      return true;
    }
  }
  if (find_vulkan_loader() != nullptr) {
    return true;
  }
  ARM_RUNTIME_LOG(Error, "there is no Vulkan loader (libvulkan.so.1); install one, version 1.4 or newer, or put its "
                         "folder into LD_LIBRARY_PATH");
  return false;
}

Result<std::shared_ptr<VulkanDevice>> VulkanDevice::acquire() {
  const std::lock_guard<std::mutex> lock(shared_state().mutex);
  std::shared_ptr<VulkanDevice> device = shared_state().current.lock();
  if (device == nullptr) {
    device = std::make_shared<VulkanDevice>();
    const Error error =
        shared_state().has_application_device ? device->adopt(shared_state().application) : device->create();
    if (error != Error::Ok) {
      return error;
    }
    shared_state().current = device;
  }
  return device;
}

VulkanDevice::~VulkanDevice() {
  if (pipeline_cache_ != VK_NULL_HANDLE) {
    save_pipeline_cache();
    fn_.vkDestroyPipelineCache(device_, pipeline_cache_, nullptr);
  }
  if (!owned_) {
    return;
  }
  if (device_ != VK_NULL_HANDLE && fn_.vkDestroyDevice != nullptr) {
    fn_.vkDestroyDevice(device_, nullptr);
  }
  if (instance_ != VK_NULL_HANDLE && fn_.vkDestroyInstance != nullptr) {
    fn_.vkDestroyInstance(instance_, nullptr);
  }
}

Error VulkanDevice::adopt(const VulkanHandles& handles) {
  owned_ = false;
  fn_.vkGetInstanceProcAddr = handles.get_instance_proc_addr;
  instance_ = handles.instance;
  physical_device_ = handles.physical_device;
  device_ = handles.device;
  queue_ = handles.queue;
  queue_family_ = handles.queue_family;
  if (handles.queue_mutex != nullptr) {
    queue_mutex_ = handles.queue_mutex;
  }
  Error error = fn_.load_instance(instance_);
  if (error == Error::Ok) {
    error = fn_.load_device(device_);
  }
  return error == Error::Ok ? finish_setup() : error;
}

Error VulkanDevice::create() {
  fn_.vkGetInstanceProcAddr = find_vulkan_loader();
  if (fn_.vkGetInstanceProcAddr == nullptr) {
    ARM_RUNTIME_LOG(Error, "the Vulkan loader (libvulkan.so.1) was not found, or has no vkGetInstanceProcAddr");
    return Error::NotFound;
  }
  // Try without emulation first, because emulation hides a driver's own extensions. In both instances, the loader also
  // enables the layers that VK_INSTANCE_LAYERS names.
  const bool can_emulate = is_emulation_installed(fn_.vkGetInstanceProcAddr);
  for (const bool emulated : {false, true}) {
    if (emulated && !can_emulate) {
      break;
    }
    const Error error = create_instance(emulated);
    if (error != Error::Ok) {
      return error;
    }
    if (choose_physical_device()) {
      return create_device();
    }
    fn_.vkDestroyInstance(instance_, nullptr);
    instance_ = VK_NULL_HANDLE;
  }
  if (const char* choice = std::getenv(kDeviceVariable)) {
    ARM_RUNTIME_LOG(Error,
                    "%s='%s' names no Vulkan device that runs VK_ARM_tensors and VK_ARM_data_graph; set it to a "
                    "part of a device's name or to its number (vulkaninfo --summary), or unset it",
                    kDeviceVariable, choice);
    return Error::NotFound;
  }
  ARM_RUNTIME_LOG(Error,
                  "no Vulkan device runs VK_ARM_tensors and VK_ARM_data_graph; install a driver that has "
                  "them, or a Vulkan 1.3 driver and Arm's ML emulation layer (%s)",
                  can_emulate ? "the layer is installed, but no driver supports it"
                              : "the layer was not found: is its folder in VK_LAYER_PATH?");
  return Error::NotFound;
}

Error VulkanDevice::create_instance(bool emulated) {
  const auto create =
      reinterpret_cast<PFN_vkCreateInstance>(fn_.vkGetInstanceProcAddr(VK_NULL_HANDLE, "vkCreateInstance"));
  if (create == nullptr) {
    ARM_RUNTIME_LOG(Error, "the Vulkan loader has no vkCreateInstance");
    return Error::NotFound;
  }
  VkApplicationInfo application{};
  application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
  application.pApplicationName = "ExecuTorch VgfBackend";
  application.apiVersion = VK_API_VERSION_1_3;
  VkInstanceCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
  info.pApplicationInfo = &application;
  if (emulated) {
    info.enabledLayerCount = 2;
    info.ppEnabledLayerNames = kEmulationLayers;
  }
  const VkResult result = create(&info, nullptr, &instance_);
  if (result != VK_SUCCESS) {
    instance_ = VK_NULL_HANDLE;
    const char* step = "vkCreateInstance";
    if (result == VK_ERROR_INCOMPATIBLE_DRIVER) {
      step = "vkCreateInstance (is there a Vulkan driver? VK_DRIVER_FILES can name one)";
    } else if (result == VK_ERROR_LAYER_NOT_PRESENT) {
      step = "vkCreateInstance (can the dynamic linker find libVkLayer_Graph.so and libVkLayer_Tensor.so?)";
    }
    return vulkan_failure(step, result);
  }
  return fn_.load_instance(instance_);
}

bool VulkanDevice::choose_physical_device() {
  uint32_t count = 0;
  if (fn_.vkEnumeratePhysicalDevices(instance_, &count, nullptr) != VK_SUCCESS) {
    return false;
  }
  std::vector<VkPhysicalDevice> devices(count);
  if (fn_.vkEnumeratePhysicalDevices(instance_, &count, devices.data()) < VK_SUCCESS) {
    return false;
  }
  devices.resize(count);
  const char* const choice = std::getenv(kDeviceVariable);
  int best = -1;
  for (size_t number = 0; number < devices.size(); ++number) {
    const VkPhysicalDevice device = devices[number];
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    fn_.vkGetPhysicalDeviceProperties2(device, &properties);
    uint32_t family = 0;
    if (!is_wanted(choice, properties.properties.deviceName, number)) {
      ARM_RUNTIME_LOG(Info, "%s='%s' is not device %zu, '%s'", kDeviceVariable, choice, number,
                      properties.properties.deviceName);
      continue;
    }
    if (rate_device_type(properties.properties.deviceType) <= best ||
        properties.properties.apiVersion < VK_API_VERSION_1_3 || !has_required_extensions(extensions_of(fn_, device)) ||
        !find_queue_family(fn_, instance_, device, &family)) {
      continue;
    }
    Features supported(false);
    fn_.vkGetPhysicalDeviceFeatures2(device, &supported.core);
    if (supported.are_sufficient()) {
      best = rate_device_type(properties.properties.deviceType);
      physical_device_ = device;
      queue_family_ = family;
    }
  }
  return best >= 0;
}

Error VulkanDevice::create_device() {
  const std::vector<VkExtensionProperties> available = extensions_of(fn_, physical_device_);
  std::vector<const char*> names(std::begin(kRequiredExtensions), std::end(kRequiredExtensions));
  for (const char* name : kOptionalExtensions) {
    if (contains(available, name)) {
      names.push_back(name);
    }
  }
  const bool replicated = contains(available, VK_EXT_SHADER_REPLICATED_COMPOSITES_EXTENSION_NAME);
  Features supported(replicated);
  fn_.vkGetPhysicalDeviceFeatures2(physical_device_, &supported.core);
  Features wanted(replicated);
  wanted.enable(supported);

  const float priority = 1.0F;
  VkDeviceQueueCreateInfo queue{};
  queue.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
  queue.queueFamilyIndex = queue_family_;
  queue.queueCount = 1;
  queue.pQueuePriorities = &priority;
  VkDeviceCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
  info.pNext = &wanted.core;
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue;
  info.enabledExtensionCount = static_cast<uint32_t>(names.size());
  info.ppEnabledExtensionNames = names.data();
  const VkResult result = fn_.vkCreateDevice(physical_device_, &info, nullptr, &device_);
  if (result != VK_SUCCESS) {
    device_ = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateDevice (a Vulkan loader older than 1.4 does not work with the ML emulation layer)",
                          result);
  }
  const Error error = fn_.load_device(device_);
  if (error != Error::Ok) {
    return error;
  }
  fn_.vkGetDeviceQueue(device_, queue_family_, 0, &queue_);
  return finish_setup();
}

Error VulkanDevice::finish_setup() {
  tensor_limits_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TENSOR_PROPERTIES_ARM;
  VkPhysicalDeviceProperties2 properties{};
  properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
  properties.pNext = &tensor_limits_;
  fn_.vkGetPhysicalDeviceProperties2(physical_device_, &properties);
  max_descriptor_sets_ = properties.properties.limits.maxBoundDescriptorSets;
  fn_.vkGetPhysicalDeviceMemoryProperties(physical_device_, &memory_);
  ARM_RUNTIME_LOG(Info, "runs on '%s'", properties.properties.deviceName);
  const Error error = read_timeout(ARM_RUNTIME_BACKEND_ID, kTimeoutVariable, &timeout_ns_);
  if (error == Error::Ok) {
    make_pipeline_cache();
  }
  return error;
}

// Called with shared_state() locked. Pipelines also work without a cache, so a failure is ignored.
void VulkanDevice::make_pipeline_cache() {
  const char* path = std::getenv(kCacheVariable);
  std::vector<char> data = path == nullptr ? std::vector<char>() : read_cache_file(path);
  if (data.empty()) {
    data = shared_state().pipelines;
  }
  VkPipelineCacheCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO;
  info.initialDataSize = data.size();
  info.pInitialData = data.data();
  if (fn_.vkCreatePipelineCache(device_, &info, nullptr, &pipeline_cache_) != VK_SUCCESS) {
    pipeline_cache_ = VK_NULL_HANDLE;
  }
}

void VulkanDevice::save_pipeline_cache() const {
  size_t size = 0;
  if (fn_.vkGetPipelineCacheData(device_, pipeline_cache_, &size, nullptr) != VK_SUCCESS) {
    return;
  }
  std::vector<char> data(size);
  if (fn_.vkGetPipelineCacheData(device_, pipeline_cache_, &size, data.data()) != VK_SUCCESS) {
    return;
  }
  data.resize(size);
  if (const char* path = std::getenv(kCacheVariable)) {
    write_cache_file(path, data);
  }
  const std::lock_guard<std::mutex> lock(shared_state().mutex);
  shared_state().pipelines.swap(data);
}

bool VulkanDevice::supports(VkFormat format) const {
  VkTensorFormatPropertiesARM tensor{};
  tensor.sType = VK_STRUCTURE_TYPE_TENSOR_FORMAT_PROPERTIES_ARM;
  VkFormatProperties2 properties{};
  properties.sType = VK_STRUCTURE_TYPE_FORMAT_PROPERTIES_2;
  properties.pNext = &tensor;
  fn_.vkGetPhysicalDeviceFormatProperties2(physical_device_, format, &properties);
  return (tensor.linearTilingTensorFeatures & VK_FORMAT_FEATURE_2_TENSOR_DATA_GRAPH_BIT_ARM) != 0;
}

Error VulkanDevice::allocate(const VkMemoryRequirements& requirements, VkMemoryPropertyFlags required,
                             VkMemoryPropertyFlags preferred, const void* next, const char* what,
                             VkDeviceMemory* memory, VkMemoryPropertyFlags* properties) const {
  // Protected memory works only in protected submissions, lazily allocated memory only in render passes.
  constexpr VkMemoryPropertyFlags kExcluded =
      VK_MEMORY_PROPERTY_PROTECTED_BIT | VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT;
  uint32_t best = memory_.memoryTypeCount;
  uint32_t best_score = 0;
  for (uint32_t index = 0; index < memory_.memoryTypeCount; ++index) {
    const VkMemoryPropertyFlags flags = memory_.memoryTypes[index].propertyFlags;
    const bool allowed = (requirements.memoryTypeBits & (uint32_t{1} << index)) != 0;
    const uint32_t score = 1 + count_bits(flags & preferred);
    if (allowed && (flags & required) == required && (flags & kExcluded) == 0 && score > best_score) {
      best = index;
      best_score = score;
    }
  }
  if (best_score == 0) {
    ARM_RUNTIME_LOG(Error, "no memory type of the device fits %s (allowed types 0x%x, required properties 0x%x)", what,
                    static_cast<unsigned>(requirements.memoryTypeBits), static_cast<unsigned>(required));
    return Error::NotSupported;
  }
  VkMemoryAllocateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
  info.pNext = next;
  info.allocationSize = requirements.size;
  info.memoryTypeIndex = best;
  const VkResult result = fn_.vkAllocateMemory(device_, &info, nullptr, memory);
  if (result != VK_SUCCESS) {
    *memory = VK_NULL_HANDLE;
    char step[128];
    std::snprintf(step, sizeof(step), "vkAllocateMemory of %llu bytes for %s",
                  static_cast<unsigned long long>(requirements.size), what);
    return vulkan_failure(step, result);
  }
  *properties = memory_.memoryTypes[best].propertyFlags;
  return Error::Ok;
}

Error VulkanDevice::submit(VkCommandBuffer commands, VkFence fence) const {
  VkSubmitInfo submit{};
  submit.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
  submit.commandBufferCount = 1;
  submit.pCommandBuffers = &commands;
  const std::lock_guard<std::mutex> lock(*queue_mutex_);
  const VkResult result = fn_.vkQueueSubmit(queue_, 1, &submit, fence);
  return result == VK_SUCCESS ? Error::Ok : vulkan_failure("vkQueueSubmit", result);
}

Error VulkanDevice::wait(VkFence fence, bool* pending) const {
  VkResult result = fn_.vkWaitForFences(device_, 1, &fence, VK_TRUE, static_cast<uint64_t>(timeout_ns_));
  // Objects of a lost device may be destroyed.
  *pending = result != VK_SUCCESS && result != VK_ERROR_DEVICE_LOST;
  if (result == VK_TIMEOUT) {
    ARM_RUNTIME_LOG(Error, "no result from the device after %lld ms; set a longer time with %s",
                    static_cast<long long>(timeout_ns_ / 1'000'000), kTimeoutVariable);
    return Error::InvalidState;
  }
  if (result != VK_SUCCESS) {
    return vulkan_failure("vkWaitForFences", result);
  }
  result = fn_.vkResetFences(device_, 1, &fence);
  return result == VK_SUCCESS ? Error::Ok : vulkan_failure("vkResetFences", result);
}

}  // namespace arm_runtime
