// The oracle of the linear kernels: one output at a time, straight from the definitions in linear.hpp.
#include <cmath>
#include <vector>

#include "linear.hpp"
#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

struct QuantizedRow {
  std::vector<int8_t> values;
  std::vector<float> scales;
};

QuantizedRow quantize_row(const float* x, int64_t k) {
  const int64_t num_groups = (k + kGroup - 1) / kGroup;
  QuantizedRow row{std::vector<int8_t>(static_cast<size_t>(num_groups * kGroup)),
                   std::vector<float>(static_cast<size_t>(num_groups))};
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t first = g * kGroup;
    const int64_t count = k - first < kGroup ? k - first : kGroup;
    row.scales[static_cast<size_t>(g)] = quantize_group(x + first, count, row.values.data() + first);
  }
  return row;
}

float int8_output(const WeightGroup* tile, int64_t output, const QuantizedRow& row) {
  const int offset = linear_kernels().weight_offset;
  float sum = 0.0f;
  for (size_t g = 0; g < row.scales.size(); ++g) {
    int32_t dot = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      const uint8_t stored = tile[g].values[i / 4][output][i % 4];
      const int weight = offset == 0 ? static_cast<int8_t>(stored) : stored - offset;
      dot += weight * row.values[g * kGroup + static_cast<size_t>(i)];
    }
    sum = std::fma(static_cast<float>(dot), tile[g].scales[output] * row.scales[g], sum);
  }
  return sum;
}

float float32_output(const float* tile, int64_t output, const float* x, int64_t k) {
  float sum = 0.0f;
  for (int64_t i = 0; i < k; ++i) sum = std::fma(x[i], tile[i * kTileOutputs + output], sum);
  return sum;
}

}  // namespace

void linear_naive(Dtype dtype, const uint8_t* packed, const float* x, int64_t m, int64_t n, int64_t k,
                  const float* bias, float* y) {
  const size_t tile_bytes = packed_linear_bytes(dtype, kTileOutputs, k);
  for (int64_t row = 0; row < m; ++row) {
    const QuantizedRow quantized = quantize_row(x + row * k, k);
    for (int64_t j = 0; j < n; ++j) {
      const uint8_t* tile = packed + static_cast<size_t>(j / kTileOutputs) * tile_bytes;
      const int64_t output = j % kTileOutputs;
      const float sum = dtype == Dtype::int8
                            ? int8_output(reinterpret_cast<const WeightGroup*>(tile), output, quantized)
                            : float32_output(reinterpret_cast<const float*>(tile), output, x + row * k, k);
      y[row * n + j] = bias == nullptr ? sum : sum + bias[j];
    }
  }
}

}  // namespace everystop
