#include "attention.hpp"

#include <cmath>
#include <cstring>
#include <vector>

namespace everystop {

// Enough query vectors to reuse each key and value that was loaded, few enough for their scores to stay in
// L1.
int64_t attention_tile_rows(int64_t group) {
  int64_t rows = 1;
  while (rows < kMaxAttentionTileRows && rows * 2 * group <= 24) rows *= 2;
  return rows;
}

int64_t attention_scratch_floats(const KvLayout& layout, int64_t group) {
  const int64_t queries = attention_tile_rows(group) * group;
  constexpr int64_t kMostTileQueries = 8;  // of any instruction set
  return queries * layout.value_stride() + kMostTileQueries * kAttentionSplit +
         2 * attention_partial_floats(layout, group);
}

int64_t attention_partial_floats(const KvLayout& layout, int64_t group) {
  return (attention_tile_rows(group) * group * (layout.value_stride() + 2) + 15) / 16 * 16;
}

float half_to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 31u;
  const uint32_t mantissa = value.bits & 1023u;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

namespace {

double element(const void* data, KvType type, int64_t index) {
  if (type == KvType::int8) return static_cast<const int8_t*>(data)[index];
  if (type == KvType::float16) return half_to_float(static_cast<const Half*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

// What elements of a head whose keys begin at `index` are multiplied by, of token `offset` in its block.
double scale(const KvLayout& layout, const void* keys, int64_t index, int64_t offset, bool of_values) {
  if (!layout.is_integer()) return 1.0;
  float value;
  const int64_t end = index + layout.unscaled_key_rows() * layout.block_size;
  const uint8_t* scales = static_cast<const uint8_t*>(keys) + end * layout.element_bytes();
  std::memcpy(&value, scales + 4 * (offset + (of_values ? layout.block_size : 0)), sizeof value);
  return value;
}

}  // namespace

void attend_naive(const KvLayout& layout, const void* keys, const void* values, const AttentionTile& tile) {
  const int64_t dim = layout.head_dim, size = layout.block_size;
  const auto first_key = [&](int64_t t) {  // of the tile's head in the block of position t
    return tile.block_table[t / size] * layout.block_stride + tile.kv_head * layout.key_rows() * size;
  };
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    const int64_t num_keys = tile.first_position + row + 1;
    std::vector<double> weights(static_cast<size_t>(num_keys));
    for (int64_t head = 0; head < tile.group; ++head) {
      const float* q = tile.queries + row * tile.query_stride + head * dim;
      double largest = -INFINITY, sum = 0.0;
      for (int64_t t = 0; t < num_keys; ++t) {
        const int64_t first = first_key(t);
        double score = 0.0;
        for (int64_t d = 0; d < dim; ++d)
          score += q[d] * element(keys, layout.type, first + layout.key_index(d, t % size));
        weights[static_cast<size_t>(t)] = score * scale(layout, keys, first, t % size, false) * tile.scale;
        largest = std::max(largest, weights[static_cast<size_t>(t)]);
      }
      for (double& weight : weights) sum += weight = std::exp(weight - largest);
      for (int64_t d = 0; d < dim; ++d) {
        double total = 0.0;
        for (int64_t t = 0; t < num_keys; ++t) {
          const int64_t value =
              tile.block_table[t / size] * layout.block_stride + tile.kv_head * size * layout.value_stride();
          total += weights[static_cast<size_t>(t)] * scale(layout, keys, first_key(t), t % size, true) *
                   element(values, layout.type, value + layout.value_index(t % size, d));
        }
        tile.out[row * tile.out_stride + head * dim + d] = static_cast<float>(total / sum);
      }
    }
  }
}

}  // namespace everystop
