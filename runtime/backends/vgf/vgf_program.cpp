// SPDX-License-Identifier: Apache-2.0
#include "backends/vgf/vgf_program.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include "common/executorch.h"
#include "common/log.h"

#define ARM_RUNTIME_BACKEND_ID "VgfBackend"

namespace arm_runtime {

namespace {

// Describes a packed tensor, which needs no strides. The description contains a pointer to the shape of `tensor`.
VkTensorDescriptionARM make_tensor_description(const VgfTensor& tensor) {
  VkTensorDescriptionARM description{};
  description.sType = VK_STRUCTURE_TYPE_TENSOR_DESCRIPTION_ARM;
  description.tiling = VK_TENSOR_TILING_LINEAR_ARM;
  description.format = tensor.format;
  description.dimensionCount = static_cast<uint32_t>(tensor.shape.size());
  description.pDimensions = tensor.shape.data();
  description.usage = VK_TENSOR_USAGE_DATA_GRAPH_BIT_ARM;
  return description;
}

// Returns the limit that a tensor exceeds, or null.
const char* exceeded_limit(const VgfTensor& tensor, const VkPhysicalDeviceTensorPropertiesARM& limits) {
  uint64_t elements = 1;
  for (const int64_t extent : tensor.shape) {
    if (static_cast<uint64_t>(extent) > limits.maxPerDimensionTensorElements) {
      return "maxPerDimensionTensorElements";
    }
    elements *= static_cast<uint64_t>(extent);  // cannot overflow, because read_vgf() has checked the size
  }
  // In a packed tensor, dimension 0 has the largest stride. Strides are in bytes.
  const uint64_t stride = tensor.nbytes / static_cast<uint64_t>(tensor.shape[0]);
  return tensor.shape.size() > limits.maxTensorDimensionCount     ? "maxTensorDimensionCount"
         : elements > limits.maxTensorElements                    ? "maxTensorElements"
         : stride > static_cast<uint64_t>(limits.maxTensorStride) ? "maxTensorStride"
         : tensor.nbytes > limits.maxTensorSize                   ? "maxTensorSize"
                                                                  : nullptr;
}

bool contains(const std::vector<uint32_t>& indices, uint32_t index) {
  return std::find(indices.begin(), indices.end(), index) != indices.end();
}

}  // namespace

VgfProgram::~VgfProgram() {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  fn.vkDestroyFence(device, fence_, nullptr);
  if (commands_ != VK_NULL_HANDLE) {
    fn.vkFreeCommandBuffers(device, command_pool_, 1, &commands_);
  }
  fn.vkDestroyCommandPool(device, command_pool_, nullptr);
  for (Segment& segment : segments_) {
    destroy(&segment);
  }
  for (const Tensor& tensor : tensors_) {
    // Vulkan ignores null handles, but some Vulkan layers, such as the emulation layer, do not.
    if (tensor.view != VK_NULL_HANDLE) {
      fn.vkDestroyTensorViewARM(device, tensor.view, nullptr);
    }
    if (tensor.tensor != VK_NULL_HANDLE) {
      fn.vkDestroyTensorARM(device, tensor.tensor, nullptr);
    }
    fn.vkFreeMemory(device, tensor.memory, nullptr);
  }
}

void VgfProgram::destroy(Segment* segment) const {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  if (!segment->sets.empty()) {
    // Vulkan frees the sets with the pool; the emulation layer needs explicit calls.
    fn.vkFreeDescriptorSets(device, segment->pool, static_cast<uint32_t>(segment->sets.size()), segment->sets.data());
  }
  fn.vkDestroyDescriptorPool(device, segment->pool, nullptr);
  if (segment->session != VK_NULL_HANDLE) {
    fn.vkDestroyDataGraphPipelineSessionARM(device, segment->session, nullptr);
  }
  for (const VkDeviceMemory memory : segment->memory) {
    fn.vkFreeMemory(device, memory, nullptr);
  }
  if (segment->pipeline != VK_NULL_HANDLE) {
    fn.vkDestroyPipeline(device, segment->pipeline, nullptr);
  }
  fn.vkDestroyPipelineLayout(device, segment->layout, nullptr);
  for (const VkDescriptorSetLayout layout : segment->set_layouts) {
    fn.vkDestroyDescriptorSetLayout(device, layout, nullptr);
  }
  if (segment->module != VK_NULL_HANDLE) {
    fn.vkDestroyShaderModule(device, segment->module, nullptr);
  }
}

Error VgfProgram::prepare(const VgfFile& file) {
  Error error = check_limits(file);
  if (error == Error::Ok) {
    error = make_tensors(file);
  }
  for (const VgfSegment& segment : file.segments) {
    if (error == Error::Ok) {
      error = make_segment(file, segment);
    }
  }
  return error == Error::Ok ? record() : error;
}

Error VgfProgram::check_limits(const VgfFile& file) const {
  for (size_t index = 0; index < file.tensors.size(); ++index) {
    const VgfTensor& tensor = file.tensors[index];
    const char* limit = exceeded_limit(tensor, device_->tensor_limits());
    if (limit == nullptr && !device_->supports(tensor.format)) {
      limit = "its format";
    }
    if (limit != nullptr) {
      ARM_RUNTIME_LOG(Error,
                      "this device does not take tensor %zu of format %d with %zu dimensions and %zu bytes, "
                      "because of %s; run the program on another device, or export smaller tensors",
                      index, static_cast<int>(tensor.format), tensor.shape.size(), tensor.nbytes, limit);
      return Error::NotSupported;
    }
  }
  return Error::Ok;
}

Error VgfProgram::make_tensors(const VgfFile& file) {
  tensors_.resize(file.tensors.size());
  for (uint32_t index = 0; index < file.tensors.size(); ++index) {
    if (file.tensors[index].is_constant) {
      continue;
    }
    const bool is_input = contains(file.inputs, index);
    const bool is_output = contains(file.outputs, index);
    VkMemoryPropertyFlags required = 0;
    VkMemoryPropertyFlags preferred = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
    if (is_input || is_output) {
      required = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT;
      preferred |= VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    }
    if (is_output) {  // the CPU reads outputs, and reads of uncached memory are slow
      preferred = VK_MEMORY_PROPERTY_HOST_CACHED_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    }
    const Error error = make_tensor(file.tensors[index], index, required, preferred);
    if (error != Error::Ok) {
      return error;
    }
  }
  for (const uint32_t index : file.inputs) {
    inputs_.push_back({file.tensors[index].scalar_type, file.tensors[index].nbytes, tensors_[index].mapped});
  }
  for (const uint32_t index : file.outputs) {
    outputs_.push_back({file.tensors[index].scalar_type, file.tensors[index].nbytes, tensors_[index].mapped});
  }
  return Error::Ok;
}

Error VgfProgram::make_tensor(const VgfTensor& source, uint32_t index, VkMemoryPropertyFlags required,
                              VkMemoryPropertyFlags preferred) {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  Tensor& tensor = tensors_[index];

  const VkTensorDescriptionARM description = make_tensor_description(source);
  VkTensorCreateInfoARM info{};
  info.sType = VK_STRUCTURE_TYPE_TENSOR_CREATE_INFO_ARM;
  info.pDescription = &description;
  info.sharingMode = VK_SHARING_MODE_EXCLUSIVE;
  VkResult result = fn.vkCreateTensorARM(device, &info, nullptr, &tensor.tensor);
  if (result != VK_SUCCESS) {
    tensor.tensor = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateTensorARM", result);
  }

  VkTensorMemoryRequirementsInfoARM query{};
  query.sType = VK_STRUCTURE_TYPE_TENSOR_MEMORY_REQUIREMENTS_INFO_ARM;
  query.tensor = tensor.tensor;
  VkMemoryRequirements2 requirements{};
  requirements.sType = VK_STRUCTURE_TYPE_MEMORY_REQUIREMENTS_2;
  fn.vkGetTensorMemoryRequirementsARM(device, &query, &requirements);
  // Some devices require dedicated memory for a tensor, so each tensor has dedicated memory.
  VkMemoryDedicatedAllocateInfoTensorARM dedicated{};
  dedicated.sType = VK_STRUCTURE_TYPE_MEMORY_DEDICATED_ALLOCATE_INFO_TENSOR_ARM;
  dedicated.tensor = tensor.tensor;
  char what[32];
  std::snprintf(what, sizeof(what), "tensor %u", static_cast<unsigned>(index));
  VkMemoryPropertyFlags properties = 0;
  Error error = device_->allocate(requirements.memoryRequirements, required, preferred, &dedicated, what,
                                  &tensor.memory, &properties);
  if (error != Error::Ok) {
    return error;
  }

  VkBindTensorMemoryInfoARM bind{};
  bind.sType = VK_STRUCTURE_TYPE_BIND_TENSOR_MEMORY_INFO_ARM;
  bind.tensor = tensor.tensor;
  bind.memory = tensor.memory;
  result = fn.vkBindTensorMemoryARM(device, 1, &bind);
  if (result != VK_SUCCESS) {
    return vulkan_failure("vkBindTensorMemoryARM", result);
  }
  VkTensorViewCreateInfoARM view{};
  view.sType = VK_STRUCTURE_TYPE_TENSOR_VIEW_CREATE_INFO_ARM;
  view.tensor = tensor.tensor;
  view.format = source.format;
  result = fn.vkCreateTensorViewARM(device, &view, nullptr, &tensor.view);
  if (result != VK_SUCCESS) {
    tensor.view = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateTensorViewARM", result);
  }
  return required != 0 ? map_tensor(&tensor, properties) : Error::Ok;
}

Error VgfProgram::map_tensor(Tensor* tensor, VkMemoryPropertyFlags properties) {
  void* mapped = nullptr;
  const VkResult result = device_->fn().vkMapMemory(device_->handle(), tensor->memory, 0, VK_WHOLE_SIZE, 0, &mapped);
  if (result != VK_SUCCESS) {
    return vulkan_failure("vkMapMemory", result);
  }
  tensor->mapped = static_cast<uint8_t*>(mapped);
  if ((properties & VK_MEMORY_PROPERTY_HOST_COHERENT_BIT) == 0) {
    VkMappedMemoryRange range{};
    range.sType = VK_STRUCTURE_TYPE_MAPPED_MEMORY_RANGE;
    range.memory = tensor->memory;
    range.size = VK_WHOLE_SIZE;  // needs no rounding to nonCoherentAtomSize
    non_coherent_.push_back(range);
  }
  return Error::Ok;
}

Error VgfProgram::make_segment(const VgfFile& file, const VgfSegment& source) {
  segments_.emplace_back();
  Segment& segment = segments_.back();
  Error error = make_layouts(source, &segment);
  if (error == Error::Ok) {
    error = make_pipeline(file, source, &segment);
  }
  if (error == Error::Ok) {
    error = make_session(&segment);
  }
  return error == Error::Ok ? make_sets(source, &segment) : error;
}

Error VgfProgram::make_layouts(const VgfSegment& source, Segment* segment) {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  uint32_t set_count = 0;
  for (const VgfBinding& binding : source.bindings) {
    if (binding.set >= device_->max_descriptor_sets()) {
      ARM_RUNTIME_LOG(Error, "segment '%s' uses descriptor set %u; this device has %u", source.name.c_str(),
                      static_cast<unsigned>(binding.set), static_cast<unsigned>(device_->max_descriptor_sets()));
      return Error::NotSupported;
    }
    set_count = std::max(set_count, binding.set + 1);
  }
  // A pipeline layout has no gaps, so unused set numbers get empty sets.
  for (uint32_t set = 0; set < set_count; ++set) {
    std::vector<VkDescriptorSetLayoutBinding> bindings;
    for (const VgfBinding& binding : source.bindings) {
      if (binding.set == set) {
        bindings.push_back({binding.binding, VK_DESCRIPTOR_TYPE_TENSOR_ARM, 1, VK_SHADER_STAGE_ALL, nullptr});
      }
    }
    VkDescriptorSetLayoutCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO;
    info.bindingCount = static_cast<uint32_t>(bindings.size());
    info.pBindings = bindings.data();
    VkDescriptorSetLayout layout = VK_NULL_HANDLE;
    const VkResult result = fn.vkCreateDescriptorSetLayout(device, &info, nullptr, &layout);
    if (result != VK_SUCCESS) {
      return vulkan_failure("vkCreateDescriptorSetLayout", result);
    }
    segment->set_layouts.push_back(layout);
  }
  VkPipelineLayoutCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO;
  info.setLayoutCount = set_count;
  info.pSetLayouts = segment->set_layouts.data();
  const VkResult result = fn.vkCreatePipelineLayout(device, &info, nullptr, &segment->layout);
  if (result != VK_SUCCESS) {
    segment->layout = VK_NULL_HANDLE;
    return vulkan_failure("vkCreatePipelineLayout", result);
  }
  return Error::Ok;
}

Error VgfProgram::make_pipeline(const VgfFile& file, const VgfSegment& source, Segment* segment) {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  VkShaderModuleCreateInfo module{};
  module.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO;
  module.codeSize = source.word_count * sizeof(uint32_t);
  module.pCode = source.code;
  VkResult result = fn.vkCreateShaderModule(device, &module, nullptr, &segment->module);
  if (result != VK_SUCCESS) {
    segment->module = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateShaderModule", result);
  }

  // The structures refer to each other, so the vectors must not be resized below.
  std::vector<VkTensorDescriptionARM> descriptions(source.bindings.size() + source.constants.size());
  std::vector<VkDataGraphPipelineConstantTensorSemiStructuredSparsityInfoARM> sparsity(source.constants.size());
  std::vector<VkDataGraphPipelineResourceInfoARM> resources(source.bindings.size());
  std::vector<VkDataGraphPipelineConstantARM> constants(source.constants.size());
  for (size_t index = 0; index < resources.size(); ++index) {
    const VgfBinding& binding = source.bindings[index];
    descriptions[index] = make_tensor_description(file.tensors[binding.tensor]);
    resources[index].sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_RESOURCE_INFO_ARM;
    resources[index].pNext = &descriptions[index];
    resources[index].descriptorSet = binding.set;
    resources[index].binding = binding.binding;
  }
  for (size_t index = 0; index < constants.size(); ++index) {
    const VgfConstant& constant = source.constants[index];
    VkTensorDescriptionARM& description = descriptions[resources.size() + index];
    description = make_tensor_description(file.tensors[constant.tensor]);
    if (constant.sparse_dimension >= 0) {
      // VGF files have one kind of sparsity: two zeros in every four elements.
      sparsity[index].sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_CONSTANT_TENSOR_SEMI_STRUCTURED_SPARSITY_INFO_ARM;
      sparsity[index].dimension = static_cast<uint32_t>(constant.sparse_dimension);
      sparsity[index].zeroCount = 2;
      sparsity[index].groupSize = 4;
      description.pNext = &sparsity[index];
    }
    constants[index].sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_CONSTANT_ARM;
    constants[index].pNext = &description;
    constants[index].id = constant.id;
    constants[index].pConstantData = constant.data;
  }

  VkDataGraphPipelineShaderModuleCreateInfoARM graph{};
  graph.sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_SHADER_MODULE_CREATE_INFO_ARM;
  graph.module = segment->module;
  graph.pName = source.entry_point.c_str();
  graph.constantCount = static_cast<uint32_t>(constants.size());
  graph.pConstants = constants.data();
  VkDataGraphPipelineCreateInfoARM info{};
  info.sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_CREATE_INFO_ARM;
  info.pNext = &graph;
  info.layout = segment->layout;
  info.resourceInfoCount = static_cast<uint32_t>(resources.size());
  info.pResourceInfos = resources.data();
  result = fn.vkCreateDataGraphPipelinesARM(device, VK_NULL_HANDLE, device_->pipeline_cache(), 1, &info, nullptr,
                                            &segment->pipeline);
  if (result != VK_SUCCESS) {
    segment->pipeline = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateDataGraphPipelinesARM", result);
  }
  return Error::Ok;
}

Error VgfProgram::make_session(Segment* segment) {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  VkDataGraphPipelineSessionCreateInfoARM info{};
  info.sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_SESSION_CREATE_INFO_ARM;
  info.dataGraphPipeline = segment->pipeline;
  VkResult result = fn.vkCreateDataGraphPipelineSessionARM(device, &info, nullptr, &segment->session);
  if (result != VK_SUCCESS) {
    segment->session = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateDataGraphPipelineSessionARM", result);
  }

  VkDataGraphPipelineSessionBindPointRequirementsInfoARM query{};
  query.sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_SESSION_BIND_POINT_REQUIREMENTS_INFO_ARM;
  query.session = segment->session;
  uint32_t count = 0;
  result = fn.vkGetDataGraphPipelineSessionBindPointRequirementsARM(device, &query, &count, nullptr);
  VkDataGraphPipelineSessionBindPointRequirementARM blank{};
  blank.sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_SESSION_BIND_POINT_REQUIREMENT_ARM;
  std::vector<VkDataGraphPipelineSessionBindPointRequirementARM> points(count, blank);
  if (result == VK_SUCCESS && count > 0) {
    result = fn.vkGetDataGraphPipelineSessionBindPointRequirementsARM(device, &query, &count, points.data());
  }
  if (result != VK_SUCCESS) {
    return vulkan_failure("vkGetDataGraphPipelineSessionBindPointRequirementsARM", result);
  }
  for (const auto& point : points) {
    const Error error = bind_session_memory(point, segment);
    if (error != Error::Ok) {
      return error;
    }
  }
  return Error::Ok;
}

Error VgfProgram::bind_session_memory(const VkDataGraphPipelineSessionBindPointRequirementARM& point,
                                      Segment* segment) {
  if (point.bindPointType != VK_DATA_GRAPH_PIPELINE_SESSION_BIND_POINT_TYPE_MEMORY_ARM) {
    ARM_RUNTIME_LOG(Error, "the driver asks for a kind of bind point that this backend does not support (%d)",
                    static_cast<int>(point.bindPointType));
    return Error::NotSupported;
  }
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  for (uint32_t object = 0; object < point.numObjects; ++object) {
    VkDataGraphPipelineSessionMemoryRequirementsInfoARM query{};
    query.sType = VK_STRUCTURE_TYPE_DATA_GRAPH_PIPELINE_SESSION_MEMORY_REQUIREMENTS_INFO_ARM;
    query.session = segment->session;
    query.bindPoint = point.bindPoint;
    query.objectIndex = object;
    VkMemoryRequirements2 requirements{};
    requirements.sType = VK_STRUCTURE_TYPE_MEMORY_REQUIREMENTS_2;
    fn.vkGetDataGraphPipelineSessionMemoryRequirementsARM(device, &query, &requirements);
    if (requirements.memoryRequirements.size == 0) {
      continue;
    }
    VkDeviceMemory memory = VK_NULL_HANDLE;
    VkMemoryPropertyFlags properties = 0;
    const Error error = device_->allocate(requirements.memoryRequirements, 0, VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT,
                                          nullptr, "intermediate results", &memory, &properties);
    if (error != Error::Ok) {
      return error;
    }
    segment->memory.push_back(memory);
    VkBindDataGraphPipelineSessionMemoryInfoARM bind{};
    bind.sType = VK_STRUCTURE_TYPE_BIND_DATA_GRAPH_PIPELINE_SESSION_MEMORY_INFO_ARM;
    bind.session = segment->session;
    bind.bindPoint = point.bindPoint;
    bind.objectIndex = object;
    bind.memory = memory;
    const VkResult result = fn.vkBindDataGraphPipelineSessionMemoryARM(device, 1, &bind);
    if (result != VK_SUCCESS) {
      return vulkan_failure("vkBindDataGraphPipelineSessionMemoryARM", result);
    }
  }
  return Error::Ok;
}

Error VgfProgram::make_sets(const VgfSegment& source, Segment* segment) {
  if (source.bindings.empty()) {
    return Error::Ok;
  }
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  const auto set_count = static_cast<uint32_t>(segment->set_layouts.size());
  const VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_TENSOR_ARM, static_cast<uint32_t>(source.bindings.size())};
  VkDescriptorPoolCreateInfo pool{};
  pool.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO;
  pool.flags = VK_DESCRIPTOR_POOL_CREATE_FREE_DESCRIPTOR_SET_BIT;
  pool.maxSets = set_count;
  pool.poolSizeCount = 1;
  pool.pPoolSizes = &size;
  VkResult result = fn.vkCreateDescriptorPool(device, &pool, nullptr, &segment->pool);
  if (result != VK_SUCCESS) {
    segment->pool = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateDescriptorPool", result);
  }
  VkDescriptorSetAllocateInfo allocate{};
  allocate.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO;
  allocate.descriptorPool = segment->pool;
  allocate.descriptorSetCount = set_count;
  allocate.pSetLayouts = segment->set_layouts.data();
  segment->sets.resize(set_count);
  result = fn.vkAllocateDescriptorSets(device, &allocate, segment->sets.data());
  if (result != VK_SUCCESS) {
    segment->sets.clear();
    return vulkan_failure("vkAllocateDescriptorSets", result);
  }
  for (const VgfBinding& binding : source.bindings) {
    VkWriteDescriptorSetTensorARM tensor{};
    tensor.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET_TENSOR_ARM;
    tensor.tensorViewCount = 1;
    tensor.pTensorViews = &tensors_[binding.tensor].view;
    VkWriteDescriptorSet write{};
    write.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
    write.pNext = &tensor;
    write.dstSet = segment->sets[binding.set];
    write.dstBinding = binding.binding;
    write.descriptorCount = 1;
    write.descriptorType = VK_DESCRIPTOR_TYPE_TENSOR_ARM;
    fn.vkUpdateDescriptorSets(device, 1, &write, 0, nullptr);
  }
  return Error::Ok;
}

