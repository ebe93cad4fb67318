// SPDX-License-Identifier: Apache-2.0
#include "backends/vgf/vgf_file.h"

#include <cinttypes>
#include <cstring>
#include <memory>
#include <vgf/decoder.hpp>

#include "backends/vgf/spirv_graph.h"
#include "common/executorch.h"
#include "common/log.h"

#define ARM_RUNTIME_BACKEND_ID "VgfBackend"

namespace arm_runtime {

namespace vgflib = mlsdk::vgflib;

namespace {

// Alignment of the payload. libvgf reads the 64-bit numbers of the constant section in place, without a copy.
constexpr uintptr_t kAlignment = 8;
constexpr int32_t kTensorDescriptor = static_cast<int32_t>(VK_DESCRIPTOR_TYPE_TENSOR_ARM);

struct Format {
  VkFormat format;
  ScalarType scalar_type;
  uint32_t size;
  bool is_float;
};

constexpr Format kFormats[] = {
    {VK_FORMAT_R8_BOOL_ARM, ScalarType::Bool, 1, false},
    {VK_FORMAT_R8_SINT, ScalarType::Char, 1, false},
    {VK_FORMAT_R8_UINT, ScalarType::Byte, 1, false},
    {VK_FORMAT_R16_SINT, ScalarType::Short, 2, false},
    {VK_FORMAT_R16_UINT, ScalarType::UInt16, 2, false},
    {VK_FORMAT_R32_SINT, ScalarType::Int, 4, false},
    {VK_FORMAT_R32_UINT, ScalarType::UInt32, 4, false},
    {VK_FORMAT_R64_SINT, ScalarType::Long, 8, false},
    {VK_FORMAT_R16_SFLOAT, ScalarType::Half, 2, true},
    {VK_FORMAT_R16_SFLOAT_FPENCODING_BFLOAT16_ARM, ScalarType::BFloat16, 2, true},
    {VK_FORMAT_R32_SFLOAT, ScalarType::Float, 4, true},
    {VK_FORMAT_R64_SFLOAT, ScalarType::Double, 8, true},
};

const Format* find_format(int32_t format) {
  for (const Format& entry : kFormats) {
    if (static_cast<int32_t>(entry.format) == format) {
      return &entry;
    }
  }
  return nullptr;
}

// Copies the numbers of a view. The numbers may be unaligned.
std::vector<int64_t> copy_numbers(const vgflib::DataView<int64_t>& view) {
  std::vector<int64_t> numbers(view.size());
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), view.data(), numbers.size() * sizeof(int64_t));
  }
  return numbers;
}

Error report_damage(const char* what, uint64_t index) {
  ARM_RUNTIME_LOG(Error, "the payload is damaged: %s (index %" PRIu64 "); export the program again", what, index);
  return Error::InvalidProgram;
}

Error report_unsupported(const char* what, uint64_t index) {
  ARM_RUNTIME_LOG(Error, "%s (index %" PRIu64 ") is not supported: only SPIR-V graphs on packed tensors are", what,
                  index);
  return Error::NotSupported;
}

// Reads the sections of a file.
class VgfReader {
 public:
  explicit VgfReader(VgfFile* file) : file_(*file) {}

  Error read(const uint8_t* data, size_t size) {
    Error error = open(data, size);
    if (error == Error::Ok) {
      error = read_tensors();
    }
    if (error == Error::Ok) {
      error = read_slots(sequence_->getModelSequenceInputBindingSlotsHandle(), &file_.inputs);
    }
    if (error == Error::Ok) {
      error = read_slots(sequence_->getModelSequenceOutputBindingSlotsHandle(), &file_.outputs);
    }
    const auto count = static_cast<uint32_t>(sequence_ != nullptr ? sequence_->modelSequenceTableSize() : 0);
    for (uint32_t index = 0; error == Error::Ok && index < count; ++index) {
      error = read_segment(index);
    }
    if (error == Error::Ok && (file_.segments.empty() || file_.outputs.empty())) {
      return report_damage("it has no segments or no outputs", file_.segments.size());
    }
    return error;
  }

