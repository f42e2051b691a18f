// Linear kernels in plain C++, for any CPU. The float32 chain multiplies and adds in two roundings.
#include <cstring>

#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

constexpr int kMaxRows = 4;

// a · b + c rounded once, without the instruction: the product is exact in double, and the sum is rounded to
// odd there, which makes the second rounding harmless (Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums", 2008).
float multiply_add(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = static_cast<double>(c);
  double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  if ((error > 0 || error < 0) && bits % 2 == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
  std::memcpy(&sum, &bits, sizeof sum);
  return static_cast<float>(sum);
}

void store_row(const float* sum, int row, const TileOutput& out) {
  for (int o = 0; o < out.num_outputs; ++o) {
    out.y[row * out.ldy + o] = out.bias == nullptr ? sum[o] : sum[o] + out.bias[o];
  }
}

void add_group(const WeightGroup& group, const int8_t* quads, int rows, float scale, float* sum) {
  int32_t dot[kTileOutputs] = {};
  for (int quad = 0; quad < kGroup / 4; ++quad) {
    const int8_t* a = quads + quad * rows * 4;
    for (int o = 0; o < kTileOutputs; ++o) {
      int32_t partial = 0;
      for (int i = 0; i < 4; ++i) partial += a[i] * static_cast<int8_t>(group.values[quad][o][i]);
      dot[o] += partial;
    }
  }
  for (int o = 0; o < kTileOutputs; ++o) {
    sum[o] = multiply_add(static_cast<float>(dot[o]), group.scales[o] * scale, sum[o]);
  }
}

void int8_tile(const WeightGroup* weights, const uint8_t* activations, int rows, int64_t num_groups,
               const Prefetch&, const TileOutput& out) {
  float sum[kMaxRows][kTileOutputs] = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    const uint8_t* tile = activations + g * rows * kGroupBytesPerRow;
    for (int r = 0; r < rows; ++r) {
      float scale;
      std::memcpy(&scale, tile + rows * kGroup + r * sizeof scale, sizeof scale);
      add_group(weights[g], reinterpret_cast<const int8_t*>(tile) + 4 * r, rows, scale, sum[r]);
    }
  }
  for (int r = 0; r < rows; ++r) store_row(sum[r], r, out);
}

void float32_tile(const float* weights, const float* activations, int rows, int64_t k, const Prefetch&,
                  const TileOutput& out) {
  for (int r = 0; r < rows; ++r) {
    float sum[kTileOutputs] = {};
    for (int64_t i = 0; i < k; ++i) {
      const float a = activations[i * rows + r];
      for (int o = 0; o < kTileOutputs; ++o) sum[o] += a * weights[i * kTileOutputs + o];
    }
    store_row(sum, r, out);
  }
}

void quantize_tile(const float* x, int64_t ldx, int rows, int64_t k, uint8_t* activations) {
  quantize_rows(x, ldx, rows, k, 0, activations);
}

}  // namespace

const LinearKernels& linear_kernels_portable() {
  static constexpr LinearKernels kernels{
      "int8-g64-s8x32-v2", "float32-x32-v1", kMaxRows, 0, nullptr, quantize_tile, int8_tile, float32_tile,
  };
  return kernels;
}

}  // namespace everystop