void VgfProgram::barrier(VkPipelineStageFlags2 stage, VkAccessFlags2 access) const {
  VkMemoryBarrier2 memory{};
  memory.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER_2;
  memory.srcStageMask = VK_PIPELINE_STAGE_2_DATA_GRAPH_BIT_ARM;
  memory.srcAccessMask = VK_ACCESS_2_DATA_GRAPH_WRITE_BIT_ARM;
  memory.dstStageMask = stage;
  memory.dstAccessMask = access;
  VkDependencyInfo dependency{};
  dependency.sType = VK_STRUCTURE_TYPE_DEPENDENCY_INFO;
  dependency.memoryBarrierCount = 1;
  dependency.pMemoryBarriers = &memory;
  device_->fn().vkCmdPipelineBarrier2(commands_, &dependency);
}

Error VgfProgram::wait_for_last_run() { return pending_ ? device_->wait(fence_, &pending_) : Error::Ok; }

Error VgfProgram::record() {
  const VulkanFunctions& fn = device_->fn();
  const VkDevice device = device_->handle();
  VkCommandPoolCreateInfo pool{};
  pool.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
  pool.queueFamilyIndex = device_->queue_family();
  VkResult result = fn.vkCreateCommandPool(device, &pool, nullptr, &command_pool_);
  if (result != VK_SUCCESS) {
    command_pool_ = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateCommandPool", result);
  }
  VkCommandBufferAllocateInfo allocate{};
  allocate.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
  allocate.commandPool = command_pool_;
  allocate.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  allocate.commandBufferCount = 1;
  result = fn.vkAllocateCommandBuffers(device, &allocate, &commands_);
  if (result != VK_SUCCESS) {
    commands_ = VK_NULL_HANDLE;
    return vulkan_failure("vkAllocateCommandBuffers", result);
  }
  VkFenceCreateInfo fence{};
  fence.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO;
  result = fn.vkCreateFence(device, &fence, nullptr, &fence_);
  if (result != VK_SUCCESS) {
    fence_ = VK_NULL_HANDLE;
    return vulkan_failure("vkCreateFence", result);
  }

  VkCommandBufferBeginInfo begin{};
  begin.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
  result = fn.vkBeginCommandBuffer(commands_, &begin);
  if (result != VK_SUCCESS) {
    return vulkan_failure("vkBeginCommandBuffer", result);
  }
  for (const Segment& segment : segments_) {
    // Submission makes the host's writes visible. Writes of an earlier segment need a barrier.
    if (&segment != segments_.data()) {
      barrier(VK_PIPELINE_STAGE_2_DATA_GRAPH_BIT_ARM,
              VK_ACCESS_2_DATA_GRAPH_READ_BIT_ARM | VK_ACCESS_2_DATA_GRAPH_WRITE_BIT_ARM);
    }
    fn.vkCmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_DATA_GRAPH_ARM, segment.pipeline);
    if (!segment.sets.empty()) {
      fn.vkCmdBindDescriptorSets(commands_, VK_PIPELINE_BIND_POINT_DATA_GRAPH_ARM, segment.layout, 0,
                                 static_cast<uint32_t>(segment.sets.size()), segment.sets.data(), 0, nullptr);
    }
    fn.vkCmdDispatchDataGraphARM(commands_, segment.session, nullptr);
  }
  barrier(VK_PIPELINE_STAGE_2_HOST_BIT, VK_ACCESS_2_HOST_READ_BIT);
  result = fn.vkEndCommandBuffer(commands_);
  return result == VK_SUCCESS ? Error::Ok : vulkan_failure("vkEndCommandBuffer", result);
}