 private:
  Error open(const uint8_t* data, size_t size);
  Error read_tensors();
  Error read_tensor(uint32_t index);
  Error read_slots(vgflib::BindingSlotArrayHandle slots, std::vector<uint32_t>* tensors);
  Error read_segment(uint32_t index);
  Error read_module(uint32_t index, VgfSegment* segment);
  Error read_bindings(uint32_t index, VgfSegment* segment);
  Error read_constants(uint32_t index, VgfSegment* segment);
  Error check_module(uint32_t index, const VgfSegment& segment);
  bool matches(const SpirvTensor& expected, uint32_t tensor) const;

  VgfFile& file_;
  std::unique_ptr<vgflib::HeaderDecoder> header_;
  std::unique_ptr<vgflib::ModuleTableDecoder> modules_;
  std::unique_ptr<vgflib::ModelSequenceTableDecoder> sequence_;
  std::unique_ptr<vgflib::ModelResourceTableDecoder> resources_;
  std::unique_ptr<vgflib::ConstantDecoder> constants_;
};

Error VgfReader::open(const uint8_t* data, size_t size) {
  if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) {
    ARM_RUNTIME_LOG(Error, "the payload lies at an address that is not a multiple of 8; load the program into "
                           "aligned memory");
    return Error::InvalidArgument;
  }
  // libvgf checks that the sections are inside the file, at multiples of 8.
  header_ = vgflib::CreateHeaderDecoder(data, vgflib::HeaderSize(), size);
  if (header_ == nullptr) {
    ARM_RUNTIME_LOG(Error,
                    "the payload of %zu bytes has no VGF header that libvgf reads: too short, wrong magic, "
                    "another version, or sections beyond its end; export the program again",
                    size);
    return Error::DelegateInvalidCompatibility;
  }
  const uint64_t offsets[] = {header_->GetModuleTableOffset(), header_->GetModelSequenceTableOffset(),
                              header_->GetModelResourceTableOffset(), header_->GetConstantsOffset()};
  modules_ = vgflib::CreateModuleTableDecoder(data + offsets[0], header_->GetModuleTableSize());
  sequence_ = vgflib::CreateModelSequenceTableDecoder(data + offsets[1], header_->GetModelSequenceTableSize());
  resources_ = vgflib::CreateModelResourceTableDecoder(data + offsets[2], header_->GetModelResourceTableSize());
  constants_ = vgflib::CreateConstantDecoder(data + offsets[3], header_->GetConstantsSize());
  if (modules_ == nullptr || sequence_ == nullptr || resources_ == nullptr || constants_ == nullptr) {
    const int section = modules_ == nullptr ? 0 : sequence_ == nullptr ? 1 : resources_ == nullptr ? 2 : 3;
    return report_damage("a section (0 modules, 1 sequence, 2 resources, 3 constants) is not well formed",
                         static_cast<uint64_t>(section));
  }
  return Error::Ok;
}

Error VgfReader::read_tensors() {
  const auto count = static_cast<uint32_t>(resources_->size());
  file_.tensors.resize(count);
  for (uint32_t index = 0; index < count; ++index) {
    const Error error = read_tensor(index);
    if (error != Error::Ok) {
      return error;
    }
  }
  return Error::Ok;
}

