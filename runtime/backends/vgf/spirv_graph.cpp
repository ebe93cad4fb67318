// SPDX-License-Identifier: Apache-2.0
// Parser of the tensor interface of a SPIR-V graph. The numbers of opcodes and decorations are those of the SPIR-V
// specification with SPV_ARM_tensors, SPV_ARM_graph and SPV_EXT_replicated_composites.
#include "backends/vgf/spirv_graph.h"

#include <cstring>
#include <unordered_map>

namespace arm_runtime {
namespace {

constexpr uint32_t kMagic = 0x07230203;
constexpr size_t kHeaderWords = 5;
// SPIR-V's universal limit on result ids. A larger bound is refused, because drivers may allocate memory in proportion
// to it.
constexpr uint32_t kMaxBound = 0x3FFFFF;
constexpr size_t kMaxRank = 16;

enum Opcode : uint32_t {
  kOpExtInstImport = 11,
  kOpExtInst = 12,
  kOpTypeBool = 20,
  kOpTypeInt = 21,
  kOpTypeFloat = 22,
  kOpTypeArray = 28,
  kOpTypeStruct = 30,
  kOpTypePointer = 32,
  kOpConstantTrue = 41,
  kOpConstantFalse = 42,
  kOpConstant = 43,
  kOpConstantComposite = 44,
  kOpConstantNull = 46,
  kOpVariable = 59,
  kOpDecorate = 71,
  kOpCompositeConstruct = 80,
  kOpCompositeExtract = 81,
  kOpTypeTensor = 4163,
  kOpGraphConstant = 4181,
  kOpGraphEntryPoint = 4182,
  kOpGraphInput = 4184,
  kOpConstantCompositeReplicate = 4461,
};

constexpr uint32_t kDecorationBinding = 33;
constexpr uint32_t kDecorationDescriptorSet = 34;

// An instruction. words[0] contains length and opcode.
struct Instruction {
  const uint32_t* words = nullptr;
  uint32_t count = 0;

  uint32_t opcode() const { return words[0] & 0xFFFF; }
};

struct Decorations {
  uint32_t set = 0;
  uint32_t binding = 0;
  bool has_set = false;
  bool has_binding = false;
};

// Kind of a definition. kNone: the id is not defined. kValue: a value of the graph, such as the result of an operation.
enum class Kind : uint8_t { kNone, kType, kConstant, kValue, kOther };

// Layout of an instruction that defines an id: the minimum number of words, the index of the word with the id, and the
// kind of the definition. Of instructions without a layout, only entry points and decorations are read.
struct Layout {
  Opcode opcode;
  uint32_t min_words;
  uint32_t result;
  Kind kind;
};

constexpr Layout kLayouts[] = {
    {kOpExtInstImport, 3, 1, Kind::kOther},
    {kOpExtInst, 5, 2, Kind::kValue},
    {kOpTypeBool, 2, 1, Kind::kType},
    {kOpTypeInt, 4, 1, Kind::kType},
    {kOpTypeFloat, 3, 1, Kind::kType},
    {kOpTypeArray, 4, 1, Kind::kType},
    {kOpTypeStruct, 2, 1, Kind::kType},
    {kOpTypePointer, 4, 1, Kind::kType},
    {kOpConstantTrue, 3, 2, Kind::kConstant},
    {kOpConstantFalse, 3, 2, Kind::kConstant},
    {kOpConstant, 4, 2, Kind::kConstant},
    {kOpConstantComposite, 3, 2, Kind::kConstant},
    {kOpConstantNull, 3, 2, Kind::kConstant},
    {kOpVariable, 4, 2, Kind::kOther},
    {kOpCompositeConstruct, 3, 2, Kind::kValue},
    {kOpCompositeExtract, 5, 2, Kind::kValue},
    {kOpTypeTensor, 5, 1, Kind::kType},
    {kOpGraphConstant, 4, 2, Kind::kValue},
    {kOpGraphInput, 4, 2, Kind::kValue},
    {kOpConstantCompositeReplicate, 4, 2, Kind::kConstant},
};

Layout layout_of(uint32_t opcode) {
  for (const Layout& layout : kLayouts) {
    if (layout.opcode == opcode) {
      return layout;
    }
  }
  return {kOpExtInst, 0, 0, Kind::kNone};
}

class Module {
 public:
  const char* scan(const uint32_t* words, size_t count);
  const char* read(std::string_view name, SpirvGraph* graph) const;