void VgfProgram::retire(std::unique_ptr<VgfProgram> program) {
  program->wait_for_last_run();
  if (!program->pending_) {
    return;
  }
  // The program is never freed, because the device may still write its memory. The static variable keeps the program
  // reachable for leak checkers.
  static auto* const abandoned = new std::vector<std::unique_ptr<VgfProgram>>;
  static auto* const mutex = new std::mutex;
  ARM_RUNTIME_LOG(Error, "an execution is still running; the memory of its program stays in use");
  const std::lock_guard<std::mutex> lock(*mutex);
  abandoned->push_back(std::move(program));
}

Error VgfProgram::run() {
  const VulkanFunctions& fn = device_->fn();
  const auto ranges = static_cast<uint32_t>(non_coherent_.size());
  if (ranges > 0) {
    const VkResult result = fn.vkFlushMappedMemoryRanges(device_->handle(), ranges, non_coherent_.data());
    if (result != VK_SUCCESS) {
      return vulkan_failure("vkFlushMappedMemoryRanges", result);
    }
  }
  Error error = device_->submit(commands_, fence_);
  if (error == Error::Ok) {
    error = device_->wait(fence_, &pending_);
  }
  if (error == Error::Ok && ranges > 0) {
    const VkResult result = fn.vkInvalidateMappedMemoryRanges(device_->handle(), ranges, non_coherent_.data());
    if (result != VK_SUCCESS) {
      return vulkan_failure("vkInvalidateMappedMemoryRanges", result);
    }
  }
  return error;
}

}  // namespace arm_runtime
