// SPDX-License-Identifier: Apache-2.0
// Calls VgfBackend as the ExecuTorch runtime does, on this machine's Vulkan.
//
// Usage: backend_test VGF INPUT OUTPUT [CASE]. The model has one int8 input and one int8 output; the files INPUT and
// OUTPUT contain their bytes. CASE, if given, is the name of a case to leave out. Prints "ok" for each case and aborts
// at the first failed check.
#include <dlfcn.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <sanitizer/lsan_interface.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/vgf/vulkan_device.h"
#include "common/checksum.h"
#include "common/executorch.h"
#include "tests/recording_tracer.h"

namespace {

using namespace arm_runtime;
using executorch::aten::TensorImpl;

void check(bool condition, const char* what) {
  if (!condition) {
    std::printf("failed: %s\n", what);
    std::fflush(stdout);
    std::abort();
  }
}

std::vector<std::string> logged;

// Records and prints log lines of errors.
void record_errors(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* message,
                   size_t length) {
  if (level == kError || level == kFatal) {
    logged.emplace_back(message, length);
    std::fprintf(stderr, "%s\n", logged.back().c_str());
  }
}

std::vector<char> bytes_of(const char* path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

// A 1D tensor: the backend compares only bytes and element types.
struct Argument {
  std::vector<char> data;
  TensorImpl::SizesType size;
  TensorImpl::DimOrderType order = 0;
  TensorImpl::StridesType stride = 1;
  TensorImpl impl;
  EValue value;

  Argument(std::vector<char> bytes, ScalarType type)
      : data(std::move(bytes)),
        size(static_cast<TensorImpl::SizesType>(data.size() / executorch::runtime::elementSize(type))),
        impl(type, 1, &size, data.data(), &order, &stride),
        value(Tensor(&impl)) {}
};

struct Model {
  std::vector<char> vgf;
  std::vector<char> input;
  std::vector<char> output;
};

class Program {
 public:
  explicit Program(const Model& model) : model_(model), copy_(model.vgf) {
    FreeableBuffer payload(
        copy_.data(), copy_.size(),
        [](void* context, void*, size_t) {
          static_cast<std::vector<char>*>(context)->assign(1, 0);  // init must not keep pointers into the payload
        },
        &copy_);
    BackendInitContext context(nullptr);
    uint32_t checksum = crc32(copy_.data(), copy_.size());
    const CompileSpec spec{"payload_crc32", {&checksum, 4}};
    auto handle = backend()->init(context, &payload, {&spec, 1});
    check(handle.ok(), "init");
    check(copy_.size() == 1, "the payload is freed");
    handle_ = handle.get();
  }
  ~Program() { backend()->destroy(handle_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  static BackendInterface* backend() {
    BackendInterface* found = executorch::runtime::get_backend_class("VgfBackend");
    check(found != nullptr && found->is_available(), "VgfBackend is registered and available");
    return found;
  }

  Error execute(std::vector<EValue*> arguments, RecordingTracer* tracer = nullptr) const {
    BackendExecutionContext context(tracer);
    return backend()->execute(context, handle_, Span<EValue*>(arguments.data(), arguments.size()));
  }

  void run() const {
    Argument input(model_.input, ScalarType::Char);
    Argument output(std::vector<char>(model_.output.size(), 99), ScalarType::Char);
    check(execute({&input.value, &output.value}) == Error::Ok, "execute");
    check(output.data == model_.output, "the output has the expected bits");
  }

 private:
  const Model& model_;
  std::vector<char> copy_;
  DelegateHandle* handle_ = nullptr;
};

void test_repeated_runs(const Model& model) {
  const Program program(model);
  for (int turn = 0; turn < 20; ++turn) {
    program.run();
  }
}

void test_wrong_arguments(const Model& model) {
  const Program program(model);
  Argument input(model.input, ScalarType::Char);
  Argument output(model.output, ScalarType::Char);
  Argument bool_input(model.input, ScalarType::Bool);
  Argument short_input(std::vector<char>(model.input.begin() + 1, model.input.end()), ScalarType::Char);
  Argument long_output(std::vector<char>(model.output.size() + 1), ScalarType::Char);
  EValue number(int64_t{1});
  check(program.execute({&input.value}) == Error::InvalidArgument, "too few arguments");
  check(program.execute({&input.value, &output.value, &output.value}) == Error::InvalidArgument, "too many arguments");
  check(program.execute({&bool_input.value, &output.value}) == Error::InvalidArgument, "wrong element type");
  check(program.execute({&short_input.value, &output.value}) == Error::InvalidArgument, "input too short");
  check(program.execute({&input.value, &long_output.value}) == Error::InvalidArgument, "output too long");
  check(program.execute({&number, &output.value}) == Error::InvalidArgument, "not a tensor");
  program.run();
}

void test_uint8_argument(const Model& model) {
  const Program program(model);
  Argument input(model.input, ScalarType::Byte);
  Argument output(model.output, ScalarType::Char);
  check(program.execute({&input.value, &output.value}) == Error::Ok, "a uint8 tensor for an int8 input");
}

void test_two_programs(const Model& model) {
  auto first = std::make_unique<Program>(model);
  const Program second(model);
  first->run();
  second.run();
  first.reset();
  second.run();
}

void test_two_threads(const Model& model) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&model] {
      const Program program(model);
      for (int turn = 0; turn < 20; ++turn) {
        program.run();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void test_checksum(const Model& model) {
  const auto load = [](std::vector<char> vgf, uint32_t checksum, size_t spec_size) {
    FreeableBuffer payload(vgf.data(), vgf.size(), nullptr);
    BackendInitContext context(nullptr);
    const CompileSpec spec{"payload_crc32", {&checksum, spec_size}};
    logged.clear();
    return Program::backend()->init(context, &payload, {&spec, 1}).error();
  };
  const uint32_t recorded = crc32(model.vgf.data(), model.vgf.size());
  // A damaged constant: without the checksum, the file would load, and the result would be wrong.
  std::vector<char> changed = model.vgf;
  changed.back() = static_cast<char>(changed.back() ^ 1);
  check(load(changed, recorded, 4) == Error::InvalidProgram, "a flipped bit is refused");
  check(logged.size() == 1 && logged[0].find("VgfBackend: the payload of") == 0 &&
            logged[0].find("has changed since it was exported") != std::string::npos,
        "exactly one line is logged");
  check(load(model.vgf, recorded, 3) == Error::InvalidProgram, "a checksum of 3 bytes is refused");
  check(logged.size() == 1 && logged[0].find("payload_crc32 of 3 bytes, not 4") != std::string::npos,
        "exactly one line is logged");
}

// Some Vulkan functions of the application's device are replaced by the functions below. Hooks determines how these
// functions change the results of the device, and records the backend's calls.
struct Hooks {
  void (*limits)(VkPhysicalDeviceTensorPropertiesARM*) = nullptr;  // changes the limits
  bool no_formats = false;                                         // the device supports no format
  int timeouts = 0;                                                // number of waits that time out
  // Records.
  uint64_t timeout = 0;     // of the last wait, in ns
  int freed = 0;            // freed allocations
  std::vector<char> cache;  // initial data of the last pipeline cache
  bool pipelines_use_cache = false;
  VkPipelineCache last_cache = VK_NULL_HANDLE;
};

Hooks hooks;
VulkanFunctions real;

VKAPI_ATTR void VKAPI_CALL properties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2* properties) {
  real.vkGetPhysicalDeviceProperties2(device, properties);
  auto* tensor = static_cast<VkPhysicalDeviceTensorPropertiesARM*>(properties->pNext);
  if (hooks.limits != nullptr && tensor != nullptr) {
    hooks.limits(tensor);
  }
}

VKAPI_ATTR void VKAPI_CALL format2(VkPhysicalDevice device, VkFormat format, VkFormatProperties2* properties) {
  real.vkGetPhysicalDeviceFormatProperties2(device, format, properties);
  if (hooks.no_formats) {
    static_cast<VkTensorFormatPropertiesARM*>(properties->pNext)->linearTilingTensorFeatures = 0;
  }
}

VKAPI_ATTR VkResult VKAPI_CALL wait_for_fences(VkDevice device, uint32_t count, const VkFence* fences, VkBool32 all,
                                               uint64_t timeout) {
  hooks.timeout = timeout;
  if (hooks.timeouts > 0) {
    --hooks.timeouts;
    return VK_TIMEOUT;
  }
  return real.vkWaitForFences(device, count, fences, all, timeout);
}

VKAPI_ATTR void VKAPI_CALL free_memory(VkDevice device, VkDeviceMemory memory, const VkAllocationCallbacks* allocator) {
  ++hooks.freed;
  real.vkFreeMemory(device, memory, allocator);
}

VKAPI_ATTR VkResult VKAPI_CALL create_cache(VkDevice device, const VkPipelineCacheCreateInfo* info,
                                            const VkAllocationCallbacks* allocator, VkPipelineCache* cache) {
  const char* data = static_cast<const char*>(info->pInitialData);
  hooks.cache.assign(data, data + info->initialDataSize);
  const VkResult result = real.vkCreatePipelineCache(device, info, allocator, cache);
  hooks.last_cache = *cache;
  return result;
}

VKAPI_ATTR VkResult VKAPI_CALL create_pipelines(VkDevice device, VkDeferredOperationKHR operation,
                                                VkPipelineCache cache, uint32_t count,
                                                const VkDataGraphPipelineCreateInfoARM* infos,
                                                const VkAllocationCallbacks* allocator, VkPipeline* pipelines) {
  hooks.pipelines_use_cache = cache != VK_NULL_HANDLE && cache == hooks.last_cache;
  return real.vkCreateDataGraphPipelinesARM(device, operation, cache, count, infos, allocator, pipelines);
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL get_device_proc(VkDevice device, const char* name) {
  const std::string wanted = name;
  return wanted == "vkWaitForFences"                 ? reinterpret_cast<PFN_vkVoidFunction>(wait_for_fences)
         : wanted == "vkFreeMemory"                  ? reinterpret_cast<PFN_vkVoidFunction>(free_memory)
         : wanted == "vkCreatePipelineCache"         ? reinterpret_cast<PFN_vkVoidFunction>(create_cache)
         : wanted == "vkCreateDataGraphPipelinesARM" ? reinterpret_cast<PFN_vkVoidFunction>(create_pipelines)
                                                     : real.vkGetDeviceProcAddr(device, name);
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL get_instance_proc(VkInstance instance, const char* name) {
  const std::string wanted = name;
  return wanted == "vkGetPhysicalDeviceProperties2"         ? reinterpret_cast<PFN_vkVoidFunction>(properties2)
         : wanted == "vkGetPhysicalDeviceFormatProperties2" ? reinterpret_cast<PFN_vkVoidFunction>(format2)
         : wanted == "vkGetDeviceProcAddr"                  ? reinterpret_cast<PFN_vkVoidFunction>(get_device_proc)
                                                            : real.vkGetInstanceProcAddr(instance, name);
}

// An application's device, created without the backend on the first physical device.
struct ApplicationDevice {
  VulkanFunctions fn;
  VulkanHandles handles{};

  ApplicationDevice() {
    fn.vkGetInstanceProcAddr = find_vulkan_loader();
    const char* layers[] = {"VK_LAYER_ML_Graph_Emulation", "VK_LAYER_ML_Tensor_Emulation"};
    VkApplicationInfo application{};
    application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    application.apiVersion = VK_API_VERSION_1_3;
    VkInstanceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    info.pApplicationInfo = &application;
    info.enabledLayerCount = 2;
    info.ppEnabledLayerNames = layers;
    const auto create = reinterpret_cast<PFN_vkCreateInstance>(fn.vkGetInstanceProcAddr(nullptr, "vkCreateInstance"));
    check(create(&info, nullptr, &handles.instance) == VK_SUCCESS, "the application's instance");
    check(fn.load_instance(handles.instance) == Error::Ok, "functions of the instance");
    uint32_t count = 1;
    fn.vkEnumeratePhysicalDevices(handles.instance, &count, &handles.physical_device);
    check(count == 1, "a physical device");
    create_device();
    check(fn.load_device(handles.device) == Error::Ok, "functions of the device");
    fn.vkGetDeviceQueue(handles.device, handles.queue_family, 0, &handles.queue);
    handles.get_instance_proc_addr = fn.vkGetInstanceProcAddr;
  }

  void create_device() {
    VkPhysicalDeviceDataGraphFeaturesARM graph{};
    graph.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DATA_GRAPH_FEATURES_ARM;
    graph.dataGraph = graph.dataGraphShaderModule = VK_TRUE;
    VkPhysicalDeviceTensorFeaturesARM tensor{};
    tensor.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TENSOR_FEATURES_ARM;
    tensor.pNext = &graph;
    tensor.tensors = tensor.shaderTensorAccess = VK_TRUE;
    VkPhysicalDeviceVulkan13Features core13{};
    core13.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES;
    core13.pNext = &tensor;
    core13.synchronization2 = core13.maintenance4 = VK_TRUE;
    VkPhysicalDeviceVulkan12Features core12{};
    core12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    core12.pNext = &core13;
    core12.shaderInt8 = core12.storageBuffer8BitAccess = core12.vulkanMemoryModel = VK_TRUE;
    VkPhysicalDeviceFeatures2 features{};
    features.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    features.pNext = &core12;
    features.features.shaderInt16 = features.features.shaderInt64 = VK_TRUE;
    const float priority = 1.0F;
    VkDeviceQueueCreateInfo queue{};
    queue.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    queue.queueCount = 1;
    queue.pQueuePriorities = &priority;
    const char* extensions[] = {VK_ARM_TENSORS_EXTENSION_NAME, VK_ARM_DATA_GRAPH_EXTENSION_NAME};
    VkDeviceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    info.pNext = &features;
    info.queueCreateInfoCount = 1;
    info.pQueueCreateInfos = &queue;
    info.enabledExtensionCount = 2;
    info.ppEnabledExtensionNames = extensions;
    check(fn.vkCreateDevice(handles.physical_device, &info, nullptr, &handles.device) == VK_SUCCESS,
          "the application's device");
  }

  ~ApplicationDevice() {
    fn.vkDestroyDevice(handles.device, nullptr);
    fn.vkDestroyInstance(handles.instance, nullptr);
  }
};

void test_application_device(const Model& model) {
  std::mutex mutex;
  ApplicationDevice application;
  application.handles.queue_mutex = &mutex;
  VulkanHandles incomplete = application.handles;
  incomplete.queue = VK_NULL_HANDLE;
  check(set_vulkan_device(&incomplete) == Error::InvalidArgument, "a null queue");
  check(set_vulkan_device(&application.handles) == Error::Ok, "the application's handles");
  {
    const Program program(model);
    program.run();
    mutex.lock();
    std::thread other([&program] { program.run(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    mutex.unlock();
    other.join();
    check(set_vulkan_device(nullptr) == Error::Ok, "back to a device of the backend's own");
    const Program own(model);
    own.run();
    program.run();
  }
}

// During this object's lifetime, the backend runs on an application's device with the replaced functions.
class HookedDevice {
 public:
  HookedDevice() { renew(); }
  ~HookedDevice() { check(set_vulkan_device(nullptr) == Error::Ok, "a device of its own"); }

  // Resets `hooks` and makes the next program query the device again.
  void renew() {
    real = application_.fn;
    hooks = Hooks();
    VulkanHandles handles = application_.handles;
    handles.get_instance_proc_addr = get_instance_proc;
    check(set_vulkan_device(&handles) == Error::Ok, "a device with replaced functions");
    logged.clear();
  }

 private:
  ApplicationDevice application_;
};

bool was_logged(const char* text) { return logged.size() == 1 && logged[0].find(text) != std::string::npos; }

// Returns the error of loading a program.
Error load(const Model& model) {
  std::vector<char> vgf = model.vgf;
  FreeableBuffer payload(vgf.data(), vgf.size(), nullptr);
  BackendInitContext context(nullptr);
  logged.clear();
  const auto handle = Program::backend()->init(context, &payload, {});
  if (handle.ok()) {
    Program::backend()->destroy(*handle);
  }
  return handle.error();
}

void test_limits(const Model& model) {
  using Limits = VkPhysicalDeviceTensorPropertiesARM;
  const struct {
    const char* name;
    void (*set)(Limits*);
  } cases[] = {
      {"maxTensorDimensionCount", [](Limits* limits) { limits->maxTensorDimensionCount = 3; }},
      {"maxTensorElements", [](Limits* limits) { limits->maxTensorElements = 3 * 8 * 8 - 1; }},
      {"maxPerDimensionTensorElements", [](Limits* limits) { limits->maxPerDimensionTensorElements = 7; }},
      {"maxTensorStride", [](Limits* limits) { limits->maxTensorStride = 8; }},
      {"maxTensorSize", [](Limits* limits) { limits->maxTensorSize = 3 * 8 * 8 - 1; }},
  };
  HookedDevice device;
  for (const auto& limit : cases) {
    device.renew();
    hooks.limits = limit.set;
    check(load(model) == Error::NotSupported && was_logged(limit.name), limit.name);
  }
  device.renew();
  hooks.no_formats = true;
  check(load(model) == Error::NotSupported && was_logged("because of its format; "), "formats");
  device.renew();
  check(load(model) == Error::Ok && logged.empty(), "the true limits");
}

void test_timeouts(const Model& model) {
  HookedDevice device;
  Argument input(model.input, ScalarType::Char);
  Argument output(std::vector<char>(model.output.size(), 99), ScalarType::Char);
  const std::vector<EValue*> arguments{&input.value, &output.value};
  {
    const Program program(model);
    hooks.timeouts = 2;  // the wait of this execution, and the wait for it at the start of the next execution
    for (int turn = 0; turn < 2; ++turn) {
      logged.clear();
      check(program.execute(arguments) == Error::InvalidState, "no result in time");
      check(was_logged("no result from the device after 60000 ms; set a longer time with ARM_RUNTIME_VGF_TIMEOUT_MS"),
            "exactly one line is logged");
      check(output.data == std::vector<char>(model.output.size(), 99), "no output is written");
    }
    check(hooks.timeouts == 0 && hooks.timeout == 60'000'000'000, "bounded waits");
    program.run();
    hooks.timeouts = 1;
    check(program.execute(arguments) == Error::InvalidState, "no result in time");
    hooks.freed = 0;
  }
  check(hooks.freed > 0, "a program whose run ends late is freed");
  setenv("ARM_RUNTIME_VGF_TIMEOUT_MS", "5000", 1);
  device.renew();
  Program(model).run();
  check(hooks.timeout == 5'000'000'000, "the timeout of the environment variable");
  for (const char* wrong : {"soon", "0"}) {
    setenv("ARM_RUNTIME_VGF_TIMEOUT_MS", wrong, 1);
    device.renew();
    check(load(model) == Error::InvalidArgument, "an invalid timeout");
  }
  unsetenv("ARM_RUNTIME_VGF_TIMEOUT_MS");
}

void test_memory_in_use_is_kept(const Model& model) {
  const __lsan::ScopedDisabler kept;  // the program and the device that it uses are never freed
  auto* const device = new HookedDevice;
  Argument input(model.input, ScalarType::Char);
  Argument output(model.output, ScalarType::Char);
  const std::vector<EValue*> arguments{&input.value, &output.value};
  {
    const Program program(model);
    hooks.timeouts = 1'000;
    check(program.execute(arguments) == Error::InvalidState, "no result in time");
    hooks.freed = 0;
    logged.clear();
  }
  check(hooks.freed == 0, "memory that the device may use is not freed");
  check(logged.size() == 2 && logged[1].find("the memory of its program stays in use") != std::string::npos,
        "the log names the kept memory");
  device->renew();
  check(set_vulkan_device(nullptr) == Error::Ok, "a device of its own");
}

void test_pipeline_cache(const Model& model) {
  char path[] = "/tmp/arm_runtime_cacheXXXXXX";
  const int file = mkstemp(path);
  check(file >= 0, "a temporary file");
  close(file);
  HookedDevice device;
  check(load(model) == Error::Ok && hooks.pipelines_use_cache, "pipelines are made with the cache");
  hooks.cache.clear();
  setenv("ARM_RUNTIME_VGF_PIPELINE_CACHE", path, 1);  // an empty file is not a cache
  check(load(model) == Error::Ok && !hooks.cache.empty(), "the cache keeps pipelines of unloaded programs");
  const std::vector<char> written = bytes_of(path);
  check(written.size() > 4, "the file is written");
  check(load(model) == Error::Ok && std::equal(hooks.cache.begin(), hooks.cache.end(), written.begin()) &&
            hooks.cache.size() == written.size() - 4,
        "the file is read");
  std::ofstream(path, std::ios::binary) << std::string(written.begin(), written.end() - 5);
  check(load(model) == Error::Ok && logged.empty(), "a damaged file is not read");
  setenv("ARM_RUNTIME_VGF_PIPELINE_CACHE", "/nowhere/cache", 1);
  check(load(model) == Error::Ok && was_logged("'/nowhere/cache' could not be written"),
        "a path that cannot be written");
  unsetenv("ARM_RUNTIME_VGF_PIPELINE_CACHE");
  std::remove(path);
}

void test_device_is_chosen(const Model& model) {
  for (const char* choice : {"llvmpipe", "0"}) {
    setenv("ARM_RUNTIME_VGF_DEVICE", choice, 1);
    check(load(model) == Error::Ok, choice);
  }
  for (const char* choice : {"Mali", "7"}) {
    setenv("ARM_RUNTIME_VGF_DEVICE", choice, 1);
    check(load(model) == Error::NotFound && was_logged("names no Vulkan device that runs"), choice);
  }
  unsetenv("ARM_RUNTIME_VGF_DEVICE");
}

void test_traces(const Model& model) {
  RecordingTracer tracer;
  std::vector<char> vgf = model.vgf;
  FreeableBuffer payload(vgf.data(), vgf.size(), nullptr);
  BackendInitContext context(nullptr, &tracer);
  const auto handle = Program::backend()->init(context, &payload, {});
  check(handle.ok(), "init");
  Program::backend()->destroy(*handle);
  const Program program(model);
  Argument input(model.input, ScalarType::Char);
  Argument output(model.output, ScalarType::Char);
  check(program.execute({&input.value, &output.value}, &tracer) == Error::Ok, "execute");
  check(tracer.events == std::vector<std::string>{"VgfBackend load", "VgfBackend device", "VgfBackend execute"},
        "events");
}

}  // namespace

int main(int argc, char** argv) {
  check(argc == 4 || argc == 5, "usage: backend_test VGF INPUT OUTPUT [CASE TO LEAVE OUT]");
  executorch::runtime::runtime_init();
  check(executorch::runtime::register_pal(executorch::runtime::PalImpl::create(record_errors, __FILE__)), "the log");
  // Keep the driver loaded: the Vulkan loader closes drivers, and LeakSanitizer would report memory that a closed
  // driver has cached.
  check(dlopen("libvulkan_lvp.so", RTLD_NOW | RTLD_NODELETE) != nullptr, "Mesa's CPU driver");
  const Model model{bytes_of(argv[1]), bytes_of(argv[2]), bytes_of(argv[3])};
  const struct {
    const char* name;
    void (*run)(const Model&);
  } cases[] = {{"repeated runs", test_repeated_runs},
               {"wrong arguments", test_wrong_arguments},
               {"uint8 argument of int8 input", test_uint8_argument},
               {"two programs", test_two_programs},
               {"two threads", test_two_threads},
               {"checksum", test_checksum},
               {"application's device", test_application_device},
               {"limits", test_limits},
               {"timeouts", test_timeouts},
               {"memory in use is kept", test_memory_in_use_is_kept},
               {"pipeline cache", test_pipeline_cache},
               {"device is chosen", test_device_is_chosen},
               {"traces", test_traces}};
  for (const auto& entry : cases) {
    if (argc == 5 && std::strcmp(argv[4], entry.name) == 0) {
      continue;
    }
    entry.run(model);
    std::printf("%s ok\n", entry.name);
    std::fflush(stdout);
  }
  return 0;
}
