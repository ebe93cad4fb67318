// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "emulator/operation.h"

namespace arm_runtime::npu {

// Memory that operations access: regions, lookup tables and internal buffers. Loading a program determines the sizes.
struct NpuState {
  Region regions[kRegions];
  uint8_t tables[kTableBytes] = {};
  bool u85 = false;
  // U55 with 32 and 64 MACs: an operation without a table overwrites the tables in the 16 KiB of internal memory.
  bool clobbers_tables = false;
  // Contents of the buffers inside the NPU that hold chained tensors, by buffer number.
  std::vector<int32_t> chains[kRegions];
  // The IFM as a dense array, after subtraction of its zero point: int16 for convolutions, int32 for pools and RESIZE.
  std::vector<int16_t> ifm_int16;
  std::vector<int32_t> ifm_int32;
  std::vector<int16_t> patch;            // the inputs of one output pixel of a convolution (im2col)
  std::vector<int16_t> dynamic_weights;  // the weights of a convolution that come from IFM2
  std::vector<int64_t> row[3];
  // Accumulators that an operation leaves to the next one.
  std::vector<int64_t> accumulators;

  // Allocates the buffers that an operation needs. Called only while a program is loaded.
  void reserve(const Operation& operation);
};

// Output stage: scales the accumulators of a pixel, applies the activation and stores the result.
class OutputStage {
 public:
  OutputStage(const Operation& operation, NpuState* state) : op_(operation), state_(*state) {}

  // `values` has an entry for each channel of the output, and is overwritten.
  void write(int32_t y, int32_t x, int64_t* values) const;

 private:
  void scale(int64_t* values) const;
  void apply_activation(int64_t* values) const;
  void store(int32_t y, int32_t x, const int64_t* values) const;

  const Operation& op_;
  NpuState& state_;
};

// Fetches a pixel of an input, from memory or from a chain's buffer.
template <typename T>
void fetch(const NpuState& state, const FeatureMap& map, int32_t y, int32_t x, T* out) {
  if (map.storage != Storage::kChained) {
    load_pixel(map, state.regions[map.region].data, y, x, out);
    return;
  }
  const int32_t* from = state.chains[map.region].data() + (int64_t{y} * map.width + x) * map.depth;
  for (int32_t c = 0; c < map.depth; ++c) {
    out[c] = static_cast<T>(int64_t{from[c]} - map.zero_point);
  }
}

// Initializes the accumulators of an output pixel: with `start`, with 32-bit or 48-bit values of IFM2, or with the
// accumulators of the previous operation.
void init_accumulators(const NpuState& state, const Operation& op, int32_t y, int32_t x, int64_t start, int64_t* out);

void run_convolution(const Operation& operation, NpuState* state);
void run_depthwise(const Operation& operation, NpuState* state);
void run_pool(const Operation& operation, NpuState* state);
void run_elementwise(const Operation& operation, NpuState* state);
void run_resize(const Operation& operation, NpuState* state);
// Of these functions, only run_dma() can fail. The bounds of DMAs are checked at run time, because the addresses of a
// gather or scatter depend on indices in memory.
Status run_dma(const Operation& operation, NpuState* state);

}  // namespace arm_runtime::npu
