// SPDX-License-Identifier: Apache-2.0
#include "emulator/emulator_abi.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "emulator/program.h"

namespace npu = arm_runtime::npu;

struct ethosu_emulator_program {
  npu::Program program;
};

static_assert(npu::kUninitialized == ETHOSU_EMULATOR_UNINITIALIZED && npu::kHazard == ETHOSU_EMULATOR_HAZARD);

namespace {

int32_t report_error(const npu::Status& status, ethosu_emulator_error* error) {
  if (!status.ok()) {
    error->offset = status.offset;
    status.describe(error->text, sizeof(error->text));
  }
  return static_cast<int32_t>(status.error);
}

// Reports an exception of a C++ container, which means that memory is exhausted.
void report_error(const std::exception& exception, ethosu_emulator_error* error) {
  error->offset = 0;
  std::snprintf(error->text, sizeof(error->text), "the program is too large: %s", exception.what());
}

npu::Status execute(npu::Program* program, void* const* regions, size_t first, size_t last) {
  uint8_t* bases[npu::kRegions];
  for (int i = 0; i < npu::kRegions; ++i) {
    bases[i] = static_cast<uint8_t*>(regions[i]);
  }
  return program->execute(bases, first, last);
}

std::vector<npu::ByteRange> to_byte_ranges(const ethosu_emulator_byte_range* from, uint64_t count) {
  std::vector<npu::ByteRange> result;
  for (uint64_t i = 0; i < count; ++i) {
    if (from[i].region < npu::kRegions) {
      const auto start = static_cast<int64_t>(from[i].offset);
      result.push_back({static_cast<uint8_t>(from[i].region), start, start + static_cast<int64_t>(from[i].size)});
    }
  }
  return result;
}

void fill_dma(const npu::Dma& dma, ethosu_emulator_operation* to) {
  const bool moves = dma.count0 * dma.count1 > 0 && dma.length > 0 && dma.length <= INT32_MAX && !dma.is_scatter;
  to->region = dma.to_tables ? npu::kTableRegion : dma.target_region;
  to->address = dma.target;
  to->element_size = moves ? 1 : 0;
  to->indexed = dma.is_gather || dma.is_scatter ? 1 : 0;
  to->shape[0] = static_cast<int32_t>(dma.count1);
  to->shape[1] = static_cast<int32_t>(dma.count0);
  to->shape[2] = moves ? static_cast<int32_t>(dma.length) : 0;
}

void fill_output(const npu::Operation& op, ethosu_emulator_operation* to) {
  const npu::FeatureMap map = op.ofm_in_memory();
  const bool chained = map.storage == npu::Storage::kChained;
  to->region = op.writes_memory() ? map.region : -1;
  to->address = op.writes_memory() ? map.base[0] : 0;
  to->element_size = op.keeps_accumulators ? 0 : chained ? 4 : map.element_size;
  to->is_signed = chained || map.is_signed ? 1 : 0;
  to->zero_point = map.zero_point;
  // A chained tensor is stored in the order in which it is computed.
  const npu::FeatureMap& source = chained ? op.ofm : map;
  const int32_t shape[] = {source.height, source.width, source.depth};
  std::copy_n(shape, 3, to->shape);
}

}  // namespace

ethosu_emulator_program* ethosu_emulator_load(const void* stream, uint64_t stream_size, const void* weights,
                                              const uint64_t* sizes, ethosu_emulator_error* error) try {
  auto loaded = std::make_unique<ethosu_emulator_program>();
  const npu::Bytes constants{static_cast<const uint8_t*>(weights), static_cast<size_t>(sizes[0])};
  const npu::Status status =
      loaded->program.load(static_cast<const uint8_t*>(stream), static_cast<size_t>(stream_size), constants, sizes);
  return report_error(status, error) == 0 ? loaded.release() : nullptr;
} catch (const std::exception& exception) {
  report_error(exception, error);
  return nullptr;
}

int32_t ethosu_emulator_execute(ethosu_emulator_program* program, void* const* regions, ethosu_emulator_error* error) {
  return report_error(execute(&program->program, regions, 0, program->program.operation_count()), error);
}

int32_t ethosu_emulator_step(ethosu_emulator_program* program, uint64_t index, void* const* regions,
                             ethosu_emulator_error* error) {
  const auto first = static_cast<size_t>(index);
  return report_error(execute(&program->program, regions, first, first + 1), error);
}

uint64_t ethosu_emulator_required_size(const ethosu_emulator_program* program, int32_t region) {
  return region >= 0 && region < npu::kRegions ? program->program.required_size(region) : 0;
}

int32_t ethosu_emulator_enable_access_checker(ethosu_emulator_program* program,
                                              const ethosu_emulator_byte_range* inputs, uint64_t input_count,
                                              const ethosu_emulator_byte_range* outputs, uint64_t output_count,
                                              uint32_t fatal_findings, ethosu_emulator_error* error) try {
  program->program.enable_access_checker(to_byte_ranges(inputs, input_count), to_byte_ranges(outputs, output_count),
                                         fatal_findings);
  return 0;
} catch (const std::exception& exception) {
  report_error(exception, error);
  return -1;
}

void ethosu_emulator_get_statistics(ethosu_emulator_program* program, ethosu_emulator_statistics* statistics) {
  *statistics = {};
  statistics->operations = program->program.operation_count();
  statistics->commands = program->program.command_count();
  npu::AccessChecker* checker = program->program.access_checker();
  if (checker == nullptr) {
    return;
  }
  const npu::ExecutionStatistics measured = checker->statistics();
  statistics->macs = measured.macs;
  statistics->uninitialized = measured.uninitialized;
  statistics->hazards = measured.hazards;
  std::copy_n(measured.bytes_read, npu::kRegions, statistics->bytes_read);
  std::copy_n(measured.bytes_written, npu::kRegions, statistics->bytes_written);
  std::copy_n(measured.peak, npu::kRegions, statistics->peak);
  std::copy_n(measured.touched, npu::kRegions, statistics->touched);
}

int32_t ethosu_emulator_get_operation(ethosu_emulator_program* program, uint64_t index,
                                      ethosu_emulator_operation* operation) {
  if (index >= program->program.operation_count()) {
    return -1;
  }
  *operation = {};
  const npu::Operation& op = program->program.operation(static_cast<size_t>(index));
  operation->name = op.name;
  operation->offset = op.offset;
  operation->commands = op.scheduling.commands;
  if (program->program.access_checker() != nullptr) {
    const npu::OperationStatistics& statistics =
        program->program.access_checker()->operation(static_cast<size_t>(index));
    operation->macs = statistics.macs;
    std::copy_n(statistics.bytes_read, npu::kRegions, operation->bytes_read);
    std::copy_n(statistics.bytes_written, npu::kRegions, operation->bytes_written);
  }
  if (op.kind == npu::Kind::kDma) {
    fill_dma(op.dma, operation);
  } else {
    fill_output(op, operation);
  }
  return 0;
}

int32_t ethosu_emulator_copy_output(const ethosu_emulator_program* program, uint64_t index, void* to, uint64_t size) {
  const bool known = index < program->program.operation_count();
  return known && program->program.copy_output(static_cast<size_t>(index), static_cast<uint8_t*>(to), size) ? 0 : -1;
}

void ethosu_emulator_free(ethosu_emulator_program* program) { delete program; }