 private:
  const char* visit(const Instruction& instruction);
  // Whether the operands of a definition are defined and of the right kind.
  bool is_valid(const Instruction& instruction, const Layout& layout) const;
  // Whether the words from `first` on are ids of constants. With `with_values`, ids of the graph's values are accepted
  // too.
  bool are_defined(const Instruction& instruction, uint32_t first, bool with_values) const;
  Kind kind_of(uint32_t id) const;
  // Returns the definition of `id`, or null if it is not an instruction with `opcode`.
  const Instruction* find(uint32_t id, uint32_t opcode) const;
  // Reads a constant from 1 to INT32_MAX: a dimension, a rank or the length of an array.
  bool read_positive_constant(uint32_t id, uint32_t* value) const;
  bool read_shape(uint32_t id, uint32_t rank, std::vector<int64_t>* shape) const;
  // Reads a tensor type. Returns false if `type` is not a tensor type with a fixed shape.
  bool read_tensor_type(uint32_t type, SpirvTensor* tensor) const;
  const char* read_resource(uint32_t variable, SpirvResource* resource) const;

  uint32_t bound_ = 0;
  std::unordered_map<uint32_t, Instruction> definitions_;
  std::unordered_map<uint32_t, Decorations> decorations_;
  std::vector<Instruction> entry_points_;
  std::vector<Instruction> constants_;
};

// Returns the number of words of a literal string, including its terminator, or 0 if it does not end within `count`
// words.
uint32_t string_words(const uint32_t* words, uint32_t count, std::string_view* text) {
  const char* bytes = reinterpret_cast<const char*>(words);
  const size_t length = strnlen(bytes, size_t{count} * 4);
  if (length == size_t{count} * 4) {
    return 0;
  }
  *text = std::string_view(bytes, length);
  return static_cast<uint32_t>(length / 4 + 1);
}

const char* Module::scan(const uint32_t* words, size_t count) {
  if (count < kHeaderWords || words[0] != kMagic) {
    return "it does not start with a SPIR-V header";
  }
  bound_ = words[3];
  if (bound_ == 0 || bound_ > kMaxBound) {
    return "the bound of its ids is out of range";
  }
  for (size_t at = kHeaderWords; at < count;) {
    const Instruction instruction{words + at, words[at] >> 16};
    if (instruction.count == 0 || instruction.count > count - at) {
      return "an instruction has a wrong length";
    }
    if (const char* reason = visit(instruction)) {
      return reason;
    }
    at += instruction.count;
  }
  return nullptr;
}

const char* Module::visit(const Instruction& instruction) {
  const uint32_t opcode = instruction.opcode();
  const Layout layout = layout_of(opcode);
  if (instruction.count < layout.min_words) {
    return "an instruction is too short";
  }
  if (!is_valid(instruction, layout)) {
    return "an operand of an instruction is undefined or of the wrong kind";
  }
  if (layout.result != 0) {
    const uint32_t id = instruction.words[layout.result];
    if (id == 0 || id >= bound_ || !definitions_.emplace(id, instruction).second) {
      return "a result id is out of range or used twice";
    }
  }
  if (opcode == kOpGraphConstant) {
    constants_.push_back(instruction);
  } else if (opcode == kOpGraphEntryPoint) {
    entry_points_.push_back(instruction);
  } else if (opcode == kOpDecorate && instruction.count == 4) {
    Decorations& decorations = decorations_[instruction.words[1]];
    if (instruction.words[2] == kDecorationDescriptorSet) {
      decorations.set = instruction.words[3];
      decorations.has_set = true;
    } else if (instruction.words[2] == kDecorationBinding) {
      decorations.binding = instruction.words[3];
      decorations.has_binding = true;
    }
  }
  return nullptr;
}

Kind Module::kind_of(uint32_t id) const {
  const auto found = definitions_.find(id);
  return found == definitions_.end() ? Kind::kNone : layout_of(found->second.opcode()).kind;
}

bool Module::is_valid(const Instruction& instruction, const Layout& layout) const {
  const uint32_t* words = instruction.words;
  // If the result is the second operand, the first one is its type.
  if (layout.result == 2 && kind_of(words[1]) != Kind::kType) {
    return false;
  }
  SpirvTensor tensor;
  if (instruction.opcode() == kOpExtInst) {
    // Operations with several results have a structure type.
    return find(words[3], kOpExtInstImport) != nullptr &&
           (find(words[1], kOpTypeStruct) != nullptr || read_tensor_type(words[1], &tensor)) &&
           are_defined(instruction, 5, true);
  }
  if (instruction.opcode() == kOpConstantComposite) {
    const Instruction* array = find(words[1], kOpTypeArray);
    uint32_t length = 0;
    if (array != nullptr ? !read_positive_constant(array->words[3], &length) : !read_tensor_type(words[1], &tensor)) {
      return false;
    }
    return instruction.count - 3 == (array != nullptr ? length : tensor.shape[0]) && are_defined(instruction, 3, false);
  }
  return instruction.opcode() != kOpConstantCompositeReplicate || are_defined(instruction, 3, false);
}

bool Module::are_defined(const Instruction& instruction, uint32_t first, bool with_values) const {
  for (uint32_t index = first; index < instruction.count; ++index) {
    const Kind kind = kind_of(instruction.words[index]);
    if (kind != Kind::kConstant && !(with_values && kind == Kind::kValue)) {
      return false;
    }
  }
  return true;
}

const Instruction* Module::find(uint32_t id, uint32_t opcode) const {
  const auto found = definitions_.find(id);
  return found != definitions_.end() && found->second.opcode() == opcode ? &found->second : nullptr;
}

bool Module::read_positive_constant(uint32_t id, uint32_t* value) const {
  const Instruction* constant = find(id, kOpConstant);
  // A 64-bit literal starts with its low word. The high word must be 0, because dimensions fit in 31 bits.
  if (constant == nullptr || (constant->count > 4 && constant->words[4] != 0)) {
    return false;
  }
  *value = constant->words[3];
  return *value != 0 && *value <= INT32_MAX;
}

bool Module::read_shape(uint32_t id, uint32_t rank, std::vector<int64_t>* shape) const {
  const Instruction* listed = find(id, kOpConstantComposite);
  const Instruction* repeated = find(id, kOpConstantCompositeReplicate);
  if ((listed == nullptr || listed->count - 3 != rank) && repeated == nullptr) {
    return false;
  }
  for (uint32_t index = 0; index < rank; ++index) {
    uint32_t value = 0;
    if (!read_positive_constant(listed != nullptr ? listed->words[3 + index] : repeated->words[3], &value)) {
      return false;
    }
    shape->push_back(value);
  }
  return true;
}

bool Module::read_tensor_type(uint32_t type, SpirvTensor* tensor) const {
  const Instruction* definition = find(type, kOpTypeTensor);
  uint32_t rank = 0;
  if (definition == nullptr || !read_positive_constant(definition->words[3], &rank) || rank > kMaxRank) {
    return false;
  }
  const uint32_t element = definition->words[2];
  if (const Instruction* integer = find(element, kOpTypeInt)) {
    tensor->element_size = integer->words[2] / 8;
  } else if (const Instruction* floating = find(element, kOpTypeFloat)) {
    tensor->element_size = floating->words[2] / 8;
    tensor->is_float = true;
  } else if (find(element, kOpTypeBool) != nullptr) {
    tensor->element_size = 1;
  } else {
    return false;
  }
  return read_shape(definition->words[4], rank, &tensor->shape);
}

const char* Module::read_resource(uint32_t id, SpirvResource* resource) const {
  const Instruction* variable = find(id, kOpVariable);
  const Instruction* pointer = variable != nullptr ? find(variable->words[1], kOpTypePointer) : nullptr;
  if (pointer == nullptr || !read_tensor_type(pointer->words[3], &resource->tensor)) {
    return "an input or output of its graph is not a tensor with a fixed shape";
  }
  const auto decorations = decorations_.find(id);
  if (decorations == decorations_.end() || !decorations->second.has_set || !decorations->second.has_binding) {
    return "an input or output of its graph has no descriptor set or binding";
  }
  resource->set = decorations->second.set;
  resource->binding = decorations->second.binding;
  return nullptr;
}

const char* Module::read(std::string_view name, SpirvGraph* graph) const {
  for (const Instruction& constant : constants_) {
    SpirvConstant entry;
    entry.id = constant.words[3];
    if (!read_tensor_type(constant.words[1], &entry.tensor)) {
      return "a graph constant is not a tensor with a fixed shape";
    }
    graph->constants.push_back(entry);
  }
  for (const Instruction& entry_point : entry_points_) {
    std::string_view text;
    const uint32_t length =
        entry_point.count > 2 ? string_words(entry_point.words + 2, entry_point.count - 2, &text) : 0;
    if (length == 0 || text != name) {
      continue;
    }
    for (uint32_t index = 2 + length; index < entry_point.count; ++index) {
      SpirvResource resource;
      if (const char* reason = read_resource(entry_point.words[index], &resource)) {
        return reason;
      }
      graph->resources.push_back(resource);
    }
    return nullptr;
  }
  return "it has no graph with the name of the entry point";
}

}  // namespace

const char* read_spirv_graph(const uint32_t* words, size_t word_count, std::string_view name, SpirvGraph* graph) {
  Module module;
  if (const char* reason = module.scan(words, word_count)) {
    return reason;
  }
  return module.read(name, graph);
}

}  // namespace arm_runtime