Error VgfReader::read_tensor(uint32_t index) {
  VgfTensor& tensor = file_.tensors[index];
  tensor.is_constant = resources_->getCategory(index) == vgflib::ResourceCategory::CONSTANT;
  if (!tensor.is_constant && resources_->getDescriptorType(index) != kTensorDescriptor) {
    return report_unsupported("a resource that is not a tensor", index);
  }
  if (resources_->getAliasGroupId(index).has_value()) {
    return report_unsupported("a resource that shares its storage with another", index);
  }
  const Format* format = find_format(resources_->getVkFormat(index));
  if (format == nullptr) {
    return report_unsupported("a tensor's element type", index);
  }
  tensor.format = format->format;
  tensor.scalar_type = format->scalar_type;
  tensor.nbytes = format->size;
  tensor.shape = copy_numbers(resources_->getTensorShape(index));
  if (tensor.shape.empty()) {  // a scalar: Vulkan and SPIR-V have no tensors without dimensions
    tensor.shape.push_back(1);
  }
  for (const int64_t dimension : tensor.shape) {
    if (dimension <= 0 || __builtin_mul_overflow(tensor.nbytes, static_cast<size_t>(dimension), &tensor.nbytes)) {
      return report_damage("a tensor has a dimension that is not positive, or too many elements", index);
    }
  }
  const std::vector<int64_t> strides = copy_numbers(resources_->getTensorStride(index));
  size_t packed = format->size;
  for (size_t left = strides.size(); left > 0; --left) {
    if (strides.size() != tensor.shape.size() || strides[left - 1] != static_cast<int64_t>(packed)) {
      return report_unsupported("a tensor with gaps between its elements", index);
    }
    packed *= static_cast<size_t>(tensor.shape[left - 1]);
  }
  return Error::Ok;
}

Error VgfReader::read_slots(vgflib::BindingSlotArrayHandle slots, std::vector<uint32_t>* tensors) {
  const auto count = static_cast<uint32_t>(sequence_->getBindingsSize(slots));
  for (uint32_t index = 0; index < count; ++index) {
    const uint32_t tensor = sequence_->getBindingSlotMrtIndex(slots, index);
    if (tensor >= file_.tensors.size() || file_.tensors[tensor].is_constant) {
      return report_damage("an input or output of the model does not exist or is constant", index);
    }
    tensors->push_back(tensor);
  }
  return Error::Ok;
}

Error VgfReader::read_segment(uint32_t index) {
  if (sequence_->getSegmentType(index) != vgflib::ModuleType::GRAPH) {
    return report_unsupported("a compute shader segment", index);
  }
  VgfSegment segment;
  segment.name = std::string(sequence_->getSegmentName(index));
  Error error = read_module(index, &segment);
  if (error == Error::Ok) {
    error = read_bindings(index, &segment);
  }
  if (error == Error::Ok) {
    error = read_constants(index, &segment);
  }
  if (error == Error::Ok) {
    error = check_module(index, segment);
  }
  if (error == Error::Ok) {
    file_.segments.push_back(std::move(segment));
  }
  return error;
}

Error VgfReader::read_module(uint32_t index, VgfSegment* segment) {
  const uint32_t module = sequence_->getSegmentModuleIndex(index);
  if (module >= modules_->size()) {
    return report_damage("a segment refers to a module that does not exist", index);
  }
  if (modules_->getModuleType(module) != vgflib::ModuleType::GRAPH || !modules_->isSPIRV(module) ||
      !modules_->hasSPIRVCode(module)) {
    return report_unsupported("a module without SPIR-V code for a graph", module);
  }
  const auto code = modules_->getSPIRVModuleCode(module);
  segment->code = code.data();
  segment->word_count = code.size();
  segment->entry_point = std::string(modules_->getModuleEntryPoint(module));
  return Error::Ok;
}

Error VgfReader::read_bindings(uint32_t index, VgfSegment* segment) {
  const auto sets = static_cast<uint32_t>(sequence_->getSegmentDescriptorSetInfosSize(index));
  for (uint32_t info = 0; info < sets; ++info) {
    const uint32_t set = sequence_->getSegmentDescriptorSetIndex(index, info);
    const auto slots = sequence_->getDescriptorBindingSlotsHandle(index, info);
    const auto count = static_cast<uint32_t>(sequence_->getBindingsSize(slots));
    for (uint32_t slot = 0; slot < count; ++slot) {
      const VgfBinding binding{set, sequence_->getBindingSlotBinding(slots, slot),
                               sequence_->getBindingSlotMrtIndex(slots, slot)};
      if (binding.tensor >= file_.tensors.size() || file_.tensors[binding.tensor].is_constant) {
        return report_damage("a segment binds a tensor that does not exist or is constant", index);
      }
      for (const VgfBinding& other : segment->bindings) {
        if (other.set == binding.set && other.binding == binding.binding) {
          return report_damage("a segment binds two tensors to the same binding", index);
        }
      }
      segment->bindings.push_back(binding);
    }
  }
  return Error::Ok;
}

