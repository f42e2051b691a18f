// The packed layouts of linear layers and the kernels of each instruction-set path; internal to linear*.cpp.
//
// Outputs come in tiles of 32, rows of x in tiles of at most `max_tile_rows`. n is padded to whole tiles and
// k to whole groups with zeros.
//
// Both sides of int8 are transformed in groups of 64 inputs, see hadamard.hpp. Weights: for each tile of
// outputs, for each group of 64 inputs, one WeightGroup. The bytes are stored plus `weight_offset`, so that
// an instruction that multiplies unsigned by signed bytes can take them as unsigned. int8 activations: for
// each tile of R rows, for each group, R · 72 bytes:
//   int8  values[16][R][4]   input 4i + j of the group, row r, is values[i][r][j]
//   float scales[R]
//   int32 starts[R]          -weight_offset · Σ values: where the integer accumulator starts
// float32 weights: for each tile of outputs, float[k][32]. float32 activations: for each tile of R rows,
// float[k][R].
#pragma once

#include <cstdint>

namespace everystop {

constexpr int64_t kTileOutputs = 32;
constexpr int64_t kGroup = 64;
constexpr int64_t kGroupBytesPerRow = kGroup + sizeof(float) + sizeof(int32_t);

struct WeightGroup {
  uint8_t values[kGroup / 4][kTileOutputs][4];  // input 4i + j of the group, output o: values[i][o][j]
  float scales[kTileOutputs];
};

// Where one tile of results goes: outputs [0, num_outputs) of y, rows ldy floats apart. `bias` may be null.
struct TileOutput {
  const float* bias;
  float* y;
  int64_t ldy;
  int num_outputs;
};

// Memory to bring into the second-level cache meanwhile: with each group (64 inputs), as many lines of 64
// bytes. `later` is read after the whole layer only.
struct Prefetch {
  const uint8_t* start;
  int lines_per_group;
  const uint8_t* later;
  int later_lines_per_group;
};

struct LinearKernels {
  const char* int8_layout;
  const char* float32_layout;
  int max_tile_rows;
  int weight_offset;
  // Runs `iterations` of 12 independent byte dot products in registers, the most this path can do, into
  // `sink`; returns the multiply-adds done. For benchmarks; null on the portable path.
  int64_t (*dot_in_registers)(int64_t iterations, int32_t* sink);
  // Quantises `rows` rows of x [rows, k], ldx floats apart, into one tile of activations.
  void (*quantize_tile)(const float* x, int64_t ldx, int rows, int64_t k, uint8_t* activations);
  void (*int8_tile)(const WeightGroup* weights, const uint8_t* activations, int rows, int64_t num_groups,
                    const Prefetch& ahead, const TileOutput& out);
  void (*float32_tile)(const float* weights, const float* activations, int rows, int64_t k,
                       const Prefetch& ahead, const TileOutput& out);
};

// Each is defined in the file named after it, and may be called only where that path is supported.
const LinearKernels& linear_kernels_portable();
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avxvnni();
const LinearKernels& linear_kernels_avx512();
const LinearKernels& linear_kernels_neon();

// The kernels of active_isa().
const LinearKernels& linear_kernels();

}  // namespace everystop