Error VgfReader::read_constants(uint32_t index, VgfSegment* segment) {
  const auto bindings = sequence_->getSegmentConstantBindingsHandle(index);
  const auto count = static_cast<uint32_t>(sequence_->getGraphConstantBindingsSize(bindings));
  for (uint32_t entry = 0; entry < count; ++entry) {
    const vgflib::GraphConstantBinding binding = sequence_->getGraphConstantBinding(bindings, entry);
    if (binding.constantIndex >= constants_->size()) {
      return report_damage("a segment refers to a constant that does not exist", index);
    }
    const VgfConstant constant{binding.graphConstantId, constants_->getConstantMrtIndex(binding.constantIndex),
                               constants_->getConstant(binding.constantIndex).data(),
                               constants_->isSparseConstant(binding.constantIndex)
                                   ? constants_->getConstantSparsityDimension(binding.constantIndex)
                                   : -1};
    if (constant.tensor >= file_.tensors.size() || !file_.tensors[constant.tensor].is_constant) {
      return report_damage("the tensor of a constant does not exist or is not constant", binding.constantIndex);
    }
    const VgfTensor& tensor = file_.tensors[constant.tensor];
    if (constants_->getConstant(binding.constantIndex).size() != tensor.nbytes) {
      return report_damage("the size of a constant differs from the size of its tensor", binding.constantIndex);
    }
    if (constant.sparse_dimension >= static_cast<int64_t>(tensor.shape.size())) {
      return report_damage("a constant is sparse in a dimension that it does not have", binding.constantIndex);
    }
    for (const VgfConstant& other : segment->constants) {
      if (other.id == constant.id) {
        return report_damage("two constants of a segment have the same id", constant.id);
      }
    }
    segment->constants.push_back(constant);
  }
  return Error::Ok;
}

bool VgfReader::matches(const SpirvTensor& expected, uint32_t index) const {
  const VgfTensor& tensor = file_.tensors[index];
  const Format* format = find_format(static_cast<int32_t>(tensor.format));
  return format->size == expected.element_size && format->is_float == expected.is_float &&
         tensor.shape == expected.shape;
}

Error VgfReader::check_module(uint32_t index, const VgfSegment& segment) {
  SpirvGraph graph;
  if (const char* reason = read_spirv_graph(segment.code, segment.word_count, segment.entry_point, &graph)) {
    ARM_RUNTIME_LOG(Error, "the SPIR-V module of segment %u is damaged: %s; export the program again",
                    static_cast<unsigned>(index), reason);
    return Error::InvalidProgram;
  }
  for (const SpirvResource& resource : graph.resources) {
    bool found = false;
    for (const VgfBinding& binding : segment.bindings) {
      found = found || (binding.set == resource.set && binding.binding == resource.binding &&
                        matches(resource.tensor, binding.tensor));
    }
    if (!found) {
      return report_damage("the tensor at a binding is missing, or differs from the graph in type or shape",
                           resource.binding);
    }
  }
  if (graph.resources.size() != segment.bindings.size()) {
    return report_damage("a segment has another number of bindings than its graph", index);
  }
  for (const SpirvConstant& constant : graph.constants) {
    bool found = false;
    for (const VgfConstant& given : segment.constants) {
      found = found || (given.id == constant.id && matches(constant.tensor, given.tensor));
    }
    if (!found) {
      return report_damage("the constant with an id is missing, or differs from the graph in type or shape",
                           constant.id);
    }
  }
  return Error::Ok;
}

}  // namespace

Error read_vgf(const void* data, size_t size, VgfFile* file) {
  return VgfReader(file).read(static_cast<const uint8_t*>(data), size);
}

}  // namespace arm_runtime
